"""Which way blocks go: the copy engine, a Triton kernel, or torch; decided by size and device, and the reason recorded.

Large plain pages go by DMA: the copy engine moves them at full bus speed and leaves the compute units alone. A kernel
pays where the copy engine would need very many small copies, or where bytes are encoded on the way.
"""

from __future__ import annotations

import threading
from collections import Counter
from enum import Enum
from typing import NamedTuple

# vLLM's measured crossing point on an H100 (PCIe 5): below it, launching a copy per page costs more than moving it.
SMALL_PAGE_BYTES = 28 << 10
FEW_PAGES = 16


class Path(Enum):
    """How bytes move between the paged cache and a row."""

    DMA = "dma"
    TRITON = "triton"
    TORCH = "torch"


class Choice(NamedTuple):
    """A path and why it was taken."""

    path: Path
    reason: str


class Dispatcher:
    """Chooses a path for each transfer and counts the choices by reason. Thread-safe."""

    def __init__(self, device_type: str, compute_capability: tuple[int, int] | None = None) -> None:
        """`device_type` as torch names it; `compute_capability` where it is CUDA."""
        self._cuda = device_type == "cuda"
        self._capability = compute_capability
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def choose(self, *, page_bytes: int, pages: int, encoded: bool, first_of_prompt: bool = False) -> Choice:
        """The path for `pages` runs of `page_bytes` adjacent bytes each."""
        choice = self._choice(page_bytes, pages, encoded, first_of_prompt)
        with self._lock:
            self._counts[choice.path.value, choice.reason] += 1
        return choice

    def counts(self) -> dict[tuple[str, str], int]:
        """How often each (path, reason) was chosen."""
        with self._lock:
            return dict(self._counts)

    def _choice(self, page_bytes: int, pages: int, encoded: bool, first_of_prompt: bool) -> Choice:
        if not self._cuda:
            return Choice(Path.TORCH, "no CUDA device")
        if self._capability is not None and self._capability < (8, 0):
            return Choice(Path.TORCH if encoded else Path.DMA, "device older than sm_80")
        if encoded and first_of_prompt:
            return Choice(Path.DMA, "first block of a prompt: its sinks are encoded on the host")
        if encoded:
            return Choice(Path.TRITON, "encoded on the way: the bus carries fewer bytes")
        if page_bytes < SMALL_PAGE_BYTES and pages >= FEW_PAGES:
            return Choice(Path.TRITON, "many small pages: one launch instead of a copy each")
        return Choice(Path.DMA, "plain pages: the copy engine is as fast and free")
