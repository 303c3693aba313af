"""The kernels: equal to their references (interpreted), free of spills and 16 bytes wide (compiled), well chosen."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRITON = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("torch") is not None
ROOT = Path(__file__).resolve().parents[2]
INTERPRETED_TESTS = 100  # at least so many; fewer means that a family was lost
needs_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed")


@needs_triton
@pytest.mark.slow
def test_kernels_equal_their_references_under_the_interpreter() -> None:
    """In a process of its own: TRITON_INTERPRET must be set before a kernel is decorated."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "tests/kernels/interpreted.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= INTERPRETED_TESTS


# Kernels whose stores are scalars by nature: one partial sum or one score a thread.
NARROW_STORES = {"checksum", "window-normaliser", "window-weights", "speculate"}
CASE_NAMES = (
    "gather", "scatter", "int8-encode", "int8-decode", "turn", "d-keys-encode", "d-keys-decode", "values-encode",
    "values-decode", "m-keys-encode", "m-keys-decode", "checksum", "window-normaliser", "window-weights", "speculate",
    "fetch",
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_machine_code_has_no_spills_and_moves_16_bytes_at_a_time(name: str, capability: int) -> None:
    from tests.kernels.compiled import CASES, machine_code

    assert set(CASES) == set(CASE_NAMES)
    machine = machine_code(CASES[name], capability)
    assert machine.local_bytes == 0
    assert machine.registers <= 255
    assert machine.loads.get("128", 0) > 0
    assert "U8" not in machine.loads
    if name not in NARROW_STORES:
        assert machine.stores.get("128", 0) > 0
        assert "U8" not in machine.stores


@needs_triton
def test_paths_are_chosen_by_size_and_device_and_counted() -> None:
    from kvtier_kernels.dispatch import Dispatcher, Path

    hopper = Dispatcher("cuda", (9, 0))
    assert hopper.choose(page_bytes=1 << 20, pages=64, encoded=False).path is Path.DMA
    assert hopper.choose(page_bytes=4 << 10, pages=64, encoded=False).path is Path.TRITON
    assert hopper.choose(page_bytes=4 << 10, pages=2, encoded=False).path is Path.DMA
    assert hopper.choose(page_bytes=1 << 20, pages=1, encoded=True).path is Path.TRITON
    first = hopper.choose(page_bytes=1 << 20, pages=1, encoded=True, first_of_prompt=True)
    assert first.path is Path.DMA
    assert "sinks" in first.reason
    assert Dispatcher("cpu").choose(page_bytes=1 << 20, pages=1, encoded=True).path is Path.TORCH
    assert Dispatcher("cuda", (7, 5)).choose(page_bytes=1, pages=99, encoded=True).path is Path.TORCH
    assert sum(hopper.counts().values()) == 5


@pytest.mark.gpu
@needs_triton
def test_kernels_equal_their_references_on_a_device() -> None:
    """The interpreted tests' bodies, with everything on CUDA. Written here; runs where there is a device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from kvtier_kernels import checksum, int8, paged, rotate
    from kvtier_kernels.pages import paged_kv

    layers = [torch.randn(64, 8, 64, 256, device="cuda").bfloat16() for _ in range(4)]
    kv = paged_kv(layers)
    table = [63, 0, 17]
    rows = torch.empty(len(table) * paged.row_elements(kv), dtype=torch.bfloat16, device="cuda")
    paged.gather(kv, table, rows)
    assert torch.equal(rows, paged.gather_reference(kv, table).reshape(-1))
    codes, scales = (t.contiguous() for t in int8.gather_int8_reference(kv, table))
    got_codes, got_scales = torch.empty_like(codes), torch.empty_like(scales)
    int8.gather_int8(kv, table, got_codes, got_scales)
    assert torch.equal(got_scales, scales)
    assert (got_codes.int() - codes.int()).abs().max() <= 1
    raw = rows.view(torch.uint8).view(len(table), -1)
    assert torch.equal(checksum.row_checksums(raw), checksum.row_checksums_reference(raw))
    twin = paged_kv([layer.clone() for layer in layers])
    frequencies = [float(1e4 ** (-2 * i / 128)) for i in range(64)]
    rotate.turn_keys(kv, table, [64, -64, 9], frequencies)
    rotate.turn_keys_reference(twin, table, [64, -64, 9], frequencies)
    for mine, other in zip(kv.layers, twin.layers, strict=True):
        assert torch.allclose(mine.float(), other.float(), rtol=2**-7, atol=1e-5)
