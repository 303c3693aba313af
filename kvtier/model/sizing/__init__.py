"""Architecture-aware sizing: from a model's config to the bytes its KV cache costs. Pure.

`spec_from_config` interprets a config; `Ledger` and `size_model` turn it into bytes for a `Deployment`; `block_bytes`
and `reconcile` tell the cache what a block costs and check that against a live engine.
"""

from kvtier.model.sizing.cache import CacheSpec, LayerSpec
from kvtier.model.sizing.deployment import Deployment, pipeline_stages
from kvtier.model.sizing.formats import FORMATS, KVFormat, element_bytes, kv_format
from kvtier.model.sizing.ledger import Ledger, ModelSize, size_model
from kvtier.model.sizing.reconcile import GroupBlock, Reconciled, block_bytes, reconcile
from kvtier.model.sizing.spec import ModelSpec, spec_from_config

__all__ = [
    "FORMATS",
    "CacheSpec",
    "Deployment",
    "GroupBlock",
    "KVFormat",
    "LayerSpec",
    "Ledger",
    "ModelSize",
    "ModelSpec",
    "Reconciled",
    "block_bytes",
    "element_bytes",
    "kv_format",
    "pipeline_stages",
    "reconcile",
    "size_model",
    "spec_from_config",
]
