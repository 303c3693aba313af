"""The layer plan: which kind of attention or recurrence each layer has, in the many ways configs say so.

The first source that is there decides; fields of the weaker sources are then explained by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.errors import ModelConfigError
from kvtier.model.sizing import recurrent
from kvtier.model.sizing.fields import MAX_LAYERS, MAX_TOKENS, Fields, checked_length, shown
from kvtier.model.sizing.heads import DECODER_HEADS, DECODER_LAYERS, HEAD_WIDTH, KV_HEADS, LAYERS, QUERY_HEADS
from kvtier.model.sizing.sliding import OVERRIDES, WINDOW
from kvtier.model.sizing.vocabulary import unexplained

FULL, SLIDING, CHUNKED, RECURRENT = "full", "sliding", "chunked", "recurrent"
HYBRID, HYBRID_SLIDING, CROSS, NOTHING = "hybrid", "hybrid_sliding", "cross", "nothing"
INDEXED, SPARSE = "indexed", "sparse"  # tokens picked by an indexer; blocks picked by an indexer

# Words of `layer_types`, `layers_block_type` and `block_types`, by what such a layer keeps.
_WORDS = {
    FULL: ("full_attention", "attention", "full", "global", "global_attention", "attn", "self_attention"),
    INDEXED: ("indexed_attention", "deepseek_sparse_attention"),
    SLIDING: ("sliding_attention", "sliding_window", "local", "local_attention", "sliding_window_attention"),
    CHUNKED: ("chunked_attention",),
    RECURRENT: ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "linear", "kda", "gated_delta_net"),
    HYBRID: ("hybrid",),
    HYBRID_SLIDING: ("hybrid_sliding",),
    SPARSE: ("minimax_m3_sparse",),
    NOTHING: ("moe", "mlp", "dense"),
}  # fmt: skip
_ROLE_OF_WORD = {word: role for role, words in _WORDS.items() for word in words}
_ROLE_OF_LETTER = {"M": RECURRENT, "*": FULL, "E": NOTHING, "-": NOTHING, "G": FULL, "L": SLIDING}

_LISTS = ("layer_types", "layers_block_type")
_WEAKER_TEXT = """
    layers_block_type full_attention_interval sliding_window_pattern _sliding_window_pattern
    use_sliding_window max_window_layers no_rope_layers no_rope_layer_interval global_attn_every_n_layers
    hybrid_layer_ids attn_layer_period attn_layer_offset attn_layer_indices full_attn_idxs
    hybrid_override_pattern attn_type_list hybrid_layer_pattern layer_group_size
    prefix_dense_sliding_window_pattern local_layer_ids attention_types block_types _block_types
    attention_layers local_layers index_block_size index_topk_blocks index_local_blocks
"""
_WEAKER = frozenset(_WEAKER_TEXT.split())


def layer_plan(fields: Fields) -> list[str]:
    """The role of every layer, in order. Raises ModelConfigError when the sources do not make sense."""
    for triggers, reader in _SOURCES:
        if fields.active(*triggers):
            roles = reader(fields)
            if roles is not None:
                _excuse_unused(fields, roles)
                return roles
    return _without_plan(fields)


def layer_count(fields: Fields) -> int:
    """Number of decoder layers."""
    own = fields.maybe_count(*DECODER_LAYERS, at_most=MAX_LAYERS)
    fields.excuse(LAYERS)  # beside a decoder's own figure, they are the encoder's
    return fields.count(*LAYERS, at_most=MAX_LAYERS) if own is None else own


def _excuse_unused(fields: Fields, roles: list[str]) -> None:
    """An explicit plan explains the dimensions of kinds of layer that it does not have."""
    fields.excuse(_WEAKER)
    kinds = set(roles)
    if kinds <= {RECURRENT, NOTHING}:
        fields.excuse((*QUERY_HEADS, *KV_HEADS, *HEAD_WIDTH, "v_head_dim"))
    if not kinds & {INDEXED, SPARSE} and not fields.active("kv_lora_rank"):
        fields.excuse(("index_head_dim",))
    slides = bool(kinds & {SLIDING, HYBRID_SLIDING})
    _excuse_bidirectional(fields, slides)
    if not slides:
        fields.excuse((*WINDOW, *OVERRIDES))
    if CHUNKED not in kinds:
        _excuse_chunk(fields)
    if not kinds & {RECURRENT, HYBRID, HYBRID_SLIDING}:
        fields.excuse(recurrent.state_keys())


def _excuse_bidirectional(fields: Fields, sliding: bool) -> None:
    """Attention to both sides matters for size only where it halves a window (Gemma's embedding models)."""
    if not sliding or fields.peek("use_bidirectional_attention") == "vision":
        fields.excuse(("use_bidirectional_attention",))


def _excuse_chunk(fields: Fields) -> None:
    """A list of words would have said so; other plans must give a window that the chunk size merely repeats (MiMo)."""
    if fields.active(*_LISTS) or fields.peek("attention_chunk_size") == fields.peek("sliding_window"):
        fields.excuse(("attention_chunk_size",))


def _from_words(fields: Fields) -> list[str] | None:
    key = next(key for key in _LISTS if fields.active(key))
    words = fields.items(key) or []
    roles = [_role(word, f"{fields.name(key)}[{index}]") for index, word in enumerate(words)]
    if any(fields.value(name) is not None for name in LAYERS):
        checked_length(roles, fields.name(key), layer_count(fields))
    elif len(roles) > MAX_LAYERS:
        raise ModelConfigError(f"{fields.name(key)} has {len(roles)} entries, more than {MAX_LAYERS}")
    return roles


def _role(word: object, name: str) -> str:
    role = _ROLE_OF_WORD.get(word) if isinstance(word, str) else None
    if role is None:
        raise ModelConfigError(f"{name} = {shown(word)} is a kind of layer kvtier does not know")
    return role


def _from_cycle(fields: Fields) -> list[str] | None:
    """RecurrentGemma: a pattern repeated over the layers, whose attention is always local."""
    key = "block_types" if fields.active("block_types") else "_block_types"
    words = fields.items(key) or []
    cycle = [_role(word, f"{fields.name(key)}[{index}]") for index, word in enumerate(words)]
    if fields.active("attention_window_size"):
        cycle = [SLIDING if role == FULL else role for role in cycle]
    return [cycle[index % len(cycle)] for index in range(layer_count(fields))]


def _from_letters(fields: Fields) -> list[str] | None:
    """Nemotron-H: one letter a layer (M Mamba-2, * attention, - MLP, E experts)."""
    pattern = fields.text("hybrid_override_pattern") or ""
    roles = []
    for index, letter in enumerate(pattern):
        if letter not in "M*E-":
            raise ModelConfigError(
                f"{fields.name('hybrid_override_pattern')}[{index}] = {letter!r} is not M, *, - or E"
            )
        roles.append(_ROLE_OF_LETTER[letter])
    checked_length(roles, fields.name("hybrid_override_pattern"), layer_count(fields))
    return roles


def _from_numbers(
    key: str, meaning: Mapping[object, str], expected: int | None = None
) -> Callable[[Fields], list[str] | None]:
    """Lists with a number per layer (MiMo: 1 slides; MiniMax-01: 0 is linear; Llama 4: 0 has no rope and is full)."""

    def read(fields: Fields) -> list[str] | None:
        items = fields.items(key) or []
        checked_length(items, fields.name(key), layer_count(fields) if expected is None else expected)
        roles = []
        for index, item in enumerate(items):
            role = meaning.get(item) if isinstance(item, int) else None
            if role is None:
                known = " or ".join(str(value) for value in meaning)
                raise ModelConfigError(f"{fields.name(key)}[{index}] must be {known}, not {shown(item)}")
            roles.append(role)
        return roles

    return read


def _from_kimi(fields: Fields) -> list[str] | None:
    """Kimi: lists of layer numbers that start at 1; together they must name every layer once."""
    if not fields.active("linear_attn_config"):
        return None
    inner = fields.section("linear_attn_config")
    layers = layer_count(fields)
    full, linear = inner.indices("full_attn_layers", layers, first=1), inner.indices("kda_layers", layers, first=1)
    if full & linear or len(full) + len(linear) != layers:
        raise ModelConfigError(
            f"{inner.name('full_attn_layers')} and {inner.name('kda_layers')} do not name each of {layers} layers once"
        )
    return [FULL if index in full else RECURRENT for index in range(layers)]


def _from_indices(key: str, rest: str) -> Callable[[Fields], list[str] | None]:
    def read(fields: Fields) -> list[str] | None:
        layers = layer_count(fields)
        full = fields.indices(key, layers)
        return [FULL if index in full else rest for index in range(layers)]

    return read


def _from_period(fields: Fields) -> list[str] | None:
    """Jamba: one attention layer a period, at an offset."""
    period = fields.count("attn_layer_period", at_most=MAX_LAYERS)
    offset = fields.count("attn_layer_offset", at_least=0, at_most=MAX_LAYERS)
    return [FULL if index % period == offset else RECURRENT for index in range(layer_count(fields))]


def _from_full_interval(fields: Fields) -> list[str] | None:
    """Qwen3-Next: the last layer of each interval attends, the others are linear."""
    interval = fields.count("full_attention_interval", at_most=MAX_LAYERS)
    return [RECURRENT if (index + 1) % interval else FULL for index in range(layer_count(fields))]


def _from_chunks(fields: Fields) -> list[str] | None:
    """Llama 4: layers with rope attend within chunks, the others to everything."""
    if fields.active("no_rope_layers"):
        return _from_numbers("no_rope_layers", {1: CHUNKED, 0: FULL})(fields)
    interval = fields.count("no_rope_layer_interval", at_most=MAX_LAYERS)
    return [CHUNKED if (index + 1) % interval else FULL for index in range(layer_count(fields))]


def _from_gpt_neo(fields: Fields) -> list[str] | None:
    """GPT-Neo: [[["global", "local"], 12]] stands for the pair twelve times."""
    roles: list[str] = []
    name = fields.name("attention_types")
    for entry in fields.items("attention_types") or []:
        if not (
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], int)
        ):
            raise ModelConfigError(f"{name} must hold pairs of a list and a count, not {shown(entry)}")
        if len(entry[0]) * entry[1] > MAX_LAYERS:
            raise ModelConfigError(f"{name} describes more than {MAX_LAYERS} layers")
        roles += [_role(word, name) for word in entry[0]] * entry[1]
    fields.excuse(("attention_layers",))
    checked_length(roles, name, layer_count(fields))
    return roles


def _from_window_pattern(fields: Fields) -> list[str] | None:
    """A window and how often a layer goes without it: every n-th (Gemma, Cohere), or letters (EXAONE)."""
    if not fields.active(*WINDOW):
        return None
    layers = layer_count(fields)
    pattern = fields.value("sliding_window_pattern")
    if isinstance(pattern, str):
        if not set(pattern) <= set("LG"):
            raise ModelConfigError(f"{fields.name('sliding_window_pattern')} = {shown(pattern)} is not made of L and G")
        return [_ROLE_OF_LETTER[pattern[index % len(pattern)]] for index in range(layers)]
    every = fields.count("sliding_window_pattern", at_most=MAX_LAYERS)
    return [SLIDING if (index + 1) % every else FULL for index in range(layers)]


def _from_window_start(fields: Fields) -> list[str] | None:
    """Qwen2: layers from `max_window_layers` on slide, if windows are used at all."""
    layers = layer_count(fields)
    if fields.value("use_sliding_window") is False or not fields.active("sliding_window"):
        return [FULL] * layers
    first = fields.count("max_window_layers", at_least=0, at_most=MAX_TOKENS)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _without_windows(fields: Fields) -> list[str] | None:
    """`use_sliding_window: false` without a layer to start from: the window is there but not used."""
    return [FULL] * layer_count(fields) if not fields.flag("use_sliding_window", default=True) else None


def _from_sparse_section(fields: Fields) -> list[str] | None:
    """MiniMax-M3: one flag a layer for attention to blocks that an indexer picks."""
    if not fields.active("sparse_attention_config"):
        return None
    inner = fields.section("sparse_attention_config")
    if not inner.active("sparse_attention_freq"):
        return None
    layers = layer_count(fields)
    roles = _from_numbers("sparse_attention_freq", {1: SPARSE, 0: FULL}, layers)(inner)
    inner.excuse(("sparse_block_size", "sparse_topk_blocks", "sparse_local_block", "sparse_num_index_heads",
                  "sparse_score_type", "sparse_init_block", "use_sparse_attention",
                  "sparse_disable_index_value"))  # fmt: skip
    return roles


def _from_cross_layers(fields: Fields) -> list[str] | None:
    """Mllama: the named layers look at the image only."""
    layers = layer_count(fields)
    cross = fields.indices("cross_attention_layers", layers)
    return [CROSS if index in cross else FULL for index in range(layers)]


def _without_plan(fields: Fields) -> list[str]:
    """No plan at all: every layer is alike, purely recurrent if there are no attention heads, else full attention."""
    layers = layer_count(fields)
    _excuse_bidirectional(fields, sliding=False)
    attends = fields.active(*QUERY_HEADS[:-1], *DECODER_HEADS)  # num_heads also counts the heads of a Mamba-2 layer
    if not attends and recurrent.is_recurrent(fields):
        return [RECURRENT] * layers
    if not attends and not fields.active(*QUERY_HEADS):
        odd = ", ".join(unexplained(fields))
        raise ModelConfigError(
            f"{fields.name(QUERY_HEADS[0])} is missing" + (f"; cannot interpret {odd}" if odd else "")
        )
    return [FULL] * layers


_SOURCES: tuple[tuple[tuple[str, ...], Callable[[Fields], list[str] | None]], ...] = (
    (_LISTS, _from_words),
    (("hybrid_override_pattern",), _from_letters),
    (("linear_attn_config",), _from_kimi),
    (("attn_type_list",), _from_numbers("attn_type_list", {1: FULL, 0: RECURRENT})),
    (("hybrid_layer_pattern",), _from_numbers("hybrid_layer_pattern", {1: SLIDING, 0: FULL})),
    (("block_types", "_block_types"), _from_cycle),
    (("attn_layer_indices",), _from_indices("attn_layer_indices", RECURRENT)),
    (("full_attn_idxs",), _from_indices("full_attn_idxs", RECURRENT)),
    (("attn_layer_period",), _from_period),
    (("full_attention_interval",), _from_full_interval),
    (("sparse_attention_config",), _from_sparse_section),
    (("cross_attention_layers",), _from_cross_layers),
    (("attention_chunk_size",), _from_chunks),
    (("attention_types",), _from_gpt_neo),
    (("sliding_window_pattern",), _from_window_pattern),
    (("max_window_layers",), _from_window_start),
    (("sliding_window", "use_sliding_window"), _without_windows),
)
