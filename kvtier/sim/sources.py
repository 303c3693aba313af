"""What the command line may name as a trace: a file, or a generated workload."""

from __future__ import annotations

from pathlib import Path

from kvtier.sim.traces import Trace, load_trace
from kvtier.sim.workloads import WORKLOAD_PREFIX, Workload, parse_workload


def open_source(text: str, format_name: str = "auto", block_tokens: int = 512) -> Trace | Workload:
    """Read the trace file, or make the workload, that `text` names.

    Raises TraceError if the file is malformed, ConfigError if there is no such workload or parameter.
    """
    if text.startswith(WORKLOAD_PREFIX):
        return parse_workload(text, block_tokens)
    return load_trace(Path(text), format_name, block_tokens)
