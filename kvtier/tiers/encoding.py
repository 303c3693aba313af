"""What a tier's rows are written down as: chosen by name in the configuration, checked once, at the start.

    encodings = encodings_of(config.codecs, config.codec_max_kl, forms, row_bytes, calibration)
    inner = NvmeTier(..., layout_digest + encodings["nvme"].identity, encodings["nvme"].row_bytes, ...)
    tier = encodings["nvme"].around(inner)

The identity is part of the layout a durable tier was made for: rows of another codec, model or bits map are not found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtier.codec.calibration import Calibration
from kvtier.codec.form import RowForm
from kvtier.codec.levels import Level, pays
from kvtier.codec.protocol import RowCodec
from kvtier.codec.registry import LOSSLESS, NAMES, PRESETS, CodecChoice, build_codec, needs_calibration
from kvtier.codec.shares import SharesCodec, heads_of
from kvtier.errors import ConfigError
from kvtier.tiers.codec_tier import CodecTier, codec_identity, codec_seconds, encoded_row_bytes, in_a_thread
from kvtier.tiers.protocol import Tier

logger = logging.getLogger(__name__)

ZSTD_SHARE = 0.8
"""Room for a zstd row: real KV takes 0.69 of its bytes. A row that shrinks less is not kept, and counted."""

MIN_TOKENS = 32
"""Of a row, for recipe D: below that its scales and sinks take more than recipe M loses."""

_NOISE = 1.5  # a probe varies: only a codec slower than this many times the medium's speed is refused


@dataclass(frozen=True, slots=True)
class GroupForm:
    """How one KV-cache group lies in a row: `ranks` shares of `form` each, with consecutive heads of the model.

    `replicas` ranks after each other hold the same heads. `refusal` says why numbers in it cannot be found, for codecs
    that need them; such a row is opaque bytes.
    """

    form: RowForm
    ranks: int = 1
    replicas: int = 1
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The codec of one tier, for every KV-cache group."""

    name: str
    codecs: Mapping[int, RowCodec]
    row_bytes: int
    plain_row_bytes: int
    allow_slow: bool = False

    @property
    def lossless(self) -> bool:
        """Whether rows come back bit for bit."""
        return all(codec.lossless for codec in self.codecs.values())

    @property
    def identity(self) -> str:
        """For the layout digest of the tier below."""
        return f"{codec_identity(self.codecs)}|{self.row_bytes}"

    def around(self, inner: Tier) -> CodecTier:
        """The tier with this encoding in front of it. Raises ConfigError if it is slower than the tier alone."""
        tier = CodecTier(inner, self.codecs, row_bytes=self.plain_row_bytes)
        self._require_speed(inner)
        return tier

    def _require_speed(self, inner: Tier) -> None:
        codec = self.codecs[min(self.codecs)]
        _, decode_s = in_a_thread(lambda: codec_seconds(codec))
        speed = codec.form.row_bytes / decode_s
        level = Level(self.name, inner.row_bytes, codec.form.row_bytes, speed)
        medium = inner.probe().read_bytes_per_s
        if pays(level, medium):
            return
        found = (
            f"codec {self.name} decodes {speed / 1e9:.2f} GB/s of rows on one core; the {inner.name} tier reads "
            f"{medium / 1e9:.2f} GB/s of them as they are"
        )
        if self.allow_slow or speed * _NOISE >= medium:
            logger.warning("kvtier: %s: it saves room, not time", found)
            return
        raise ConfigError(
            f"{found}: loads would be slower. Use a quicker codec, or set allow_slow_codecs if room is what is short"
        )


def encodings_of(
    codecs: Mapping[str, str],
    max_kl: Mapping[str, float],
    forms: Mapping[int, GroupForm],
    row_bytes: int,
    calibration: Callable[[], Calibration],
    *,
    allow_slow: bool = False,
) -> dict[str, Encoding]:
    """The encoding of every tier that has one other than raw. `calibration` is asked only where a codec needs it.

    Raises ConfigError for an unknown codec, rows it does not fit, a calibration that is missing or of another shape, a
    preset beyond its quality budget, a budget for a tier without a lossy codec.
    """
    for tier in sorted(set(max_kl) - set(codecs)):
        raise ConfigError(f"codec_max_kl names the tier {tier}, which has no codec; set codecs too, or remove it")
    found = {}
    for tier, name in codecs.items():
        if name not in NAMES:
            raise ConfigError(f"codecs: {name!r} for the {tier} tier is not one of {', '.join(NAMES)}")
        if name == "raw":
            continue
        choice = CodecChoice(name=name, max_kl=max_kl.get(tier))
        built = {group: _codec(choice, form, calibration) for group, form in forms.items()}
        size = encoded_row_bytes(built)
        if name == "zstd":
            if any(form.form.kind == "opaque" or form.form.dtype == "float32" for form in forms.values()):
                logger.warning("kvtier: zstd finds little in rows of this type; the %s tier gains no room", tier)
            else:
                size = max(int(ZSTD_SHARE * form.form.row_bytes * form.ranks) for form in forms.values())
        found[tier] = Encoding(name, built, size, row_bytes, allow_slow)
    return found


def _codec(choice: CodecChoice, group: GroupForm, calibration: Callable[[], Calibration]) -> RowCodec:
    form = group.form
    if choice.name not in LOSSLESS and group.refusal:
        raise ConfigError(f"codec {choice.name} must find the numbers in a row, and cannot: {group.refusal}")
    name = choice.name
    if name in PRESETS and name[0] == "d" and form.tokens < MIN_TOKENS:
        raise ConfigError(
            f"codec {name} shares its scales among the tokens of a row and needs {MIN_TOKENS} of them, not "
            f"{form.tokens}: raise blocks_per_chunk (or the engine's block size), or use m{name[1]}, which does without"
        )
    model = calibration() if needs_calibration(choice) else None
    shares = [
        build_codec(choice, form, model and _heads(model, form, rank // group.replicas)) for rank in range(group.ranks)
    ]
    return shares[0] if len(shares) == 1 else SharesCodec(shares)


def _heads(model: Calibration, form: RowForm, share: int) -> Calibration:
    return model if model.heads == form.heads else heads_of(model, share * form.heads, form.heads)
