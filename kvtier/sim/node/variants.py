"""What a replayed node does with its tiers: the engine alone, a native-style cache, kvtier, and kvtier in parts."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtier.errors import ConfigError

GateForm = Literal["none", "latency", "priced"]


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """Parts that can be switched. The defaults are kvtier's own (docs/simulator.md says what each is worth)."""

    name: str
    prefix_cache: bool = True  # the engine's own, in HBM
    lower_tiers: bool = True
    gate: GateForm = "priced"
    price_links: bool = True
    look_ahead: bool = True
    overlap: bool = True
    hbm: str = "kvtier"  # the policy that orders eviction
    dram: str = "kvtier"
    nvme: str = "lru"
    admit_by_value: bool = False
    promote: bool = False
    hints: bool = False
    conservative: bool = True


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(
            name="none", prefix_cache=False, lower_tiers=False, gate="none", look_ahead=False, overlap=False, hbm="lru"
        ),
        Variant(name="engine", lower_tiers=False, gate="none", look_ahead=False, overlap=False, hbm="lru"),
        Variant(name="native", gate="none", look_ahead=False, overlap=False, hbm="lru", dram="lru"),
        Variant(name="kvtier"),
        Variant(name="kvtier+hints", hints=True),
    )
}


def parse_variants(text: str) -> list[Variant]:
    """Variants from a comma-separated list. Raises ConfigError on one that does not exist."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"no variant named {name!r}; choose from {', '.join(VARIANTS)}")
    if not names:
        raise ConfigError("no variant given")
    return [VARIANTS[name] for name in names]
