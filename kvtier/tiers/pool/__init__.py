"""Rows as objects in a Mooncake Store: memory of many machines, over RDMA or TCP."""

from kvtier.tiers.pool.tier import PoolTier

__all__ = ["PoolTier"]
