"""kvtier for vLLM: a KV connector over vLLM's own offloading connector. Importing this package imports no engine."""

__all__: list[str] = []
