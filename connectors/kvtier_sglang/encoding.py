"""Codecs of the tiers below SGLang: lossless ones only, for HiCache does not say which request a page is for."""

from __future__ import annotations

from kvtier.codec.calibration import Calibration
from kvtier.codec.form import ELEMENT_BYTES, RowForm
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.tiers.encoding import Encoding, GroupForm, encodings_of

_REFUSAL = "under SGLang a page is not of one request, so that nobody could ask for exact blocks; use zstd, or raw"


def encodings(config: CacheConfig, row_bytes: int, groups: int, page_tokens: int, dtype: str) -> dict[str, Encoding]:
    """The codec of every tier that has one. Raises ConfigError for lossy ones."""
    if "dram" in config.codecs:
        raise ConfigError("codecs names dram, which is HiCache's own under SGLang; remove it")
    size = ELEMENT_BYTES.get(dtype, 0)
    if size and row_bytes % (page_tokens * size) == 0:
        form = RowForm(
            kind="mla", layers=1, heads=1, tokens=page_tokens, head_dim=row_bytes // page_tokens // size, dtype=dtype
        )
    else:
        form = RowForm(kind="opaque", opaque_bytes=row_bytes)
    every = {group: GroupForm(form, refusal=_REFUSAL) for group in range(groups)}
    return encodings_of(
        config.codecs, config.codec_max_kl, every, row_bytes, _no_calibration, allow_slow=config.allow_slow_codecs
    )


def _no_calibration() -> Calibration:
    raise ConfigError(f"a calibration is for lossy codecs, and {_REFUSAL}")
