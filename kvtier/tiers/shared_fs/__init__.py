"""Rows as content-addressed files on a path that many machines mount: no index server, one cap for all of them."""

from kvtier.tiers.shared_fs.tier import SharedFsTier

__all__ = ["SharedFsTier"]
