"""The `vllm.general_plugins` entry point: makes the names known, imports nothing heavy.

Called in every vLLM process, perhaps more than once.
"""

from __future__ import annotations

import contextlib

CONNECTOR = "KVTierConnector"
SPEC = "KVTierOffloadingSpec"


def register() -> None:
    """Register connector and spec with vLLM's factories, by name and module, loaded on first use."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # Both factories refuse a name they know; a second call changes nothing.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "kvtier_vllm.connector", CONNECTOR)
    with contextlib.suppress(ValueError):
        OffloadingSpecFactory.register_spec(SPEC, "kvtier_vllm.spec", SPEC)
