"""What things cost, as data: the objective placement serves, and the report of what was spent.

Defaults are public cloud prices (docs/placement.md says whence): memory and flash as CachedAttention (ATC'24) took them
from AWS, a GPU at 5 $/h, wear from a drive of 100 $/TB rated one write a day for five years. All can be set: one's own
contract decides whether a block pays its rent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvtier.errors import ConfigError

HOUR_S = 3600.0
GB = 1e9
MTOK = 1e6


class TierPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a gigabyte costs in one tier: written once, and held for an hour."""

    wear_per_gb: float = 0.0
    hold_per_gb_hour: float = 0.0

    def wear(self, n_bytes: float) -> float:
        """Cost of writing bytes."""
        return n_bytes / GB * self.wear_per_gb

    def rent(self, n_bytes: float, hold_s: float) -> float:
        """Cost of holding bytes."""
        return n_bytes / GB * self.hold_per_gb_hour * hold_s / HOUR_S

    def write(self, n_bytes: float, hold_s: float) -> float:
        """Cost of writing bytes and holding them."""
        return self.wear(n_bytes) + self.rent(n_bytes, hold_s)


TIERS: dict[str, TierPrice] = {
    "hbm": TierPrice(),  # comes with the GPU
    "dram": TierPrice(0.0, 0.0088),
    "cxl": TierPrice(0.0, 0.0088),
    "nvme": TierPrice(5.5e-5, 8.2e-5),
    "pool": TierPrice(0.0, 0.0088),
    "shared_fs": TierPrice(0.0, 8.2e-5),
}


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prices in one currency. A tier that is not listed costs what its default does; one unknown costs nothing."""

    gpu_per_hour: float = 5.0
    gpus: int = 1
    node_per_hour: float = 0.0
    """What the node costs beside its GPUs and the tiers listed."""
    tiers: dict[str, TierPrice] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        values = {"gpu_per_hour": self.gpu_per_hour, "gpus": self.gpus, "node_per_hour": self.node_per_hour}
        for name, tier in self.tiers.items():
            values[f"tiers.{name}.wear_per_gb"] = tier.wear_per_gb
            values[f"tiers.{name}.hold_per_gb_hour"] = tier.hold_per_gb_hour
        for name, value in values.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"price {name} is {value}; it must be a number of at least 0")

    def of(self, tier: str) -> TierPrice:
        """What a tier costs."""
        return self.tiers.get(tier) or TIERS.get(tier) or TierPrice()

    def compute(self, seconds: float) -> float:
        """Cost of computing for that long on all GPUs."""
        return seconds * self.gpus * self.gpu_per_hour / HOUR_S

    def serving(
        self, seconds: float, capacity_bytes: Mapping[str, float], written_bytes: Mapping[str, float] | None = None
    ) -> float:
        """Cost of serving for that long with tiers of those sizes, all paid for whether used or not, and their wear."""
        rent = sum(self.of(tier).rent(size, seconds) for tier, size in capacity_bytes.items())
        wear = sum(self.of(tier).wear(n) for tier, n in (written_bytes or {}).items())
        return self.compute(seconds) + seconds * self.node_per_hour / HOUR_S + rent + wear

    def per_mtok(
        self,
        seconds: float,
        tokens: float,
        capacity_bytes: Mapping[str, float],
        written_bytes: Mapping[str, float] | None = None,
    ) -> float:
        """Cost of a million tokens, where `tokens` were served in `seconds`. Infinite if none were."""
        total = self.serving(seconds, capacity_bytes, written_bytes)
        return total / tokens * MTOK if tokens > 0 else math.inf

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Prices:
        """Prices as an operator writes them down; `origin` is what an error calls the place. Raises ConfigError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{origin} does not hold prices: {str(error).replace('`', '')}") from error
