"""Multi-token-prediction layers: whole decoder layers beyond the model's own, used only by speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import plan, registry
from kvtier.model.sizing.cache import LayerSpec
from kvtier.model.sizing.fields import Fields, shown

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_MAX_DRAFTS = 64


def read(fields: Fields, roles: Sequence[str]) -> tuple[LayerSpec, ...]:
    """The draft layers, numbered after the model's own. Each attends like the model's full layers."""
    fields.excuse(("use_mtp", "mtp_use_dedicated_embeddings", "mtp_layers_block_type", "mtp_layer_types",
                   "mtp_mlp_layer_types", "mtp_hybrid_override_pattern", "mtp_loss_scaling_factor"))  # fmt: skip
    modules = fields.maybe_count(*_COUNTS, at_least=0, at_most=_MAX_DRAFTS) or 0
    each = fields.maybe_count("mtp_transformer_layers", at_least=0, at_most=_MAX_DRAFTS)
    count = modules * (1 if each is None else each)
    if count == 0:
        return ()
    role = _role(fields, roles)
    first = len(roles)
    return tuple(LayerSpec(index=first + i, caches=registry.read_layer(role, fields, first + i)) for i in range(count))


def _role(fields: Fields, roles: Sequence[str]) -> str:
    """The drafts' own kind where the config names one, else that of the model's widest attention."""
    own = fields.items("mtp_layer_types") or []
    if own:
        if set(own) != {"full_attention"}:
            raise ModelConfigError(f"{fields.name('mtp_layer_types')} = {shown(own)} is not full attention only")
        return plan.FULL
    for role in (plan.FULL, plan.INDEXED, plan.SPARSE, plan.HYBRID, plan.CHUNKED, plan.SLIDING):
        if role in roles:
            return role
    raise ModelConfigError(f"{fields.name(_COUNTS[0])} is set but no layer of the model attends")
