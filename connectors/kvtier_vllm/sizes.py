"""The size of a block, computed from the model's config and compared with the engine's own pages, once, at start."""

from __future__ import annotations

import json

from vllm.config import VllmConfig
from vllm.logger import init_logger

from kvtier.errors import ConfigError
from kvtier.model.layout import Layout
from kvtier.model.sizing import Deployment, kv_format, reconcile, spec_from_config

logger = init_logger("vllm.kvtier")


def check_sizes(vllm_config: VllmConfig, layout: Layout) -> None:
    """Raise EngineMismatchError if the config and the engine disagree on what a block weighs.

    A model whose config we cannot interpret is served all the same: the engine's own layout is what bytes are moved by.
    """
    try:
        config = json.loads(json.dumps(vllm_config.model_config.hf_config.to_dict(), default=str))
        spec, form = spec_from_config(config), kv_format(layout.dtype)
    except ConfigError as error:
        logger.warning("kvtier: block sizes are taken from vLLM unchecked: %s", error)
        return
    tp = vllm_config.parallel_config.tensor_parallel_size
    reconcile(spec, layout.groups, Deployment(tp=tp, form=form))
