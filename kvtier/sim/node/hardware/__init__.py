"""Hardware points: what one serving node can move and compute, as data files (TOML, documented in template.toml)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtier.errors import ConfigError

_Positive = Annotated[float, Meta(gt=0)]
_AtLeast0 = Annotated[float, Meta(ge=0)]


class LinkSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One direction between two memories."""

    bytes_per_s: _Positive
    latency_s: _AtLeast0 = 0.0


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host to device and back, and the drive's two directions, each a server of its own."""

    h2d: LinkSpeed
    d2h: LinkSpeed
    nvme_read: LinkSpeed
    nvme_write: LinkSpeed


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the GPUs of the node do together. A token at position `attention_tokens` costs twice what one at position 0
    does; 0 means that position costs nothing."""

    prefill_tokens_per_s: _Positive
    decode_tokens_per_s: _Positive
    attention_tokens: _AtLeast0 = 0.0
    layers: Annotated[int, Meta(gt=0)] = 80
    max_running: Annotated[int, Meta(gt=0)] = 256

    def prefill_s(self, start: float, stop: float) -> float:
        """Seconds to prefill tokens [start, stop) of a prompt."""
        tokens = stop - start
        if tokens <= 0:
            return 0.0
        linear = tokens / self.prefill_tokens_per_s
        return linear * (1.0 + (start + stop) / 2 / self.attention_tokens) if self.attention_tokens else linear


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A hardware point. `tiers` are sizes such as "240GiB" that `--tiers` overrides."""

    name: str
    description: str = ""
    block_bytes: Annotated[int, Meta(gt=0)]
    block_tokens: Annotated[int, Meta(gt=0)] = 512
    gpus: Annotated[int, Meta(gt=0)] = 1
    compute: Compute
    links: Links
    tiers: dict[str, str]


def hardware_names() -> list[str]:
    """The points that come with kvtier, sorted; the template is none of them."""
    names = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml") and name != "template.toml")


def load_hardware(name_or_path: str) -> Hardware:
    """The point of this name, or the one in this file. Raises ConfigError saying what is wrong with it."""
    if name_or_path in hardware_names():
        where, text = name_or_path, files(__name__).joinpath(f"{name_or_path}.toml").read_text()
    else:
        where = name_or_path
        try:
            text = Path(name_or_path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(hardware_names())
            raise ConfigError(
                f"no hardware {name_or_path!r}: choose {known}, or give a file like template.toml"
            ) from error
    try:
        return msgspec.toml.decode(text, type=Hardware)
    except msgspec.DecodeError as error:
        raise ConfigError(f"hardware {where}: {str(error).replace('`', '')}") from error
