"""The form of a row: where in its bytes each layer, head, token and channel of K and V lies.

A codec must find the numbers in a row without knowing the engine. `axes` names the order in memory, outermost first:
`l` layer, `k` K before V, `h` KV head, `t` token of the block, `d` channel. vLLM's LBHNC rows (per layer
[H, N, K‖V]) are "lhtkd", its LBNHC rows "lthkd"; engines that keep K and V apart have "lkhtd" or "lkthd". A latent
(MLA) has neither heads nor a V and is described with one head and one part. Rows of anything else are opaque.

A row of several engine blocks has the letter `b` where they are told apart ("lbhtkd"): `tokens` counts those of all.
Some kernels pack the tokens and channels of a block in an order of their own (`packing`): vLLM's attention on CPUs
keeps keys as [channels, tokens], or both in the tiles of AMX, two by sixteen.
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
Packing = Literal["", "channels", "amx"]
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
    packing: Packing = ""
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
        if self.packing and not self.axes.endswith("ktd"):
            raise ConfigError(f"row form: packed keys are a block of their own, axes {self.axes!r} must end in 'ktd'")
        if self.packing == "amx" and ((self.tokens // self.blocks) % 16 or self.head_dim % 16):
            raise ConfigError("row form: tiles of AMX hold a multiple of 16 tokens and channels")
        if self.kind == "mla" and self.heads != 1:
            raise ConfigError(f"row form: a latent has one head, not {self.heads}")

    @property
    def identity(self) -> dict[str, object]:
        """What decoders must agree on; fields younger than the format count only where they are used."""
        fields: dict[str, object] = msgspec.to_builtins(self)
        return {k: v for k, v in fields.items() if (k, v) not in (("blocks", 1), ("packing", ""))}

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
        row (several blocks, packed ones): `views` does then.
        """
        if self.blocks > 1 or self.packing:
            raise ConfigError("a row of several blocks, or of packed ones, has no one view of all its numbers")
        size = {"l": self.layers, "k": self.parts, "h": self.heads, "t": self.tokens, "d": self.head_dim}
        laid_out = self._words(row).reshape([size[axis] for axis in self.axes])
        canonical: Raw = laid_out.transpose([self.axes.index(axis) for axis in AXES])
        return canonical

    def views(self, row: Buffer) -> tuple[Raw, ...]:
        """Each part of `row` as raw words [layers, heads, tokens, head_dim], tokens or channels split into more axes
        where they must be: flattened they are in order. No copy; writable if `row` is.

        Raises ConfigError if the length is not `row_bytes`.
        """
        size = {"l": self.layers, "k": self.parts, "h": self.heads, "d": self.head_dim}
        size |= {"b": self.blocks, "t": self.tokens // self.blocks}
        laid_out = self._words(row).reshape([size[axis] for axis in self.axes])
        wanted = [axis for axis in "klhbtd" if axis in self.axes]
        parts = laid_out.transpose([self.axes.index(axis) for axis in wanted])
        if not self.packing:
            return tuple(parts)
        outer, t, d = parts.shape[1:-2], parts.shape[-2], parts.shape[-1]
        if self.packing == "channels":
            return parts[0].reshape(*outer, d, t).swapaxes(-1, -2), parts[1]
        axes = len(outer)
        keys = parts[0].reshape(*outer, t // 16, d // 2, 16, 2).swapaxes(axes + 1, axes + 2)
        values = parts[1].reshape(*outer, d // 16, t // 2, 16, 2)
        return keys, values.transpose(*range(axes), axes + 1, axes + 3, axes, axes + 2)

    def first_tokens(self, view: Raw, part: int, count: int) -> Raw:
        """The first `count` tokens (even, at most a tile) in a view of a part, or in a cut of one along layers and
        heads: [layers, heads, count, head_dim]. A copy or a view."""
        first = view[:, :, 0] if self.blocks > 1 else view
        if self.packing != "amx":
            return first[:, :, :count]
        cut = first[:, :, 0, :count] if part == 0 else first[:, :, : count // 2]
        return cut.reshape(*view.shape[:2], count, self.head_dim)

    def _words(self, row: Buffer) -> Raw:
        flat = np.frombuffer(row, dtype=np.uint8)
        if flat.size != self.row_bytes:
            raise ConfigError(f"a row of {flat.size} bytes was given where the form has {self.row_bytes}")
        return cast(Raw, flat.view(self.word))
