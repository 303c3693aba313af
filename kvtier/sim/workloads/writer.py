"""What every generator writes with: fresh content, growing conversations, requests in order of time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvtier.model.request import BlockType, InputType, Outcome, RequestContext, RoleSpan, StopReason, Transition
from kvtier.sim.traces.chains import ChainBuilder, pack
from kvtier.sim.traces.records import TraceRequest


class Writer:
    """Collects the requests of one generated workload. All randomness comes from `random`, seeded once."""

    def __init__(self, seed: int, block_tokens: int) -> None:
        self.random = random.Random(seed)
        self.block_tokens = block_tokens
        self._chains = ChainBuilder(1)
        self._content = 0
        self._written: list[TraceRequest] = []

    def fresh(self, blocks: int) -> list[int]:
        """Content that no other prompt has."""
        first = self._content + 1
        self._content += blocks
        return list(range(first, self._content + 1))

    def geometric(self, mean: float) -> int:
        """A whole number from 1 on with this mean."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - self.random.random()) / math.log(1.0 - 1.0 / mean))

    def lognormal(self, median: float, sigma: float) -> float:
        """Most human and machine delays look like this."""
        return median * math.exp(self.random.gauss(0.0, sigma))

    def write(
        self,
        prompt: Prompt,
        at_s: float,
        stop_reason: StopReason,
        *,
        session: str,
        input_type: InputType,
        output_blocks: int = 1,
        tool: str = "",
        next_tool: str = "",
        transition: Transition = Transition.UNKNOWN,
    ) -> None:
        """Add a request with the prompt as it stands."""
        prompt.chain = self._chains.chain(np.array(prompt.content, dtype=np.uint64), prompt.chain)
        self._written.append(
            TraceRequest(
                chain=pack(prompt.chain),
                context=RequestContext(
                    request_id=str(len(self._written)),
                    arrival_s=at_s,
                    prompt_tokens=len(prompt.content) * self.block_tokens,
                    session_id=session,
                    input_type=input_type,
                    tool=tool,
                    transition=transition,
                    role_spans=tuple(prompt.spans),
                ),
                outcome=Outcome(
                    finished_s=at_s,
                    stop_reason=stop_reason,
                    output_tokens=output_blocks * self.block_tokens,
                    next_tool=next_tool,
                ),
            )
        )

    def finish(self) -> list[TraceRequest]:
        """Everything written, in order of arrival."""
        return sorted(self._written, key=lambda request: request.context.arrival_s)


class Prompt:
    """A prompt that grows: content ids, what they are made of, and the chain they make."""

    def __init__(self) -> None:
        self.content: list[int] = []
        self.spans: list[RoleSpan] = []
        self.chain: list[int] = []

    def add(self, content: Sequence[int], kind: BlockType) -> None:
        """Append blocks of one type."""
        start = len(self.content)
        self.content.extend(content)
        self.spans.append(RoleSpan(start_block=start, stop_block=len(self.content), type=kind))


class Zipf:
    """Picks 0 … n - 1 with probability ∝ 1 / (rank + 1)^exponent."""

    def __init__(self, n: int, exponent: float) -> None:
        self._n = range(n)
        self._cumulative = list(accumulate((rank + 1) ** -exponent for rank in range(n)))

    def pick(self, source: random.Random) -> int:
        return source.choices(self._n, cum_weights=self._cumulative)[0]
