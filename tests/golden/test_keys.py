"""Keys that must never change: what is on disk today is named by them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.model.keys import KeySpace, chain_length, key_at

SPACE = KeySpace(
    weights="w",
    kv_dtype="bfloat16",
    block_tokens=16,
    layout="l",
    adapter="a",
    tokenizer="t",
    scale_layout="s",
    position_encoding="p",
    parallel_layout="tp1",
    tenant_salt="x",
    hash_scheme="sha256",
    epoch=3,
)


def test_golden_vectors() -> None:
    assert SPACE.digest.hex() == "99fc2d3f3485e84bf88686de70dbf9ca3ac06ebc9a02db187efddd09045134d0"
    assert SPACE.mask.hex() == "fbc6c88caa9db26281964c2875ff582f4d579bb2e85d72d0c6b6b77939b285b3"
    assert SPACE.adopt([bytes(range(32))]).hex() == "fbc7ca8fae98b465899f462379f256205d4689a1fc4864c7deafad6225af9bac"
    assert SPACE.adopt([bytes(16)]).hex() == "87780cc9e0eea21ba0bf2cfd0718d023759d7d47d9edb32dd4fa0d4e110ea135"
    assert SPACE.chain_keys(list(range(40)), [b"img"]).hex() == (
        "f6690934ce7cf57d5d7ccf9baaa377ea1a61b68d18406c62825d6b7cbba4c80e"
        "2a4c7fefbd5a33fafbd6578df7a725e5503192d16c6215e236aebe53ddeb7121"
    )


@pytest.mark.parametrize("field", KeySpace.__struct_fields__)
def test_every_identity_field_changes_every_key(field: str) -> None:
    value = getattr(SPACE, field)
    other = msgspec.structs.replace(SPACE, **{field: value + 1 if isinstance(value, int) else value + "2"})
    digests = [bytes([i]) * 32 for i in range(5)]
    mine, theirs = SPACE.adopt(digests), other.adopt(digests)
    assert all(key_at(mine, i) != key_at(theirs, j) for i in range(5) for j in range(5))
    tokens = list(range(64))
    if field != "block_tokens":
        assert SPACE.chain_keys(tokens)[:32] != other.chain_keys(tokens)[:32]


def test_moving_text_between_fields_changes_the_key() -> None:
    assert KeySpace(weights="ab", kv_dtype="c", block_tokens=1, layout="l").digest != (
        KeySpace(weights="a", kv_dtype="bc", block_tokens=1, layout="l").digest
    )


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True, max_size=50))
def test_adopting_is_one_to_one_and_keeps_order(digests: list[bytes]) -> None:
    chain = SPACE.adopt(digests)
    keys = [key_at(chain, i) for i in range(chain_length(chain))]
    assert len(keys) == len(set(keys)) == len(digests)
    assert chain == b"".join(SPACE.adopt([digest]) for digest in digests)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(0, 80))
def test_own_chain_hash_names_the_whole_prefix(tokens: list[int], at: int) -> None:
    chain = SPACE.chain_keys(tokens)
    assert chain_length(chain) == len(tokens) // 16
    if at < len(tokens):
        changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
        other = SPACE.chain_keys(changed)
        for i in range(chain_length(chain)):
            assert (key_at(chain, i) == key_at(other, i)) == (i < at // 16)


def test_images_with_the_same_placeholder_tokens_have_different_keys() -> None:
    """LMCache#690: all images shared one KV."""
    tokens = [7] * 32
    assert SPACE.chain_keys(tokens, [b"cat"]) != SPACE.chain_keys(tokens, [b"dog"])


def test_a_key_space_without_weights_or_block_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights"):
        KeySpace(weights="", kv_dtype="d", block_tokens=16, layout="l")
    with pytest.raises(ConfigError, match="block_tokens"):
        KeySpace(weights="w", kv_dtype="d", block_tokens=0, layout="l")
