"""Measure what a codec needs to know about a model: sensitivities, mean keys, symbol frequencies, what presets cost.

Sensitivity of a unit (layer, K|V, head), three ways:
- "loo": KL of the continuation when that unit alone is stored in 2 bits. The best map, one partial forward a unit.
- "local": squared error of the layer's attention output, through the output projection, over the residual's norm.
  One pass over the text; keeps about four fifths of the gain.
- "ema": exponential moving average of the attention mass on a head's own keys, as head-granular eviction papers take
  it. Kept so that the comparison can be repeated: it is worse than no map (docs/codecs.md).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from importlib import resources

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvtier.codec.arithmetic import choose_arithmetic
from kvtier.codec.bits_map import uniform_bits
from kvtier.codec.block_quant import RECIPE_D, BlockQuantCodec
from kvtier.codec.cachegen import BINS, bin_row
from kvtier.codec.calibration import Calibration, Gate
from kvtier.codec.range_coder import normalised
from kvtier.codec.registry import CodecChoice, build_codec
from kvtier.errors import ConfigError
from kvtier.reference.ema import attention_mass
from kvtier.reference.prefix_model import PrefixModel, attention_scores
from kvtier.reference.quality import Comparison, Passage, compare, form_of, prepare, through_codec

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all

BLOCK_TOKENS = 64
_POSITIONS = 128
_LEAST_PREFIX = 256
_MOST_PREFIX = 1536
GATED = ("int8", "d6", "d4", "d3", "m6", "m4", "m3")


def default_texts() -> list[str]:
    """What a model is calibrated on unless the user gives text: a shipped one (prose, dialogue, code, data) and two
    modules of Python's library. Three texts rather than one halve the loss of the maps on others (docs/codecs.md)."""
    import difflib
    import pickletools

    shipped = resources.files("kvtier.reference").joinpath("calibration.txt").read_text()
    return [shipped, inspect.getsource(difflib), inspect.getsource(pickletools)]


def calibrate(
    model: PrefixModel, texts: Sequence[str], methods: Sequence[str] = ("loo",), progress: Progress | None = None
) -> Calibration:
    """Measure `model` on `texts`. Raises ConfigError if a text is too short or a method unknown."""
    report = progress or (lambda what, done, total: None)
    passages = []
    for i, text in enumerate(texts):
        report("reading the text", i, len(texts))
        passages.append(_passage(model, text))
    report("reading the text", len(texts), len(texts))
    sensitivity = {}
    for method in methods:
        if method == "loo":
            found = leave_one_out(model, passages, report)
        elif method == "local":
            found = local_error(model, passages, report)
        elif method == "ema":
            found = ema_importance(model, passages, report)
        else:
            raise ConfigError(f"calibration method {method!r} is not one of loo, local, ema")
        sensitivity[method] = found.astype("<f4").tobytes()
    means = mean_keys(model, passages)
    calibration = Calibration(
        model=model.fingerprint,
        text=hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        layers=model.layers,
        heads=model.heads,
        head_dim=model.head_dim,
        inverse_frequencies=model.inverse_frequencies,
        key_means=means.astype("<f2").tobytes(),
        sensitivity=sensitivity,
        tables=symbol_frequencies(model, passages).astype("<u2").tobytes(),
    )
    return msgspec.structs.replace(calibration, gates=measure_gates(model, passages, calibration, methods, report))


def _passage(model: PrefixModel, text: str) -> Passage:
    ids = model.tokens(text, _MOST_PREFIX + _POSITIONS)
    prefix = (len(ids) - _POSITIONS) // BLOCK_TOKENS * BLOCK_TOKENS
    if prefix < _LEAST_PREFIX:
        raise ConfigError(f"a calibration text has {len(ids)} tokens; at least {_LEAST_PREFIX + _POSITIONS} are needed")
    return prepare(model, "calibration", ids, prefix, _POSITIONS)


def coarse(model: PrefixModel, kv: torch.Tensor, bits: int = 2) -> torch.Tensor:
    """The prefix with every unit at `bits` bits under recipe D."""
    form = form_of(model, BLOCK_TOKENS)
    flat = uniform_bits((form.layers, form.parts, form.heads), bits)
    arithmetic = choose_arithmetic()
    frequencies = model.inverse_frequencies
    codec = BlockQuantCodec("coarse", form, RECIPE_D, arithmetic, flat, flat, inverse_frequencies=frequencies)
    return through_codec(kv, codec)[0]


@torch.inference_mode()
def leave_one_out(model: PrefixModel, passages: Sequence[Passage], report: Progress) -> npt.NDArray[np.float64]:
    """KL [layers, 2, heads] of the continuation with one unit at 2 bits; all units of a layer run as one batch."""
    total = np.zeros((model.layers, 2, model.heads))
    for n, passage in enumerate(passages):
        worse = coarse(model, passage.kv)
        inputs: list[torch.Tensor] = []
        model.run(passage.following, passage.kv, inputs=inputs)
        for layer in range(model.layers):
            report("sensitivity, leave one out", n * model.layers + layer, len(passages) * model.layers)
            variants = passage.kv[layer][None].repeat(2 * model.heads, 1, 1, 1, 1)
            for unit in range(2 * model.heads):
                part, head = divmod(unit, model.heads)
                variants[unit, part, head] = worse[layer, part, head]
            hidden = model.run(None, passage.kv, hidden=inputs[layer], start_layer=layer, override=(layer, variants))
            for unit in range(2 * model.heads):
                test = torch.log_softmax(model.model.lm_head(hidden[unit]), dim=-1)
                total[layer, unit // model.heads, unit % model.heads] += compare(passage, test).kl.mean()
    report("sensitivity, leave one out", 1, 1)
    return total / len(passages)


@torch.inference_mode()
def local_error(model: PrefixModel, passages: Sequence[Passage], report: Progress) -> npt.NDArray[np.float64]:
    """Relative squared error [layers, 2, heads] of a layer's output with one unit at 2 bits."""
    total = np.zeros((model.layers, 2, model.heads))
    group = model.query_heads // model.heads
    for n, passage in enumerate(passages):
        worse = coarse(model, passage.kv)
        inputs: list[torch.Tensor] = []
        model.run(passage.following, passage.kv, inputs=inputs)
        positions = torch.arange(passage.kv.shape[3], passage.kv.shape[3] + len(passage.following))[None]
        cosine, sine = model.model.model.rotary_emb(inputs[0], positions)
        for layer in range(model.layers):
            report("sensitivity, local error", n * model.layers + layer, len(passages) * model.layers)
            block = model.model.model.layers[layer]
            queries, _, _ = model.project(layer, block.input_layernorm(inputs[layer]), cosine, sine)
            weight = block.self_attn.o_proj.weight.view(-1, model.heads, group, model.head_dim)
            norm = inputs[layer].square().sum(dim=-1).mean()
            for part in (0, 1):
                keys = worse[layer, 0] if part == 0 else passage.kv[layer, 0]
                values = worse[layer, 1] if part == 1 else passage.kv[layer, 1]
                exact = (
                    torch.softmax(attention_scores(queries, passage.kv[layer, 0][None]), -1)
                    @ passage.kv[layer, 1][:, None]
                )
                coarse_out = torch.softmax(attention_scores(queries, keys[None]), -1) @ values[:, None]
                error = torch.einsum("hgnd,ohgd->hno", (coarse_out - exact)[0], weight)
                total[layer, part] += (error.square().sum(dim=-1).mean(dim=1) / norm).numpy()
    report("sensitivity, local error", 1, 1)
    return total / len(passages)


@torch.inference_mode()
def ema_importance(model: PrefixModel, passages: Sequence[Passage], report: Progress) -> npt.NDArray[np.float64]:
    """The paper's head importance [layers, 2, heads], the same for K and V."""
    total = np.zeros((model.layers, model.heads))
    for n, passage in enumerate(passages):
        report("importance, attention mass", n, len(passages))
        total += attention_mass(model, passage)
    report("importance, attention mass", 1, 1)
    return np.repeat(total[:, None], 2, axis=1) / len(passages)


def mean_keys(model: PrefixModel, passages: Sequence[Passage]) -> npt.NDArray[np.float32]:
    """Mean key [layers, heads, head_dim] before rotation, without the first four tokens."""
    arithmetic = choose_arithmetic("numpy")
    from kvtier.codec.rope import rope_tables

    parts = []
    for passage in passages:
        tokens = passage.kv.shape[3]
        tables = rope_tables(model.inverse_frequencies, 0, tokens)
        keys = passage.kv[:, 0].numpy().reshape(-1, tokens, model.head_dim)
        parts.append(arithmetic.rotate(keys, *tables, inverse=True)[:, RECIPE_D.sinks :])
    mean = np.concatenate(parts, axis=1).mean(axis=1)
    return np.asarray(mean, dtype=np.float32).reshape(model.layers, model.heads, model.head_dim)


def symbol_frequencies(model: PrefixModel, passages: Sequence[Passage]) -> npt.NDArray[np.uint16]:
    """Frequencies [layers, 2, heads, head_dim, BINS] of the entropy coder's symbols."""
    form = form_of(model, BLOCK_TOKENS)
    counts = np.zeros((form.layers, form.parts, form.heads, form.head_dim, BINS), dtype=np.int64)
    row = np.empty(form.row_bytes, dtype=np.uint8)
    numbers = torch.from_numpy(form.numbers(row).view(np.int16)).view(torch.bfloat16)
    flat = counts.reshape(-1, BINS)
    channel = np.arange(len(flat))
    for passage in passages:
        for start in range(0, passage.kv.shape[3], form.tokens):
            numbers.copy_(passage.kv[:, :, :, start : start + form.tokens])
            symbols, _ = bin_row(form, row.data)
            for token in symbols.reshape(form.tokens, -1):
                flat[channel, token] += 1
    return normalised(counts)


def measure_gates(
    model: PrefixModel,
    passages: Sequence[Passage],
    calibration: Calibration,
    sources: Sequence[str],
    report: Progress,
) -> dict[str, Gate]:
    """What every preset costs on the calibration text itself: "d4" for the leave-one-out map, "d4-local" and so on."""
    form = form_of(model, BLOCK_TOKENS)
    wanted = [(name, "loo") for name in GATED if name == "int8"]
    wanted += [(name, source) for name in GATED if name != "int8" for source in sources if source != "ema"]
    gates = {}
    for i, (name, source) in enumerate(wanted):
        report("cost of the presets", i, len(wanted))
        codec = build_codec(CodecChoice(name=name, sensitivity=source, max_kl=None), form, calibration)
        parts, n_bytes, elements = [], 0, 0
        for passage in passages:
            kv, used = through_codec(passage.kv, codec)
            parts.append(compare(passage, model.log_probabilities(passage.following, kv)))
            n_bytes, elements = n_bytes + used, elements + passage.kv.numel()
        kl = float(Comparison.joined(parts).kl.mean())
        gates[name if source == "loo" else f"{name}-{source}"] = Gate(kl, n_bytes * 8 / elements)
    report("cost of the presets", 1, 1)
    return gates
