"""The form of a row: where in its bytes each layer, head, token and channel of K and V lies.

A codec must find the numbers in a row without knowing the engine. `axes` names the order in memory, outermost first:
`l` layer, `k` K before V, `h` KV head, `t` token of the block, `d` channel. vLLM's LBHNC rows (per layer
[H, N, K‖V]) are "lhtkd", its LBNHC rows "lthkd"; engines that keep K and V apart have "lkhtd" or "lkthd". A latent
(MLA) has neither heads nor a V and is described with one head and one part. Rows of anything else are opaque.
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
        if sorted(self.axes) != sorted(AXES) or self.axes[-1] != "d":
            raise ConfigError(f"row form: axes {self.axes!r} must order the letters {AXES!r} and end in 'd'")
        if self.kind == "mla" and self.heads != 1:
            raise ConfigError(f"row form: a latent has one head, not {self.heads}")

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

    def numbers(self, row: memoryview | bytes | bytearray | npt.NDArray[np.uint8]) -> Raw:
        """`row` seen as [layers, parts, heads, tokens, head_dim] of raw 16- or 32-bit words. No copy.

        Writable if `row` is. Raises ConfigError if the length is not `row_bytes`.
        """
        flat = np.frombuffer(row, dtype=np.uint8)
        if flat.size != self.row_bytes:
            raise ConfigError(f"a row of {flat.size} bytes was given where the form has {self.row_bytes}")
        words: Raw = cast(Raw, flat.view(self.word))
        size = {"l": self.layers, "k": self.parts, "h": self.heads, "t": self.tokens, "d": self.head_dim}
        laid_out = words.reshape([size[axis] for axis in self.axes])
        canonical: Raw = laid_out.transpose([self.axes.index(axis) for axis in AXES])
        return canonical
