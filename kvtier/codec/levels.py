"""Which encoding to load each part of a prefix in, under a deadline, and which encodings a tier should not have.

`choose_levels` is CacheGen's adaptation (SIGCOMM'24, section 5.3): a prefix is stored in several levels from finest to
coarsest; for each chunk in turn take the finest that still arrives in its share of the time left at the throughput last
seen, and recompute the chunk where computing is quicker than any. `pays` refuses an encoding that is slower than the
medium it sits on: fewer bytes do not help if turning them back takes longer than reading them plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtier.codec.calibration import Calibration
from kvtier.codec.registry import LOSSLESS, MAX_CALIBRATION_KL
from kvtier.errors import ConfigError

RECOMPUTE = "recompute"


class Level(msgspec.Struct, frozen=True):
    """One way a chunk can be had: bytes to move and the decoder's speed in bytes of unencoded row a second.

    `kl` is what it costs on the calibration text; 0 for a lossless one.
    """

    name: str
    encoded_bytes: int
    row_bytes: int
    decode_bytes_per_s: float
    kl: float = 0.0

    def seconds(self, bytes_per_s: float) -> float:
        """Time to move and decode at this throughput. Decoding overlaps moving, so the slower of the two counts."""
        return max(self.encoded_bytes / bytes_per_s, self.row_bytes / self.decode_bytes_per_s)


class ChunkPlan(msgspec.Struct, frozen=True):
    """What was chosen for a chunk, and how long it took or is expected to take."""

    level: str
    seconds: float


def choose_level(levels: Sequence[Level], bytes_per_s: float, recompute_s: float, budget_s: float) -> ChunkPlan:
    """The finest of `levels` (finest first) that fits the budget; recompute if that is quicker than every level, or if
    nothing fits and it is the quickest. Without one that fits: the quickest."""
    quickest = min(levels, key=lambda level: level.seconds(bytes_per_s))
    if recompute_s <= budget_s and recompute_s <= levels[0].seconds(bytes_per_s):
        return ChunkPlan(RECOMPUTE, recompute_s)
    for level in levels:
        if level.seconds(bytes_per_s) <= budget_s:
            return ChunkPlan(level.name, level.seconds(bytes_per_s))
    if recompute_s < quickest.seconds(bytes_per_s):
        return ChunkPlan(RECOMPUTE, recompute_s)
    return ChunkPlan(quickest.name, quickest.seconds(bytes_per_s))


def choose_levels(
    chunks: Sequence[Sequence[Level]],
    recompute_s: Sequence[float],
    deadline_s: float,
    throughput: Callable[[int], float],
) -> list[ChunkPlan]:
    """Choose chunk by chunk. `throughput(i)` is what was measured when chunk i is about to be asked for (CacheGen takes
    that of the chunk before). Time saved on one chunk is shared by those that follow.

    Raises ConfigError if the arguments do not match or a chunk has no level.
    """
    if len(chunks) != len(recompute_s) or not all(chunks):
        raise ConfigError("every chunk needs at least one level and a recompute time")
    left_s = deadline_s
    plans = []
    for i, (levels, recompute) in enumerate(zip(chunks, recompute_s, strict=True)):
        plan = choose_level(levels, throughput(i), recompute, left_s / (len(chunks) - i))
        left_s = max(0.0, left_s - plan.seconds)
        plans.append(plan)
    return plans


def pays(level: Level, raw_bytes_per_s: float) -> bool:
    """Whether reading the encoded row from a medium of this speed is quicker than reading the row itself."""
    return level.seconds(raw_bytes_per_s) < level.row_bytes / raw_bytes_per_s


def select_codec(levels: Sequence[Level], raw_bytes_per_s: float, max_kl: float | None) -> str:
    """The smallest encoding within a tier's quality budget that is no slower than the tier; "raw" if there is none.

    `max_kl` None means lossless only: a lossy codec is never chosen unless a budget was stated.
    """
    allowed = [
        level
        for level in levels
        if (level.name in LOSSLESS or (max_kl is not None and level.kl <= max_kl)) and pays(level, raw_bytes_per_s)
    ]
    return min(allowed, key=lambda level: level.encoded_bytes).name if allowed else "raw"


def presets_within(calibration: Calibration, max_kl: float | None = None) -> list[str]:
    """Presets whose calibration KL keeps `max_kl` (by default each preset's own budget), fewest bits first."""
    fit = [
        name
        for name, bound in MAX_CALIBRATION_KL.items()
        if name in calibration.gates and calibration.gates[name].kl_mean <= (bound if max_kl is None else max_kl)
    ]
    return sorted(fit, key=lambda name: calibration.gates[name].bits_per_element)
