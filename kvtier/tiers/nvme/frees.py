"""Slots that are free again, and whose journal does not say so yet.

A release comes from the engine's thread, and the journal is a file: a disk that stalls must not hold up the engine. So
a released slot is free at once, and a thread of ours appends the record. Whoever writes to the slot sees to it first:
no row is overwritten while the journal still calls it published. Until then a killed process finds the row
again, whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kvtier.tiers.nvme.journal import Journal
from kvtier.tiers.protocol import Slots

_RETRY_S = 1.0
_CLOSE_WAIT_S = 30.0


class Frees:
    """See the module docstring. `add` never blocks on the medium; everything may come from any thread.

    Without `in_background` no thread is started, and `add` appends by itself: for tests that count system calls.
    """

    def __init__(self, journal: Journal, n_slots: int, fault: Callable[[str], None], *, in_background: bool) -> None:
        self._journal = journal
        self._fault = fault
        self._owed = np.zeros(n_slots, np.bool_)
        self._appending = threading.Lock()
        self._in_background = in_background
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def owed(self) -> Slots:
        """Slots the journal still calls published."""
        return np.flatnonzero(self._owed).astype(np.int32)

    def add(self, slots: Slots) -> None:
        """Published slots were released. Call before any of them can be reserved again."""
        if not len(slots):
            return
        self._owed[slots] = True
        if not self._in_background:
            self._append()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-nvme-frees", daemon=True)
            self._thread.start()
        self._wake.set()

    def settle(self, slots: Slots) -> OSError | None:
        """Make sure that the journal says of `slots` that they hold nothing; why it cannot be written, if it cannot."""
        return self._append() if self._owed[slots].any() else None

    def close(self) -> bool:
        """Append what is left and end the thread. False if that hangs."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)
            if self._thread.is_alive():
                return False
        self._append()
        return True

    def _append(self) -> OSError | None:
        with self._appending:
            owed = self.owed
            if len(owed):
                try:
                    self._journal.free(owed)
                except OSError as error:
                    self._fault("release_not_journaled")
                    return error
                self._owed[owed] = False
        return None

    def _run(self) -> None:
        failed = False
        while not self._closing:
            self._wake.wait(_RETRY_S if failed else None)
            self._wake.clear()
            failed = self._append() is not None
