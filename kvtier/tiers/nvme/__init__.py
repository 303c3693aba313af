"""Rows on a local disk: slab file, journal, direct I/O, cap and crash recovery."""

from kvtier.tiers.nvme.tier import NvmeTier

__all__ = ["NvmeTier"]
