"""Makes room for everyone: the blocks not used for longest leave first, and none before those that build on it.

Whichever process runs short scans the tree (one at a time, under a lock file), which also sets the ledger right, and
removes files until a fifth of the cap is free. What builds on what is said by the headers of the files; the order of
use by their time of modification, which readers renew.

A scan costs one `stat` a file, and one small read for each file this process has not seen before.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.tiers.objects import HEADER_BYTES, Links, links_of
from kvtier.tiers.shared_fs.filesystem import GONE, FileSystem, Found
from kvtier.tiers.shared_fs.ledger import FOLDER_BYTES, Ledger

_START_AT, _STOP_AT = 0.9, 0.8
_BATCH_BYTES = 64 << 20
_LINKS_KEPT = 1 << 18
"""Links remembered between scans: about 60 MB of memory at most."""


@dataclass(slots=True)
class _Block:
    """The files of one block (one for each group) on the medium."""

    links: Links
    files: list[Found] = field(default_factory=list)

    @property
    def used_ns(self) -> int:
        return max(file.mtime_ns for file in self.files)


class Cleaner:
    """Keeps the tree below the mark, from a thread of its own. `close` waits for it a bounded time."""

    def __init__(self, ledger: Ledger, fs: FileSystem, fault: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._fs = fs
        self.evicted_files = 0
        self._fault = fault
        self._links: dict[str, Links] = {}
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvtier-shared-fs-cleaner", daemon=True)
        self._thread.start()

    @property
    def needed(self) -> bool:
        """Whether there is less room than there should be, as far as this process knows."""
        return self._ledger.last_total > _START_AT * self._ledger.cap_bytes

    def wake(self) -> None:
        """Clean soon. Returns at once."""
        self._wanted.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop; a scan that hangs is left to its thread."""
        self._stopping = True
        self._wanted.set()
        self._thread.join(timeout_s)

    def clean(self) -> int:
        """Scan, count anew and evict down to the mark; returns the bytes removed. 0 at once if another process is at
        it. Raises OSError."""
        fd = self._fs.open(os.path.join(self._ledger.root, "cleaning"), os.O_RDWR | os.O_CREAT)
        try:
            self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._clean()
        except BlockingIOError:
            return 0
        finally:
            self._fs.close(fd)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping:
                return
            try:
                self.clean()
            except OSError as error:
                self._fault(f"clean_errno_{error.errno}")

    def _clean(self) -> int:
        reported = self._ledger.begin_scan()
        found, total = [], FOLDER_BYTES
        objects = os.path.join(self._ledger.root, "objects")
        for entry in self._fs.tree(self._ledger.root):
            total += entry.bytes
            if not entry.is_folder and entry.path.startswith(objects):
                found.append(entry)
        surplus = self._ledger.end_scan(total, reported) - int(_STOP_AT * self._ledger.cap_bytes)
        return self._evict(found, surplus) if surplus > 0 else 0

    def _evict(self, found: list[Found], surplus: int) -> int:
        blocks = self._blocks(found)
        builders = Counter(block.links.parent for block in blocks.values())
        leaves = [(block.used_ns, key) for key, block in blocks.items() if not builders[key]]
        heapq.heapify(leaves)
        removed = batch = 0
        while leaves and removed < surplus and not self._stopping:
            used_ns, key = heapq.heappop(leaves)
            block = blocks[key]
            size, gone = self._remove(block, used_ns)
            removed, batch = removed + size, batch + size
            if not gone:
                continue  # used meanwhile, or it cannot be removed: what it builds on stays too (sglang#31485)
            parent = block.links.parent
            builders[parent] -= 1
            if not builders[parent] and parent in blocks:
                heapq.heappush(leaves, (blocks[parent].used_ns, parent))
            if batch >= _BATCH_BYTES:
                self._ledger.freed(batch)
                batch = 0
        if batch:
            self._ledger.freed(batch)
        return removed

    def _blocks(self, found: list[Found]) -> dict[bytes, _Block]:
        blocks: dict[bytes, _Block] = {}
        if len(self._links) > _LINKS_KEPT:
            self._links.clear()
        for file in found:
            name = os.path.basename(file.path)
            links = self._links.get(name)
            if links is None:
                links = self._read_links(file.path) or Links(file.path.encode(), b"")
                if len(self._links) < _LINKS_KEPT:
                    self._links[name] = links
            blocks.setdefault(links.key, _Block(links)).files.append(file)
        return blocks

    def _remove(self, block: _Block, used_ns: int) -> tuple[int, bool]:
        """Remove the files of a block unless one was used since the scan: bytes freed, and whether all are gone."""
        freed = 0
        try:
            if any(self._fs.stat(file.path).st_mtime_ns > used_ns for file in block.files):
                return 0, False
            for file in block.files:
                self._links.pop(os.path.basename(file.path), None)
                if self._fs.remove(file.path):
                    freed += file.bytes
                    self.evicted_files += 1
            self._prune(os.path.dirname(block.files[0].path))
        except OSError as error:
            if error.errno not in GONE:
                self._fault(f"evict_errno_{error.errno}")
                return freed, False
        return freed, True

    def _prune(self, folder: str) -> None:
        """Remove folders that became empty; who writes there next makes them again."""
        try:
            for _ in range(3):
                self._fs.rmdir(folder)
                folder = os.path.dirname(folder)
        except OSError:
            return

    def _read_links(self, path: str) -> Links | None:
        try:
            fd = self._fs.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            header = memoryview(bytearray(HEADER_BYTES))
            n = self._fs.preadv(fd, [header], max(0, self._fs.fstat(fd).st_size - HEADER_BYTES))
        except OSError:
            return None
        finally:
            self._fs.close(fd)
        return links_of(bytes(header[:n]))
