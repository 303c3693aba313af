"""The quality ledger: what every codec and every bits map costs on real text, and the bytes it saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.codec.calibration import Calibration
from kvtier.codec.form import ELEMENT_BYTES
from kvtier.codec.protocol import RowCodec
from kvtier.codec.registry import PRESETS, CodecChoice, build_codec
from kvtier.errors import ConfigError
from kvtier.reference.prefix_model import PrefixModel
from kvtier.reference.quality import Comparison, Passage, block_interval, compare, form_of, prepare, through_codec

Progress = Callable[[str, int, int], None]
DEFAULT_CODECS = ("raw", "zstd", "int8", "fp8", "d6", "d4", "d3", "m6", "m4", "m3", "kivi4", "kivi2", "cachegen")
DEFAULT_MAPS = ("loo", "local", "uniform", "ema")


class LedgerRow(msgspec.Struct, frozen=True):
    """One codec under one map. KL in nats a token against the unencoded cache; intervals are 95 % bootstrap.

    `kl_gain` and `kl_gain_ci` compare with the uniform map of the same preset, position by position (below zero: the
    map is better). Speeds are bytes of the unencoded row a second on one core.
    """

    codec: str
    map: str
    ratio: float
    bits_per_element: float
    kl_mean: float
    kl_ci: tuple[float, float]
    kl_max: float
    top1_agree: float
    ppl_ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    kl_gain: float | None = None
    kl_gain_ci: tuple[float, float] | None = None


def passages_of(
    model: PrefixModel, texts: Sequence[tuple[str, str]], prefix_tokens: int, positions: int, progress: Progress
) -> list[Passage]:
    """Prefill every text. Raises ConfigError if one is too short."""
    prepared = []
    for i, (name, text) in enumerate(texts):
        progress("reading the texts", i, len(texts))
        ids = model.tokens(text, prefix_tokens + positions)
        if len(ids) < prefix_tokens + positions:
            raise ConfigError(f"text {name}: {len(ids)} tokens; {prefix_tokens + positions} are needed")
        prepared.append(prepare(model, name, ids, prefix_tokens, positions))
    progress("reading the texts", len(texts), len(texts))
    return prepared


def ledger(
    model: PrefixModel,
    passages: Sequence[Passage],
    calibration: Calibration,
    codecs: Sequence[str] = DEFAULT_CODECS,
    maps: Sequence[str] = DEFAULT_MAPS,
    block_tokens: int = 64,
    progress: Progress | None = None,
) -> Iterator[LedgerRow]:
    """One row for every codec, and for presets every map; maps follow the preset's uniform one, so as to compare."""
    form = form_of(model, block_tokens)
    cases = []
    for name in codecs:
        found = [m for m in maps if m in calibration.sensitivity or m == "uniform"] if name in PRESETS else [""]
        cases += [(name, source) for source in sorted(found, key=lambda m: m != "uniform")]
    uniform: dict[str, npt.NDArray[np.float64]] = {}
    for i, (name, source) in enumerate(cases):
        if progress is not None:
            progress(f"{name} {source}", i, len(cases))
        choice = CodecChoice(name=name, sensitivity=source or "loo", max_kl=None)
        codec = build_codec(choice, form, msgspec.structs.replace(calibration, gates={}))
        parts, n_bytes, elements = [], 0, 0
        for passage in passages:
            kv, used = through_codec(passage.kv, codec)
            parts.append(compare(passage, model.log_probabilities(passage.following, kv)))
            n_bytes += used
            elements += kv.numel() // kv.shape[3] * (kv.shape[3] // block_tokens * block_tokens)
        result = Comparison.joined(parts)
        if source == "uniform":
            uniform[name] = result.kl
        yield _row(name, source, codec, result, n_bytes * 8 / elements, uniform.get(name), passages[0])


def _row(
    name: str,
    source: str,
    codec: RowCodec,
    result: Comparison,
    bits: float,
    uniform: npt.NDArray[np.float64] | None,
    passage: Passage,
) -> LedgerRow:
    encode_s, decode_s = codec_cpu_seconds(codec, passage)
    gain = result.kl - uniform if uniform is not None and source != "uniform" else None
    return LedgerRow(
        codec=name,
        map=source,
        ratio=8 * ELEMENT_BYTES[codec.form.dtype] / bits,
        bits_per_element=bits,
        kl_mean=float(result.kl.mean()),
        kl_ci=result.kl_interval(),
        kl_max=float(result.kl.max()),
        top1_agree=float(result.agrees.mean()),
        ppl_ratio=result.perplexity_ratio,
        encode_bytes_per_s=codec.form.row_bytes / encode_s,
        decode_bytes_per_s=codec.form.row_bytes / decode_s,
        kl_gain=float(gain.mean()) if gain is not None else None,
        kl_gain_ci=block_interval(gain) if gain is not None else None,
    )


def codec_cpu_seconds(codec: RowCodec, passage: Passage, repeats: int = 5) -> tuple[float, float]:
    """Seconds of one core to encode and to decode a row of real KV, the best of a few tries."""
    import torch

    form = codec.form
    row = np.empty(form.row_bytes, dtype=np.uint8)
    numbers = torch.from_numpy(form.numbers(row).view(np.int16)).view(torch.bfloat16)
    numbers.copy_(passage.kv[:, :, :, form.tokens : 2 * form.tokens])
    target = memoryview(bytearray(codec.encoded_bytes))
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        started = time.process_time()
        codec.encode(row.data, target, form.tokens)
        encoded = time.process_time()
        codec.decode(target, row.data)
        ended = time.process_time()
        best = [min(best[0], encoded - started), min(best[1], ended - encoded)]
    return best[0], best[1]
