"""Finding the part of a config that describes the decoder whose cache is sized."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.errors import ModelConfigError
from kvtier.model.sizing.fields import shown
from kvtier.model.sizing.heads import LAYERS

# Where multimodal and wrapped models keep their text decoder, in order of preference.
_SECTIONS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "language_model",
    "thinker_config",
    "decoder",
    "llm",
    "text_model",
)
_PLANS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_DEPTH = 4


def find_decoder(config: object) -> tuple[dict[str, object], str]:
    """The decoder's own fields and the path to them ("" for a flat config, "text_config." and so on)."""
    found, path = _as_object(config, "the config"), ""
    for _ in range(_DEPTH):
        inner = _section(found)
        if inner is None:
            return found, path
        key, child = inner
        if not _has_layers(child, deep=True) and _has_layers(found):
            return found, path
        path += f"{key}."
        # A wrapper may keep the type on its own level only.
        outer_type = found.get("model_type")
        found = {"model_type": outer_type, **child} if outer_type is not None else child
    raise ModelConfigError(f"{path}* nests deeper than any known model")


def image_source_tokens(config: Mapping[str, object]) -> int | None:
    """Positions a vision encoder hands to cross-attention layers (Mllama), when its section fixes them."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return None
    sizes = [vision.get(key) for key in ("image_size", "patch_size", "max_num_tiles")]
    image, patch, tiles = (value if isinstance(value, int) and value > 0 else 0 for value in sizes)
    return tiles * ((image // patch) ** 2 + 1) if image and patch and tiles else None


def _section(config: Mapping[str, object]) -> tuple[str, dict[str, object]] | None:
    for key in _SECTIONS:
        child = config.get(key)
        if isinstance(child, Mapping) and child:
            return key, _as_object(child, key)
        if child is not None and key == _SECTIONS[0] and not isinstance(child, Mapping):
            raise ModelConfigError(f"{key} must be an object, not {shown(child)}")
    return None


def _has_layers(config: Mapping[str, object], deep: bool = False) -> bool:
    if any(config.get(key) is not None for key in (*LAYERS, *_PLANS)):
        return True
    inner = _section(config) if deep else None
    return inner is not None and _has_layers(inner[1], deep=True)


def _as_object(found: object, name: str) -> dict[str, object]:
    if not isinstance(found, Mapping):
        raise ModelConfigError(f"{name} must be a JSON object, not {shown(found)}")
    return {str(key): value for key, value in found.items()}
