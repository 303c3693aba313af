"""Tool-using agents whose next tool is drawn from a known matrix: what a tool-chain predictor must recover."""

from __future__ import annotations

import msgspec

from kvtier.model.request import BlockType, InputType, StopReason, Transition
from kvtier.sim.traces.records import TraceRequest
from kvtier.sim.workloads.base import Amount, Chance, Positive, Share, Spread, Workload
from kvtier.sim.workloads.writer import Prompt, Writer, Zipf


class Tool(msgspec.Struct, frozen=True):
    """A tool: its mean result in blocks, and how long it runs (log-normal)."""

    name: str
    result_blocks: float
    duration_s: float
    duration_sigma: float = 0.6


TOOLS = (
    Tool("read_file", 6.0, 2.0),
    Tool("search", 2.0, 4.0),
    Tool("edit", 1.0, 3.0),
    Tool("run_tests", 4.0, 45.0),
    Tool("browse", 10.0, 12.0),
)
# Row: the tool just used. Column: the tool called next.
MATRIX = (
    (0.45, 0.15, 0.30, 0.05, 0.05),
    (0.55, 0.20, 0.10, 0.05, 0.10),
    (0.15, 0.05, 0.25, 0.50, 0.05),
    (0.30, 0.10, 0.50, 0.05, 0.05),
    (0.20, 0.30, 0.10, 0.05, 0.35),
)


class AgentWorkload(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sessions` agents that begin within `hours`. After a response the agent either calls a tool (next tool drawn by
    `matrix`, the first by its first row) or, with probability `finish`, ends its turn; then the user comes back with
    probability `resume`, much later. Every `projects` has its own system prompt and tool list."""

    kind = "agent"

    sessions: Positive = 100
    hours: Amount = 4.0
    projects: Positive = 5
    system_blocks: Positive = 20
    task_blocks: Amount = 3.0
    reasoning_blocks: Amount = 1.2
    finish: Chance = 0.1
    resume: Share = 0.5
    think_s: Amount = 200.0
    think_sigma: Spread = 1.3
    tools: tuple[Tool, ...] = TOOLS
    matrix: tuple[tuple[float, ...], ...] = MATRIX

    def __post_init__(self) -> None:
        square = len(self.matrix) == len(self.tools) and all(len(row) == len(self.tools) for row in self.matrix)
        if not square or any(abs(sum(row) - 1.0) > 1e-9 or min(row) < 0.0 for row in self.matrix):
            raise ValueError("`matrix` must have a row and a column for each tool, and rows that sum to 1")

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        writer = Writer(seed, self.block_tokens)
        systems = [writer.fresh(self.system_blocks) for _ in range(self.projects)]
        popularity = Zipf(self.projects, 1.0)
        for session in range(self.sessions):
            prompt = Prompt()
            prompt.add(systems[popularity.pick(writer.random)], BlockType.SYSTEM_PROMPT)
            at_s: float | None = writer.random.uniform(0.0, self.hours * 3600.0)
            while at_s is not None:
                at_s = self._turn(writer, prompt, f"agent-{session}", at_s)
        return writer.finish()

    def _turn(self, writer: Writer, prompt: Prompt, session: str, at_s: float) -> float | None:
        """From a user's message to the end of the agent's turn. Returns when the user is back, if ever."""
        prompt.add(writer.fresh(writer.geometric(self.task_blocks)), BlockType.USER_CONTEXT)
        before, used = -1, -1  # the tools of the last two results; none at the start of a turn
        while True:
            output = writer.geometric(self.reasoning_blocks)
            ends = writer.random.random() < self.finish
            following = -1 if ends else self._next(writer, used)
            writer.write(
                prompt,
                at_s,
                StopReason.END_TURN if ends else StopReason.TOOL_USE,
                session=session,
                input_type=InputType.USER_TEXT if used < 0 else InputType.TOOL_RESULT,
                output_blocks=output,
                tool="" if used < 0 else self.tools[used].name,
                next_tool="" if ends else self.tools[following].name,
                transition=_transition(before, used),
            )
            prompt.add(writer.fresh(output), BlockType.INTERMEDIATE_REASONING)
            if ends:
                back = writer.random.random() < self.resume
                return at_s + writer.lognormal(self.think_s, self.think_sigma) if back else None
            tool = self.tools[following]
            prompt.add(writer.fresh(writer.geometric(tool.result_blocks)), BlockType.TOOL_CONTEXT)
            at_s += writer.lognormal(tool.duration_s, tool.duration_sigma)
            before, used = used, following

    def _next(self, writer: Writer, used: int) -> int:
        return writer.random.choices(range(len(self.tools)), weights=self.matrix[max(used, 0)])[0]


def _transition(before: int, used: int) -> Transition:
    if used < 0:
        return Transition.REASONING_STEP
    return Transition.SAME_TOOL_REPEAT if used == before else Transition.TOOL_SWITCH
