"""A token bucket: what keeps one direction of one link within its bytes per second."""

from __future__ import annotations


class TokenBucket:
    """Lets `bytes_per_s` through, 0 for no limit. Nothing is saved up while idle: in any window of t seconds at most
    bytes_per_s · t and one call's worth pass. Not thread-safe; the caller tells the time."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next call may begin."""
        return max(0.0, self._free_at_s - now_s)

    def take(self, n_bytes: int, now_s: float) -> None:
        """A call of `n_bytes` begins."""
        if self.bytes_per_s:
            self._free_at_s = max(self._free_at_s, now_s) + n_bytes / self.bytes_per_s
