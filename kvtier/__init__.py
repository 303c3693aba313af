"""kvtier: a predictive, multi-tier KV cache for LLM serving (engine-neutral core)."""

__version__ = "0.1.0"
