"""Which bytes to keep, move, load or recompute. Pure: no I/O, no engine; the simulator drives the same objects."""

from kvtier.place import beta16, lru, worth  # registers the policies

__all__ = ["beta16", "lru", "worth"]
