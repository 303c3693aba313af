"""Rows in memory behind a link: a CXL expander as devdax, as a NUMA node without CPUs, or a file that stands for it."""

from kvtier.tiers.cxl.tier import CxlTier

__all__ = ["CxlTier"]
