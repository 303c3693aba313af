"""Batch jobs over a quiet background: a new long prefix, asked about many times within seconds, never seen again.

Hard on policies that take past popularity for future popularity.
"""

from __future__ import annotations

from kvtier.model.request import BlockType, InputType, StopReason
from kvtier.sim.traces.records import TraceRequest
from kvtier.sim.workloads.base import Amount, Positive, Workload
from kvtier.sim.workloads.writer import Prompt, Writer


class BurstWorkload(Workload, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every `every_s`, `fanout` requests within `width_s` share `shared_blocks`; besides, `clients` steady users come
    back every `period_s` with a prompt of `client_blocks` that grows by one block a time."""

    kind = "bursts"

    hours: Amount = 2.0
    every_s: Amount = 300.0
    fanout: Positive = 60
    width_s: Amount = 20.0
    shared_blocks: Positive = 40
    tail_blocks: Amount = 2.0
    clients: Positive = 20
    client_blocks: Positive = 10
    period_s: Amount = 120.0

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        writer = Writer(seed, self.block_tokens)
        until_s = self.hours * 3600.0
        for client in range(self.clients):
            prompt = Prompt()
            prompt.add(writer.fresh(self.client_blocks), BlockType.SYSTEM_PROMPT)
            at_s = writer.random.uniform(0.0, self.period_s)
            while at_s < until_s:
                self._write(writer, prompt, at_s, f"client-{client}")
                prompt.add(writer.fresh(1), BlockType.USER_CONTEXT)
                at_s += self.period_s * writer.random.uniform(0.5, 1.5)
        at_s, burst = writer.random.uniform(0.0, self.every_s), 0
        while at_s < until_s:
            shared = writer.fresh(self.shared_blocks)
            for member in range(self.fanout):
                prompt = Prompt()
                prompt.add(shared, BlockType.SYSTEM_PROMPT)
                prompt.add(writer.fresh(writer.geometric(self.tail_blocks)), BlockType.USER_CONTEXT)
                self._write(writer, prompt, at_s + writer.random.uniform(0.0, self.width_s), f"burst-{burst}-{member}")
            at_s += writer.random.expovariate(1.0 / self.every_s)
            burst += 1
        return writer.finish()

    def _write(self, writer: Writer, prompt: Prompt, at_s: float, session: str) -> None:
        writer.write(prompt, at_s, StopReason.END_TURN, session=session, input_type=InputType.USER_TEXT)
