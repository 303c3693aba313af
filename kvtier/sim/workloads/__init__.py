"""Generated workloads, where no trace is at hand or the truth must be known: chat, RAG, agents, bursts."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from kvtier.errors import ConfigError
from kvtier.sim.workloads.agent import AgentWorkload, Tool
from kvtier.sim.workloads.base import Workload
from kvtier.sim.workloads.bursts import BurstWorkload
from kvtier.sim.workloads.chat import ChatWorkload
from kvtier.sim.workloads.rag import RAGWorkload

__all__ = [
    "WORKLOADS",
    "WORKLOAD_PREFIX",
    "AgentWorkload",
    "BurstWorkload",
    "ChatWorkload",
    "RAGWorkload",
    "Tool",
    "Workload",
    "parse_workload",
]

WORKLOAD_PREFIX = "workload:"

WORKLOADS: dict[str, type[Workload]] = {
    workload.kind: workload for workload in (AgentWorkload, BurstWorkload, ChatWorkload, RAGWorkload)
}


def parse_workload(text: str, block_tokens: int = 512) -> Workload:
    """The workload that e.g. `workload:agent?sessions=50&finish=0.1` names. Raises ConfigError."""
    kind, _, query = text.removeprefix(WORKLOAD_PREFIX).partition("?")
    if kind not in WORKLOADS:
        raise ConfigError(f"no workload {kind!r}; choose one of {', '.join(sorted(WORKLOADS))}")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
        return msgspec.convert({"block_tokens": block_tokens, **given}, WORKLOADS[kind], strict=False)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from error
