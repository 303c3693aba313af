"""vLLM's names of rows: an offload key is a block hash and a group, its place in the prompt is kept by the engine.

vLLM asks about one key at a time and hands over thousands at once. Here they become arrays: one look-up a key at most,
and for a run of keys in the order of the prompt, which a load is, one comparison with the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvtier.model.keys import KEY_BYTES, KeySpace

Rows = npt.NDArray[np.intp]
_GROUP_BYTES = 4
_WORD, _WORDS = np.uint32, KEY_BYTES // 4


class Names:
    """Keys of one engine as rows: (block of its prompt, column of its group)."""

    def __init__(self, group_columns: Mapping[int, int], chunk_tokens: int) -> None:
        self._groups = len(group_columns)
        self._column_of = np.zeros(max(group_columns, default=0) + 1, np.intp)
        for group, column in group_columns.items():
            self._column_of[group] = column
        self._chunk_tokens = chunk_tokens

    def block(self, key: OffloadKey, context: ReqContext) -> int:
        """The block of one key."""
        end_token = context.get_offload_key_position(key)
        assert end_token is not None
        return end_token // self._chunk_tokens - 1

    def rows(self, keys: Collection[OffloadKey], context: ReqContext) -> Rows:
        """(block, column) of each key, in their order."""
        rows = np.zeros((len(keys), 2), np.intp)
        rows[:, 0] = np.fromiter(map(context.get_offload_key_position, keys), np.intp, len(keys))
        rows[:, 0] //= self._chunk_tokens
        rows[:, 0] -= 1
        if self._groups > 1 and keys:
            groups = _packed(keys)[:, -_GROUP_BYTES:].copy().view(">u4")[:, 0]
            rows[:, 1] = self._column_of[groups]
        return rows

    def run(self, keys: Sequence[OffloadKey], context: ReqContext, chain: bytes, space: KeySpace) -> Rows:
        """The same, faster where the keys are one group's and follow each other in the prompt."""
        n = len(keys)
        if n and self._groups == 1 and len(keys[0]) == KEY_BYTES + _GROUP_BYTES:
            first = self.block(keys[0], context)
            digests = np.frombuffer(b"".join(keys), _WORD).reshape(n, -1)[:, :_WORDS] ^ np.frombuffer(space.mask, _WORD)
            named = chain[first * KEY_BYTES : (first + n) * KEY_BYTES]
            if len(named) == n * KEY_BYTES and (digests.ravel() == np.frombuffer(named, _WORD)).all():
                rows = np.zeros((n, 2), np.intp)
                rows[:, 0] = np.arange(first, first + n)
                return rows
        return self.rows(keys, context)


def _packed(keys: Collection[OffloadKey]) -> npt.NDArray[np.uint8]:
    """Bytes of keys of one length: (keys, bytes)."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
