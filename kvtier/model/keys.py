"""Key spaces and keys: the key says what the bytes are.

A key is a 32-byte digest naming one block. Where the engine already hashes its blocks in a chain, its digest is reused
and moved into the key space by XOR with a mask derived from the key space's digest. XOR with a constant keeps the
engine's collision resistance: two keys of different key spaces collide only if two engine digests differ by exactly the
XOR of the two masks, which is as hard as any 256-bit birthday. It also costs one vector operation for a whole prompt
instead of one hash a block. Engines without block hashes get `chain_keys`.

A chain (the keys of a prompt, in order) is one `bytes` object of n x 32 bytes: comparing two runs is a memcmp.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NewType

import msgspec
import numpy as np

from kvtier.errors import ConfigError

KEY_BYTES = 32
SCHEMA_VERSION = 1

Key = NewType("Key", bytes)
Chain = NewType("Chain", bytes)


class KeySpace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Everything that must match for a block's bytes to be reusable.

    Any change of any field changes every key. Strings are free-form fingerprints; the adapter must be fingerprinted by
    content or path, not only by name (vllm#44950), and the weights by content or revision (sglang#26792).
    """

    weights: str
    kv_dtype: str
    block_tokens: int
    layout: str
    adapter: str = ""
    tokenizer: str = ""
    scale_layout: str = ""
    position_encoding: str = ""
    parallel_layout: str = ""
    tenant_salt: str = ""
    hash_scheme: str = ""
    epoch: int = 0
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise ConfigError(f"block_tokens is {self.block_tokens}; it must be a positive number of tokens")
        if not self.weights:
            raise ConfigError("the key space has no weights fingerprint; blocks of different models would be mixed up")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes naming this key space; stable across processes, machines and Python versions (golden vectors)."""
        h = hashlib.sha256(b"kvtier.keyspace\0")
        for name in sorted(self.__struct_fields__):
            value = str(getattr(self, name)).encode()
            h.update(struct.pack("<II", len(name), len(value)))
            h.update(name.encode())
            h.update(value)
        return h.digest()

    @cached_property
    def mask(self) -> bytes:
        """32 bytes XORed onto an engine's block digest to move it into this key space."""
        return hashlib.sha256(b"kvtier.mask\0" + self.digest).digest()

    def with_adapter(self, fingerprint: str) -> KeySpace:
        """The same key space for another adapter ("" is the base model)."""
        return msgspec.structs.replace(self, adapter=fingerprint)

    def adopt(self, engine_digests: Sequence[bytes]) -> Chain:
        """Turn an engine's chained block digests into a chain of keys.

        Digests of 32 bytes are masked by one vector XOR. Other lengths (vLLM's xxhash modes give 16) are hashed
        into 32 bytes one by one. An empty sequence gives an empty chain.
        """
        if not engine_digests:
            return Chain(b"")
        if len(engine_digests[0]) != KEY_BYTES:
            return Chain(b"".join(hashlib.sha256(self.mask + digest).digest() for digest in engine_digests))
        packed = np.frombuffer(b"".join(engine_digests), dtype=np.uint64).reshape(-1, KEY_BYTES // 8)
        return Chain((packed ^ np.frombuffer(self.mask, dtype=np.uint64)).tobytes())

    def chain_keys(self, tokens: Sequence[int], extras: Iterable[bytes] = (), parent: Key | None = None) -> Chain:
        """Keys of the full blocks of `tokens`, for engines that give no block digests.

        key_i = sha256(parent ∥ tokens of block i as little-endian u32 ∥ extras). The first parent is this key space's
        digest. `extras` (image digests, tenant salts) are mixed into every block. A partial last block has no key.
        """
        n = len(tokens) // self.block_tokens
        ids = np.asarray(tokens[: n * self.block_tokens], dtype="<u4")
        suffix = b"".join(struct.pack("<I", len(e)) + e for e in extras)
        previous: bytes = parent if parent is not None else self.digest
        keys = []
        for i in range(n):
            block = ids[i * self.block_tokens : (i + 1) * self.block_tokens].tobytes()
            previous = hashlib.sha256(previous + block + suffix).digest()
            keys.append(previous)
        return Chain(b"".join(keys))


def chain_length(chain: bytes) -> int:
    """Number of keys in a chain."""
    return len(chain) // KEY_BYTES


def key_at(chain: bytes, index: int) -> Key:
    """The key at `index` (≥ 0) of a chain."""
    return Key(chain[index * KEY_BYTES : (index + 1) * KEY_BYTES])
