"""After a restart: the prefix tree rebuilt from what a durable tier still holds.

A row whose head did not survive can never be reached; it is given back. Only where no group keeps whole prefixes do
rows wait for a prompt to name their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from kvtier.cache.level import Level
from kvtier.cache.orphans import Orphans
from kvtier.index.tree import PrefixTree
from kvtier.tiers.protocol import RecoveredRow


def rebuild(tree: PrefixTree, level: Level, rows: Sequence[RecoveredRow]) -> int:
    """Insert every reachable row into the tree and publish it. Returns how many rows were kept."""
    slots: dict[bytes, dict[int, int]] = defaultdict(dict)
    children: dict[bytes, list[bytes]] = defaultdict(list)
    extra: list[int] = []
    for slot, row in rows:
        groups = slots[row.key]
        if not groups:
            children[row.parent].append(row.key)
        if row.group in groups or row.group >= level.residency.groups:
            extra.append(slot)
        else:
            groups[row.group] = slot
    kept = 0
    stack: list[tuple[bytes, list[bytes]]] = [(key, [key]) for key in children[b""]]
    reached: set[bytes] = set()
    while stack:
        key, chain = stack.pop()
        while len(following := children.get(key, [])) == 1:
            key = following[0]
            chain.append(key)
        if following:
            stack.extend((child, [*chain, child]) for child in following)
        kept += _publish(tree, level, chain, slots, reached)
    unplaced = {key: groups for key, groups in slots.items() if key not in reached}
    if level.residency.prefix_closed:
        extra += [slot for groups in unplaced.values() for slot in groups.values()]
        unplaced = {}
    if extra:
        level.tier.release(np.array(extra, np.int32))
    Orphans(level, unplaced)
    return kept + sum(map(len, unplaced.values()))


def _publish(
    tree: PrefixTree, level: Level, chain: list[bytes], slots: dict[bytes, dict[int, int]], reached: set[bytes]
) -> int:
    packed = b"".join(chain)
    tree.insert(packed)
    published = 0
    for group in level.group_order:
        blocks = [i for i, key in enumerate(chain) if key not in reached and group in slots[key]]
        if blocks:
            found = np.array([slots[chain[i]][group] for i in blocks], np.int32)
            published += int(level.publish(packed, group, np.array(blocks, np.intp), found).sum())
    reached.update(chain)
    return published
