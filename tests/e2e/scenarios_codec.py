"""Scenarios of encoded tiers in a real vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.e2e.engine import answers, ask, cached_tokens, metrics, settle, start_engine, wipe_device
from tests.e2e.models import prompt_tokens


def exact_and_lossy(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """One prompt asked by requests that accept a lossy cache and by requests that do not, from device, memory and
    below. What each could reuse, and what lies in the tier afterwards."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    prompt = prompt_tokens(1, tokens)
    found: list[dict[str, Any]] = []

    def stage(name: str, lossy: bool | None) -> None:
        params = {} if lossy is None else {"kv_transfer_params": {"kvtier": {"lossy": lossy}}}
        output = ask(llm, [prompt], extra_args=params)
        cache = settle(llm)
        found.append(
            {
                "stage": name,
                "answer": answers(output)[0],
                "cached": cached_tokens(output)[0],
                "below": cache.lower[0].tier.stats().used_rows,
            }
        )

    def forget_above() -> None:
        wipe_device(llm)
        cache = settle(llm)
        cache.memory.clear()
        cache.epoch += 1

    stage("lossy, computed", True)
    stage("exact, beside it", None)
    stage("lossy, from the device", True)
    stage("exact, from the device", False)
    forget_above()
    stage("lossy, from below", True)
    stage("exact, with lossy blocks on the device", None)
    cache = settle(llm)
    cache.check_integrity()
    cache.gauges()
    counted = {"/".join((name, *labels)) for name, labels in cache.recorder.drain()[0]} | set(metrics("kvtier_codec"))
    stats = cache.lower[0].tier.stats()
    work = stats.codec
    rows = stats.used_rows
    return {
        "stages": found,
        "leases": cache.leases(),
        "rows": rows,
        "share": work.encoded_written_bytes / work.plain_written_bytes,
        "decoded": work.plain_read_bytes,
        "inner_row_bytes": cache.lower[0].tier.inner.row_bytes,
        "row_bytes": cache.memory.tier.row_bytes,
        "counted": sorted(counted),
    }


def refused(model: str, kvtier: dict[str, Any], engine: dict[str, Any]) -> str:
    """Start an engine that must not start; the error it ends with."""
    try:
        start_engine(model, kvtier=kvtier, **engine)
    except Exception as error:  # noqa: BLE001 - whatever vLLM makes of it: the text is what is tested
        return str(error)
    return "it started"


def same_numbers(model: str, tokens: int, kvtier: dict[str, Any], engine: dict[str, Any]) -> dict[str, float]:
    """How far memory rows that came back from below are from those that were written, relative to their size."""
    llm = start_engine(model, kvtier=kvtier, **engine)
    prompt = prompt_tokens(1, tokens)
    ask(llm, [prompt])
    cache = settle(llm)

    def rows() -> dict[bytes, np.ndarray]:
        found = {}
        for segment in cache.tree.segments():
            match = cache.tree.walk(cache.tree.chain_of(segment))
            for block, slots in enumerate(cache.memory.residency.slots_of(match)):
                for group, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        key = cache.tree.chain_of(segment)[block * 32 : block * 32 + 32] + bytes([group])
                        found[key] = np.frombuffer(bytes(cache.memory_row(slot)), np.float32)
        return found

    before = rows()
    wipe_device(llm)
    cache.memory.clear()
    cache.epoch += 1
    ask(llm, [prompt])
    settle(llm)
    after = rows()
    common = before.keys() & after.keys()
    wrong = sum(float(np.square(after[key] - before[key]).sum()) for key in common)
    size = sum(float(np.square(before[key]).sum()) for key in common)
    return {"rows": len(common), "error": (wrong / size) ** 0.5}
