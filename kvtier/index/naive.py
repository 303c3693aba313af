"""The index as anyone would write it first: a dictionary of prefixes. Slow, plainly right: the oracle of the tests."""

from __future__ import annotations

from kvtier.model.keys import KEY_BYTES


class NaiveIndex:
    """Known prefixes and the slot of each (prefix, group). Mirrors PrefixTree and one Residency."""

    def __init__(self, groups: int = 1, key_bytes: int = KEY_BYTES) -> None:
        self.groups = groups
        self.key_bytes = key_bytes
        self.known: set[bytes] = set()
        self.slots: dict[tuple[bytes, int], int] = {}

    def insert(self, chain: bytes) -> None:
        """Know every prefix of `chain`."""
        self.known.update(self._prefixes(chain))

    def walk(self, chain: bytes) -> int:
        """Blocks of the longest known prefix."""
        known = 0
        for prefix in self._prefixes(chain):
            if prefix not in self.known:
                break
            known += 1
        return known

    def publish(self, chain: bytes, block: int, group: int, slot: int) -> None:
        """Block `block` of `chain` is in `slot`."""
        self.slots[self._prefix(chain, block), group] = slot

    def slots_of(self, chain: bytes) -> list[list[int]]:
        """Slots of the known blocks of `chain`, by group, -1 where absent."""
        return [
            [self.slots.get((prefix, group), -1) for group in range(self.groups)]
            for prefix in self._prefixes(chain)[: self.walk(chain)]
        ]

    def drop(self, chain: bytes, block: int, group: int) -> None:
        """Forget one row."""
        self.slots.pop((self._prefix(chain, block), group), None)

    def forget(self, chain: bytes, blocks: int) -> None:
        """Forget the prefixes of `chain` longer than `blocks`."""
        self.known.difference_update(self._prefixes(chain)[blocks:])

    def _prefix(self, chain: bytes, block: int) -> bytes:
        return chain[: (block + 1) * self.key_bytes]

    def _prefixes(self, chain: bytes) -> list[bytes]:
        return [self._prefix(chain, block) for block in range(len(chain) // self.key_bytes)]
