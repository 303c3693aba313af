"""What a journal's records say survived, parents before children."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.model.keys import KEY_BYTES
from kvtier.tiers.nvme.format import KIND_PUBLISH_FIRST
from kvtier.tiers.nvme.journal import Records
from kvtier.tiers.protocol import RecoveredRow, RowId


def parents_first(records: Records) -> list[RecoveredRow]:
    """Recovered rows in the order they were written, except that a row waits for its parent if that comes later.

    About a microsecond a row: prompts are stored head first, so hardly any row has to wait.
    """
    with _no_garbage_collection():
        return ordered(*_decoded(records))


def _decoded(records: Records) -> tuple[list[bytes], list[bytes], list[RecoveredRow]]:
    """Keys, parents and rows, in the order of the records."""
    key_bytes, parent_bytes = records["key"].tobytes(), records["parent"].tobytes()
    starts = range(0, len(key_bytes), KEY_BYTES)
    firsts = (records["kind"] == KIND_PUBLISH_FIRST).tolist()
    keys = [key_bytes[i : i + KEY_BYTES] for i in starts]
    parents = [b"" if first else parent_bytes[i : i + KEY_BYTES] for i, first in zip(starts, firsts, strict=True)]
    rows = map(RowId, keys, parents, records["count"].tolist())
    return keys, parents, list(map(RecoveredRow, records["slot"].tolist(), rows))


def ordered(keys: list[bytes], parents: list[bytes], found: list[RecoveredRow]) -> list[RecoveredRow]:
    """`found`, whose keys and parents are given, in the same order except that rows wait for their parents."""
    present, seen = set(keys), set[bytes]()
    waiting: dict[bytes, list[RecoveredRow]] = {}
    ordered: list[RecoveredRow] = []
    for key, parent, item in zip(keys, parents, found, strict=True):
        if parent and parent not in seen and parent in present:
            waiting.setdefault(parent, []).append(item)
            continue
        ordered.append(item)
        seen.add(key)
        ready = list(reversed(waiting.pop(key, ()))) if waiting else []
        while ready:
            item = ready.pop()
            ordered.append(item)
            seen.add(item.row.key)
            ready.extend(reversed(waiting.pop(item.row.key, ())))
    for orphans in waiting.values():  # a row that is its own ancestor: cannot come from a sound engine
        ordered.extend(orphans)
    return ordered


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of new tuples and no cycles: collecting meanwhile would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
