"""How fast rows are encoded and decoded on one core, against a memory copy of the same row in the same run.

    python benchmarks/codecs.py [--json] [--layers 30 --heads 3 --tokens 64 --head-dim 64]

CPU seconds of one thread, so that a busy machine changes little. Quality is measured by `kvtier eval codec`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time

import numpy as np

from kvtier.codec.arithmetic import NumpyArithmetic
from kvtier.codec.calibration import Calibration
from kvtier.codec.form import RowForm
from kvtier.codec.range_coder import normalised
from kvtier.codec.registry import KIVI, NAMES, PRESETS, CodecChoice, build_codec

_REPEATS = 15


def made_up(form: RowForm) -> tuple[Calibration, np.ndarray]:
    """A calibration that fits, and a row of normal numbers with channels of different size."""
    rng = np.random.default_rng(0)
    shape = (form.layers, 2, form.heads)
    calibration = Calibration(
        model="made up",
        text="",
        layers=form.layers,
        heads=form.heads,
        head_dim=form.head_dim,
        inverse_frequencies=tuple(float(1e4 ** (-2 * i / form.head_dim)) for i in range(form.head_dim // 2)),
        key_means=np.zeros((form.layers, form.heads, form.head_dim), "<f2").tobytes(),
        sensitivity={"loo": rng.gamma(0.3, 1, size=shape).astype("<f4").tobytes()},
        tables=normalised(_bell(shape, form.head_dim)).astype("<u2").tobytes(),
    )
    row = np.empty(form.row_bytes, np.uint8)
    spread = rng.gamma(2.0, 1.0, size=(*shape, 1, form.head_dim))
    values = rng.normal(size=(*shape, form.tokens, form.head_dim)) * spread
    NumpyArithmetic().store(values.astype(np.float32), form.numbers(row), form.dtype)
    return calibration, row


def _bell(shape: tuple[int, ...], head_dim: int) -> np.ndarray:
    centre = np.exp(-((np.arange(31) - 15) ** 2) / 40)
    return np.broadcast_to((centre * 10_000).astype(np.int64), (*shape, head_dim, 31))


def best_seconds(action, repeats: int = _REPEATS) -> float:  # type: ignore[no-untyped-def]
    """The least CPU time of a few tries."""
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        action()
        times.append(time.thread_time() - started)
    return min(times)


def measure(form: RowForm, names: list[str]) -> list[dict[str, float | str]]:
    """One dict a codec, after one for the memory copy."""
    calibration, row = made_up(form)
    copy = np.empty_like(row)
    rows: list[dict[str, float | str]] = []
    copy_s = best_seconds(lambda: np.copyto(copy, row))
    rows.append(
        {
            "codec": "memcpy",
            "arithmetic": "",
            "ratio": 1.0,
            "encode_bytes_per_s": row.size / copy_s,
            "decode_bytes_per_s": row.size / copy_s,
        }
    )
    in_blocks = [name for name in names if name in PRESETS or name in KIVI]
    plain = [name for name in names if name not in ("raw", "zstd", "cachegen")]
    for arithmetic, chosen in (("numba", in_blocks), ("torch", names), ("numpy", plain)):
        for name in chosen:
            codec = build_codec(CodecChoice(name=name, arithmetic=arithmetic), form, calibration)
            target = memoryview(bytearray(codec.encoded_bytes))
            out = np.empty_like(row)
            repeats = 2 if name == "cachegen" else _REPEATS
            size = codec.encode(row.data, target, form.tokens)
            encode_s = best_seconds(lambda: codec.encode(row.data, target, form.tokens), repeats)  # noqa: B023
            decode_s = best_seconds(lambda: codec.decode(target, out.data), repeats)  # noqa: B023
            rows.append(
                {
                    "codec": name,
                    "arithmetic": arithmetic if name not in ("raw", "zstd", "cachegen") else "",
                    "ratio": form.row_bytes / size,
                    "encode_bytes_per_s": row.size / encode_s,
                    "decode_bytes_per_s": row.size / decode_s,
                }
            )
    return rows


def main() -> None:
    """Print a table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--codec", default=",".join(NAMES), help="codecs, comma-separated")
    for name, default in (("layers", 30), ("heads", 3), ("tokens", 64), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    form = RowForm(
        layers=options.layers, heads=options.heads, tokens=options.tokens, head_dim=options.head_dim, axes="lhtkd"
    )
    found: list[dict[str, float | str]] = []
    # In a thread of its own, as the mover does: there a codec keeps torch to one core.
    worker = threading.Thread(target=lambda: found.extend(measure(form, options.codec.split(","))))
    worker.start()
    worker.join()
    if not found:
        sys.exit(1)
    if options.json:
        for row in found:
            print(json.dumps(row))
        return
    print(
        f"{form.row_bytes / 1e6:.2f} MB a row, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; GB/s of one core"
    )
    for row in found:
        encode, decode = (float(row[f"{verb}_bytes_per_s"]) / 1e9 for verb in ("encode", "decode"))
        print(
            f"{row['codec']:10s}{row['arithmetic']:7s} x{row['ratio']:.2f}  encode {encode:6.2f}  decode {decode:6.2f}"
        )


if __name__ == "__main__":
    main()
