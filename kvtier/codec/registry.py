"""Codecs by name. `build_codec` is the only way to one; it knows what each needs and what each kind of row allows."""

from __future__ import annotations

import re

import msgspec
import numpy as np

from kvtier.codec.arithmetic import Arithmetic, choose_arithmetic
from kvtier.codec.bits_map import BitsMap, allocate_bits, uniform_bits
from kvtier.codec.block_quant import RECIPE_D, RECIPE_KIVI, RECIPE_M, BlockQuantCodec, Recipe
from kvtier.codec.cachegen import CacheGenCodec
from kvtier.codec.calibration import Calibration
from kvtier.codec.form import RowForm
from kvtier.codec.lossless import RawCodec, ZstdShuffleCodec
from kvtier.codec.planes import sink_bytes
from kvtier.codec.protocol import RowCodec
from kvtier.codec.scaled import ScaledCodec
from kvtier.errors import ConfigError

LOSSLESS = ("raw", "zstd")
SCALED = ("int8", "fp8")
# Mean bits of the codes; scales and minima add half a bit (64 tokens or channels share one). A little above whole
# bits, as far as 2.4, 3.5 and 4.5 times fewer bytes than bfloat16 allow: 0.05 bits buy some 7 % of the loss.
PRESETS = {"d6": 6.15, "d4": 4.05, "d3": 3.05, "m6": 6.15, "m4": 4.05, "m3": 3.05}
KIVI = ("kivi4", "kivi2")
NAMES = (*LOSSLESS, *SCALED, *PRESETS, *KIVI, "cachegen")

# The calibration KL (nats a token) above which a preset is refused on a model. int8 is what to fall back to.
MAX_CALIBRATION_KL = {"d6": 5e-4, "d4": 5e-3, "d3": 2e-2, "m6": 5e-4, "m4": 5e-3, "m3": 2e-2}


class CodecChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A codec and how it is built. `sensitivity` is where a preset's bits map comes from: "loo" (leave-one-out KL),
    "local" (one-pass output error), "ema" (attention mass, to compare) or "uniform" (the same bytes spread evenly)."""

    name: str = "raw"
    sensitivity: str = "loo"
    max_kl: float | None = None
    zstd_level: int = 1
    arithmetic: str = "auto"


def needs_calibration(choice: CodecChoice) -> bool:
    """Whether `build_codec` needs a calibration: presets and cachegen do, and every lossy one with a quality budget."""
    budget = choice.max_kl is not None and choice.name not in LOSSLESS
    return choice.name in PRESETS or choice.name == "cachegen" or budget


def build_codec(choice: CodecChoice, form: RowForm, calibration: Calibration | None = None) -> RowCodec:
    """The codec for rows of `form`.

    Raises ConfigError if the name is unknown, the row kind does not allow it, a calibration is missing or of another
    shape, or the preset's calibration KL exceeds its budget (the message has both numbers).
    """
    name = choice.name
    if name == "raw":
        return RawCodec(form)
    if name == "zstd":
        return ZstdShuffleCodec(form, choice.zstd_level)
    if name not in NAMES:
        raise ConfigError(f"codec {name!r} is not one of {', '.join(NAMES)}")
    if choice.max_kl is not None:
        _require_quality(name, choice, calibration)
    arithmetic = choose_arithmetic(choice.arithmetic, in_blocks=name in PRESETS or name in KIVI)
    if name in SCALED:
        return ScaledCodec(name, form, arithmetic)
    if form.kind != "kv":
        raise ConfigError(f"codec {name} needs rows of keys and values, not {form.kind}; use raw, zstd or int8")
    if name in KIVI:
        bits = uniform_bits((form.layers, form.parts, form.heads), int(name[4:]))
        return BlockQuantCodec(name, form, RECIPE_KIVI, arithmetic, bits, bits)
    if calibration is None:
        raise ConfigError(f"codec {name} needs a calibration of the model: run kvtier calibrate")
    _require_fit(calibration, form)
    if name == "cachegen":
        return CacheGenCodec(form, calibration.frequency_tables)
    _require_quality(name, choice, calibration)
    return _preset(name, form, choice.sensitivity, calibration, arithmetic)


def preset_maps(
    name: str, form: RowForm, recipe: Recipe, source: str, calibration: Calibration
) -> tuple[BitsMap, BitsMap]:
    """The bits map of a preset, and the one for the first block of a prompt.

    The first block also holds the sinks; its map gives up as many bits as they take, so that every row has the same
    size. Where a block is too short for that (below about 32 tokens) it keeps its bits and the row is larger.
    """
    mean_bits = PRESETS[name]
    extra = sink_bytes(form, recipe.sinks) * 8 / form.elements
    shape = (form.layers, form.parts, form.heads)
    weights = np.ones(shape) if source == "uniform" else calibration.sensitivities(source)
    plain = allocate_bits(weights, mean_bits)
    first_bits = float(plain.mean()) - extra
    if first_bits < 2:
        return plain, plain
    return plain, allocate_bits(weights, first_bits)


def _preset(name: str, form: RowForm, source: str, calibration: Calibration, arithmetic: Arithmetic) -> RowCodec:
    recipe = RECIPE_D if name[0] == "d" else RECIPE_M
    bits, first_bits = preset_maps(name, form, recipe, source, calibration)
    return BlockQuantCodec(
        name,
        form,
        recipe,
        arithmetic,
        bits,
        first_bits,
        inverse_frequencies=calibration.inverse_frequencies,
        means=calibration.means if recipe.subtract_mean else None,
        calibration=calibration.digest,
    )


def _require_fit(calibration: Calibration, form: RowForm) -> None:
    have = (calibration.layers, calibration.heads, calibration.head_dim)
    want = (form.layers, form.heads, form.head_dim)
    if have != want:
        raise ConfigError(f"the calibration has (layers, heads, head_dim) {have}, the rows have {want}")


def _require_quality(name: str, choice: CodecChoice, calibration: Calibration | None) -> None:
    if calibration is None:
        raise ConfigError(f"a quality budget for codec {name} needs a calibration of the model: run kvtier calibrate")
    bound = choice.max_kl if choice.max_kl is not None else MAX_CALIBRATION_KL[name]
    gate = calibration.gates.get(name if choice.sensitivity == "loo" else f"{name}-{choice.sensitivity}")
    if gate is not None and gate.kl_mean > bound:
        raise ConfigError(
            f"codec {name} costs {gate.kl_mean:.2g} nats a token on this model's calibration text; the budget is "
            f"{bound:.2g}. Use {_finer(name, calibration, bound)}"
        )
    if gate is None and choice.max_kl is not None:
        raise ConfigError(f"codec {name} has no calibration KL to hold against the budget {bound:.2g}")


def _finer(name: str, calibration: Calibration, bound: float) -> str:
    family = re.sub(r"\d", "", name)
    finer = [n for n in PRESETS if n.startswith(family) and PRESETS[n] > PRESETS[name]]
    fits = [n for n in finer if n in calibration.gates and calibration.gates[n].kl_mean <= bound]
    return " or ".join([*fits, "int8"])
