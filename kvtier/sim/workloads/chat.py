"""People talking to assistants: few system prompts, growing conversations, long and irregular pauses."""

from __future__ import annotations

from kvtier.model.request import BlockType, InputType, StopReason
from kvtier.sim.traces.records import TraceRequest
from kvtier.sim.workloads.base import Amount, Positive, Share, Spread, Workload
from kvtier.sim.workloads.writer import Prompt, Writer, Zipf


class ChatWorkload(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sessions` conversations that begin within `hours`; each draws one of `assistants` system prompts."""

    kind = "chat"

    sessions: Positive = 500
    hours: Amount = 2.0
    assistants: Positive = 4
    system_blocks: Positive = 4
    turns: Amount = 5.0
    user_blocks: Amount = 1.5
    answer_blocks: Amount = 1.5
    think_s: Amount = 60.0
    think_sigma: Spread = 1.2
    length_stop: Share = 0.03

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        writer = Writer(seed, self.block_tokens)
        systems = [writer.fresh(self.system_blocks) for _ in range(self.assistants)]
        popularity = Zipf(self.assistants, 1.0)
        for session in range(self.sessions):
            prompt = Prompt()
            prompt.add(systems[popularity.pick(writer.random)], BlockType.SYSTEM_PROMPT)
            at_s = writer.random.uniform(0.0, self.hours * 3600.0)
            for _ in range(writer.geometric(self.turns)):
                prompt.add(writer.fresh(writer.geometric(self.user_blocks)), BlockType.USER_CONTEXT)
                answer = writer.fresh(writer.geometric(self.answer_blocks))
                cut = writer.random.random() < self.length_stop
                writer.write(
                    prompt,
                    at_s,
                    StopReason.LENGTH if cut else StopReason.END_TURN,
                    session=f"chat-{session}",
                    input_type=InputType.USER_TEXT,
                    output_blocks=len(answer),
                )
                prompt.add(answer, BlockType.INTERMEDIATE_REASONING)
                at_s += writer.lognormal(self.think_s, self.think_sigma)
        return writer.finish()
