"""The form of a row: where in its bytes each layer, head, token and channel of K and V lies.

A codec must find the numbers in a row without knowing the engine. `axes` names the order in memory, outermost first:
`l` layer, `k` K before V, `h` KV head, `t` token of the block, `d` channel. vLLM's LBHNC rows (per layer
[H, N, K‖V]) are "lhtkd", its LBNHC rows "lthkd"; engines that keep K and V apart have "lkhtd" or "lkthd". A latent
(MLA) has neither heads nor a V and is described with one head and one part. Rows of anything else are opaque.

A row of several engine blocks has the letter `b` where they are told apart ("lbhtkd"): `tokens` counts those of all.
Some kernels keep the keys of a block with the channels outermost (`keys_by_channel`; vLLM's attention on CPUs does).
"""

from __future__ import annotations

from typing import Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError

AXES = "lkhtd"
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
ObjectKind = Literal["kv", "mla", "opaque"]
Raw = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


class RowForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and order of one row. `kind` is what the row holds: "kv", "mla" (one part, one head) or "opaque".

    An opaque row has only `row_bytes`; for the others it follows from the sizes. Raises ConfigError where they
    contradict each other.
    """

    kind: ObjectKind = "kv"
    layers: int = 0
    heads: int = 0
    tokens: int = 0
    head_dim: int = 0
    dtype: str = "bfloat16"
    axes: str = AXES
    blocks: int = 1
    keys_by_channel: bool = False
    opaque_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind == "opaque":
            if self.opaque_bytes <= 0:
                raise ConfigError(f"an opaque row has opaque_bytes = {self.opaque_bytes}; it must be positive")
            return
        sizes = (self.layers, self.heads, self.tokens, self.head_dim)
        if min(sizes) <= 0:
            raise ConfigError(f"row form: layers, heads, tokens, head_dim are {sizes}; each must be positive")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"row form: dtype {self.dtype!r} is not one of {', '.join(ELEMENT_BYTES)}")
        letters = self.axes.replace("b", "") if self.blocks > 1 else self.axes
        if sorted(letters) != sorted(AXES) or self.axes[-1] != "d" or len(self.axes) - len(letters) > 1:
            raise ConfigError(f"row form: axes {self.axes!r} must order the letters {AXES!r} and end in 'd'")
        if self.blocks < 1 or self.tokens % self.blocks or (self.blocks > 1 and letters == self.axes):
            raise ConfigError(f"row form: {self.blocks} blocks of {self.tokens} tokens in all, in axes {self.axes!r}")
        if self.keys_by_channel and not self.axes.endswith("ktd"):
            raise ConfigError(
                f"row form: keys by channel are blocks of their own, axes {self.axes!r} must end in 'ktd'"
            )
        if self.kind == "mla" and self.heads != 1:
            raise ConfigError(f"row form: a latent has one head, not {self.heads}")

    @property
    def identity(self) -> dict[str, object]:
        """What decoders must agree on; fields younger than the format count only where they are used."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        return {k: v for k, v in fields.items() if (k, v) not in (("blocks", 1), ("keys_by_channel", False))}

    @property
    def parts(self) -> int:
        """2 for K and V, 1 for a latent."""
        return 1 if self.kind == "mla" else 2

    @property
    def elements(self) -> int:
        """Numbers in a row; 0 for an opaque one."""
        return self.parts * self.layers * self.heads * self.tokens * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of the row as the engine writes it."""
        return self.opaque_bytes if self.kind == "opaque" else self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def word(self) -> type[np.uint16] | type[np.uint32]:
        """The type of the raw words a row is made of."""
        return np.uint16 if ELEMENT_BYTES[self.dtype] == 2 else np.uint32

    @property
    def units(self) -> int:
        """(layer, K|V, head) triples: what a bits map has an entry for."""
        return self.layers * self.parts * self.heads

    def numbers(self, row: Buffer) -> Raw:
        """`row` seen as [layers, parts, heads, tokens, head_dim] of raw 16- or 32-bit words. No copy.

        Writable if `row` is. Raises ConfigError if the length is not `row_bytes`, or if no one view can show such a
        row (several blocks, keys by channel): `views` does then.
        """
        if self.blocks > 1 or self.keys_by_channel:
            raise ConfigError("a row of several blocks, or with keys by channel, has no one view of all its numbers")
        size = {"l": self.layers, "k": self.parts, "h": self.heads, "t": self.tokens, "d": self.head_dim}
        laid_out = self._words(row).reshape([size[axis] for axis in self.axes])
        canonical: Raw = laid_out.transpose([self.axes.index(axis) for axis in AXES])
        return canonical

    def views(self, row: Buffer) -> tuple[Raw, ...]:
        """Each part of `row` as raw words [layers, heads, tokens, head_dim], or [layers, heads, blocks, tokens of one,
        head_dim] where a row has several blocks. No copy; writable if `row` is.

        Raises ConfigError if the length is not `row_bytes`.
        """
        size = {"l": self.layers, "k": self.parts, "h": self.heads, "d": self.head_dim}
        size |= {"b": self.blocks, "t": self.tokens // self.blocks}
        laid_out = self._words(row).reshape([size[axis] for axis in self.axes])
        wanted = [axis for axis in "klhbtd" if axis in self.axes]
        parts = laid_out.transpose([self.axes.index(axis) for axis in wanted])
        if not self.keys_by_channel:
            return tuple(parts)
        keys = parts[0]
        by_channel = keys.reshape(*keys.shape[:-2], keys.shape[-1], keys.shape[-2])
        return by_channel.swapaxes(-1, -2), parts[1]

    def _words(self, row: Buffer) -> Raw:
        flat = np.frombuffer(row, dtype=np.uint8)
        if flat.size != self.row_bytes:
            raise ConfigError(f"a row of {flat.size} bytes was given where the form has {self.row_bytes}")
        return cast(Raw, flat.view(self.word))
