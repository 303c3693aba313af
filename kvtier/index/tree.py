"""The prefix tree: prompts seen, as segments that have always been used together.

A segment holds the keys of a run of consecutive blocks. Two prompts that diverge split the segment at the first
differing block; a prompt that runs past an unshared leaf makes that leaf longer. So the number of segments follows the
number of branch points, not of blocks, and everything above (residency, forecasts, eviction) works on segments in
batches.

Keys are packed (n x key_bytes in one `bytes`): a walk compares whole runs by memcmp and never loops over blocks. In
production keys are 32-byte digests; the simulator uses 8-byte ids.

One writer: not thread-safe. Listeners are told of every change of structure, after it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.model.keys import KEY_BYTES


class Segment:
    """A run of blocks with the same past: one node of the tree. `id` is dense and is reused after removal.

    `depth` is the number of blocks before the segment's first. Read-only outside this module.
    """

    __slots__ = ("children", "depth", "id", "keys", "length", "parent")

    def __init__(self, segment_id: int, parent: Segment | None, keys: bytes, length: int, depth: int) -> None:
        self.id = segment_id
        self.parent = parent
        self.keys = keys
        self.length = length
        self.depth = depth
        self.children: dict[bytes, Segment] = {}

    @property
    def stop(self) -> int:
        """Depth just after the last block."""
        return self.depth + self.length

    def __repr__(self) -> str:
        return f"Segment({self.id}, blocks {self.depth}:{self.stop}, {len(self.children)} children)"


class TreeListener(Protocol):
    """Told of changes of structure. Called on the writer's thread, after the change."""

    def on_create(self, segment: Segment) -> None:
        """A new leaf."""
        ...

    def on_extend(self, segment: Segment, old_length: int) -> None:
        """A leaf grew in place from `old_length` blocks to `segment.length`."""
        ...

    def on_split(self, head: Segment, tail: Segment) -> None:
        """`tail` was cut: its first `head.length` blocks are now the new segment `head`, its parent. `tail` keeps its
        identity, its children and its last blocks."""
        ...

    def on_truncate(self, segment: Segment, old_length: int) -> None:
        """A leaf lost its last blocks and is now `segment.length` (> 0) long."""
        ...

    def on_remove(self, segment: Segment) -> None:
        """A leaf was removed; its id may be reused at once."""
        ...


class Match:
    """Where a walk ended: `path` are the segments touched, in order, the last perhaps only in part.

    `blocks` is the number of leading keys found; `in_last` how many of them lie in the last segment (0 for no path).
    """

    __slots__ = ("blocks", "in_last", "path")

    def __init__(self, path: list[Segment], blocks: int, in_last: int) -> None:
        self.path = path
        self.blocks = blocks
        self.in_last = in_last


class PrefixTree:
    """All chains inserted and not yet removed. Not thread-safe: one writer."""

    def __init__(self, key_bytes: int = KEY_BYTES) -> None:
        self.key_bytes = key_bytes
        # Whoever keeps state by segment may forbid that a leaf grows in place; a new child is made instead.
        self.may_grow: Callable[[Segment], bool] = lambda leaf: True
        self.root = Segment(0, None, b"", 0, 0)
        self._segments: list[Segment | None] = [self.root]
        self._free_ids: list[int] = []
        self._listeners: list[TreeListener] = []
        self._blocks = 0

    def __len__(self) -> int:
        """Number of segments, the empty root not counted."""
        return len(self._segments) - len(self._free_ids) - 1

    @property
    def blocks(self) -> int:
        """Number of blocks in all segments."""
        return self._blocks

    @property
    def id_limit(self) -> int:
        """One more than the largest segment id ever used: the length of an array indexed by segment id."""
        return len(self._segments)

    def listen(self, listener: TreeListener) -> None:
        """Tell `listener` of every later change of structure."""
        self._listeners.append(listener)

    @property
    def listeners(self) -> list[TreeListener]:
        """Who is told of changes now."""
        return list(self._listeners)

    def unlisten(self, listeners: Sequence[TreeListener]) -> None:
        """Tell these of nothing more."""
        self._listeners = [each for each in self._listeners if not any(each is gone for gone in listeners)]

    def segment(self, segment_id: int) -> Segment:
        """The live segment with this id. Raises IntegrityError if there is none."""
        found = self._segments[segment_id]
        if found is None:
            raise IntegrityError(f"segment {segment_id} was removed")
        return found

    def segments(self) -> Iterator[Segment]:
        """Every live segment except the root, in no particular order."""
        for found in self._segments[1:]:
            if found is not None:
                yield found

    def walk(self, chain: bytes) -> Match:
        """The longest known prefix of `chain`. Does not modify the tree."""
        width = self.key_bytes
        total = len(chain) // width
        node, done, in_last = self.root, 0, 0
        path: list[Segment] = []
        while done < total:
            child = node.children.get(chain[done * width : (done + 1) * width])
            if child is None:
                break
            in_last = self._common(child, chain, done, total)
            path.append(child)
            done += in_last
            if in_last < child.length:
                break
            node = child
        return Match(path, done, in_last)

    def insert(self, chain: bytes) -> list[Segment]:
        """Make `chain` a path of whole segments and return that path. Splits and extends where needed.

        Idempotent. An empty chain gives an empty path.
        """
        width = self.key_bytes
        total = len(chain) // width
        match = self.walk(chain)
        path, done = match.path, match.blocks
        if path and match.in_last < path[-1].length:
            path[-1] = self.split(path[-1], match.in_last)
        if done == total:
            return path
        rest = chain[done * width : total * width]
        last = path[-1] if path else self.root
        if path and not last.children and self.may_grow(last):
            old_length = last.length
            last.keys += rest
            last.length += total - done
            self._blocks += total - done
            for listener in self._listeners:
                listener.on_extend(last, old_length)
            return path
        created = self._new(last, rest, total - done, done)
        last.children[rest[:width]] = created
        self._blocks += created.length
        for listener in self._listeners:
            listener.on_create(created)
        path.append(created)
        return path

    def split(self, segment: Segment, at: int) -> Segment:
        """Cut `segment` after its first `at` blocks (0 < at < length) and return the new head, its parent."""
        if not 0 < at < segment.length or segment.parent is None:
            raise IntegrityError(f"{segment!r} cannot be cut at {at}")
        width = self.key_bytes
        parent = segment.parent
        head = self._new(parent, segment.keys[: at * width], at, segment.depth)
        segment.keys = segment.keys[at * width :]
        segment.length -= at
        segment.depth += at
        segment.parent = head
        parent.children[head.keys[:width]] = head
        head.children[segment.keys[:width]] = segment
        for listener in self._listeners:
            listener.on_split(head, segment)
        return head

    def truncate(self, segment: Segment, length: int) -> None:
        """Forget the blocks of a leaf after its first `length`; 0 removes the leaf. Raises if it has children."""
        if segment.children or segment.parent is None:
            raise IntegrityError(f"{segment!r} is not a leaf; only leaves can be shortened")
        if not 0 <= length <= segment.length:
            raise IntegrityError(f"{segment!r} cannot be shortened to {length}")
        if length == segment.length:
            return
        width = self.key_bytes
        old_length = segment.length
        self._blocks -= old_length - length
        if length:
            segment.keys = segment.keys[: length * width]
            segment.length = length
            for listener in self._listeners:
                listener.on_truncate(segment, old_length)
            return
        del segment.parent.children[segment.keys[:width]]
        self._segments[segment.id] = None
        self._free_ids.append(segment.id)
        for listener in self._listeners:
            listener.on_remove(segment)

    def chain_of(self, segment: Segment) -> bytes:
        """The keys from the root to the end of `segment`."""
        parts = []
        node: Segment | None = segment
        while node is not None:
            parts.append(node.keys)
            node = node.parent
        return b"".join(reversed(parts))

    def check_integrity(self) -> None:
        """Raise IntegrityError if any structural invariant is broken. Costs a full traversal."""
        width, seen, blocks = self.key_bytes, 0, 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            if self._segments[node.id] is not node:
                raise IntegrityError(f"{node!r} is not registered under its id")
            if node is not self.root and node.length <= 0:
                raise IntegrityError(f"{node!r} is empty")
            if len(node.keys) != node.length * width:
                raise IntegrityError(f"{node!r} has {len(node.keys)} bytes of keys")
            for first, child in node.children.items():
                if child.parent is not node or child.depth != node.stop or child.keys[:width] != first:
                    raise IntegrityError(f"{child!r} does not hang below {node!r}")
                stack.append(child)
            seen += 1
            blocks += node.length
        if seen - 1 != len(self) or blocks != self._blocks:
            raise IntegrityError(
                f"{seen - 1} segments and {blocks} blocks reachable, {len(self)}, {self._blocks} counted"
            )

    def _new(self, parent: Segment, keys: bytes, length: int, depth: int) -> Segment:
        if self._free_ids:
            segment_id = self._free_ids.pop()
            created = Segment(segment_id, parent, keys, length, depth)
            self._segments[segment_id] = created
        else:
            created = Segment(len(self._segments), parent, keys, length, depth)
            self._segments.append(created)
        return created

    def _common(self, segment: Segment, chain: bytes, start: int, total: int) -> int:
        """How many leading keys of `segment` equal the keys of `chain` from `start` on (≥ 1 here)."""
        width = self.key_bytes
        n = min(segment.length, total - start)
        mine, theirs = segment.keys[: n * width], chain[start * width : (start + n) * width]
        if mine == theirs:
            return n
        differs = np.frombuffer(mine, np.uint8) != np.frombuffer(theirs, np.uint8)
        return int(differs.argmax()) // width
