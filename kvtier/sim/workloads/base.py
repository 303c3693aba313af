"""What a generated workload is: parameters with defaults, and requests drawn from a seed."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvtier.sim.traces.records import TraceRequest

Positive = Annotated[int, Meta(gt=0)]
Amount = Annotated[float, Meta(gt=0.0, lt=1e9)]
Spread = Annotated[float, Meta(ge=0.0, lt=10.0)]
Share = Annotated[float, Meta(ge=0.0, lt=1.0)]
Chance = Annotated[float, Meta(gt=0.0, le=1.0)]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe for requests. Equal parameters and seeds give equal requests, in every process."""

    kind: ClassVar[str]

    block_tokens: Positive = 512

    @property
    def name(self) -> str:
        """What a replay calls it: its kind and every number that is not the default."""
        mine, defaults = msgspec.structs.asdict(self), msgspec.structs.asdict(type(self)())
        changed = [
            f"{field}={value}"
            for field, value in mine.items()
            if isinstance(value, (int, float)) and field != "block_tokens" and value != defaults[field]
        ]
        return f"workload:{self.kind}" + (f"?{'&'.join(changed)}" if changed else "")

    @property
    def seeded(self) -> bool:
        """Always: another seed is another workload of the same kind."""
        return True

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        """Requests in order of arrival."""
        raise NotImplementedError
