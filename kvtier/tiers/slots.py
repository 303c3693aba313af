"""Which slots of a tier are free, reserved or published: one table, used by every tier with numbered slots."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvtier.errors import IntegrityError
from kvtier.tiers.protocol import Slots

_ABSENT, _FREE, _RETIRED, _RESERVED, _PUBLISHED = range(5)


class SlotTable:
    """Free list and state of `capacity` slots. All are absent until `add`ed.

    The free list is a stack of int32 in which every released batch lies highest slot first, so that a batch comes out
    again in ascending, mostly adjacent order: adjacent slots become one large transfer. `take` and `give_back` cost
    vector operations only. Thread-safe; `publish` must not race with `give_back` of the same slot.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._state = np.zeros(capacity, dtype=np.uint8)
        self._stack = np.empty(capacity, dtype=np.int32)
        self._echo = np.empty(capacity, dtype=np.int32)
        self._free = 0
        self._present = 0

    @property
    def free(self) -> int:
        """Slots that can be taken now."""
        return self._free

    @property
    def used(self) -> int:
        """Slots that are not free."""
        return self._present - self._free

    @property
    def present(self) -> int:
        """Slots that exist: added so far."""
        return self._present

    def add(self, slots: Slots, *, published: bool = False) -> None:
        """Bring absent slots into being, free or (found again after a restart) published."""
        with self._lock:
            self._require(slots, _ABSENT)
            self._present += len(slots)
            if published:
                self._state[slots] = _PUBLISHED
            else:
                self._push(slots)

    def take(self, n: int) -> Slots | None:
        """Reserve `n` slots, ascending within a batch; None, and nothing changed, if fewer are free."""
        with self._lock:
            if n < 0 or n > self._free:
                return None
            slots = self._stack[self._free - n : self._free][::-1].copy()
            self._free -= n
            self._state[slots] = _RESERVED
            return slots

    def publish(self, slots: Slots) -> None:
        """Mark reserved slots as published."""
        self._state[slots] = _PUBLISHED

    def published(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of `slots` are published."""
        return np.equal(self._state[slots], _PUBLISHED)

    def require_reserved(self, slots: Slots) -> None:
        """Raise IntegrityError unless every slot is reserved and not yet published, and none is named twice."""
        self._require(slots, _RESERVED)

    def give_back(self, slots: Slots) -> None:
        """Free taken slots. Raises IntegrityError, and nothing changed, if one is free or named twice."""
        with self._lock:
            self._require_taken(slots)
            self._push(slots)

    def retire(self, slots: Slots) -> None:
        """First half of `give_back`: taken slots are neither published nor free. Raises IntegrityError likewise."""
        with self._lock:
            self._require_taken(slots)
            self._state[slots] = _RETIRED

    def reuse(self, slots: Slots) -> None:
        """Second half of `give_back`: free retired slots."""
        with self._lock:
            self._require(slots, _RETIRED)
            self._push(slots)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless stack and states say the same."""
        with self._lock:
            stack = self._stack[: self._free]
            ok = len(np.unique(stack)) == self._free and bool((self._state[stack] == _FREE).all())
            free = int((self._state == _FREE).sum())
            present = int((self._state != _ABSENT).sum())
        if not ok or free != self._free or present != self._present:
            raise IntegrityError(f"slot table: {self._free} on the stack, {free} marked free, {present} present")

    def _push(self, slots: Slots) -> None:
        n = len(slots)
        self._stack[self._free : self._free + n] = np.sort(slots)[::-1]
        self._state[slots] = _FREE
        self._free += n

    def _require_taken(self, slots: Slots) -> None:
        if not self._distinct(slots) or not bool((self._state[slots] >= _RESERVED).all()):
            raise IntegrityError(f"released slots that are free already or named twice: {self._sample(slots)}")

    def _require(self, slots: Slots, state: int) -> None:
        if not self._distinct(slots) or not bool((self._state[slots] == state).all()):
            raise IntegrityError(f"slots not in the state expected, or named twice: {self._sample(slots)}")

    def _distinct(self, slots: Slots) -> bool:
        """True if every slot is in range and named once: the last writer of an echo cell wins."""
        n = len(slots)
        if n == 0:
            return True
        if int(slots.min()) < 0 or int(slots.max()) >= self.capacity:
            return False
        order = np.arange(n, dtype=np.int32)
        self._echo[slots] = order
        return bool((self._echo[slots] == order).all())

    def _sample(self, slots: Slots) -> list[int]:
        return [int(s) for s in slots[:8]]
