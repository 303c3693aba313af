"""Where the memory tier's pages come from: the NUMA node next to the worker's own device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvtier.tiers import numa
from kvtier.tiers.devices import node_of_device

logger = init_logger("vllm.kvtier")


@contextlib.contextmanager
def near_device(*, is_worker: bool) -> Iterator[None]:
    """Pages touched first meanwhile come from the node next to this worker's device, where there is room and a GPU.

    vLLM maps and populates the region itself, so the calling thread's policy is what places it. The scheduler has no
    device and must not start one: it leaves pages where they are.
    """
    node = _node_of_current_device() if is_worker and current_platform.is_cuda() else None
    with contextlib.ExitStack() as stack:
        if node is not None:
            try:
                stack.enter_context(numa.preferred([node]))
            except OSError as error:
                logger.warning("kvtier: memory is not placed on NUMA node %d: %s", node, error)
        yield


def _node_of_current_device() -> int | None:
    """Not run in this project's tests: they have no GPU."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    parts = [getattr(device, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    return node_of_device("{:04x}:{:02x}:{:02x}.0".format(*parts))
