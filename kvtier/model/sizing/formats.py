"""How one number of the KV cache is written down: its bits, and the scales that travel with it."""

from __future__ import annotations

import enum

import msgspec

from kvtier.errors import ConfigError

_LATENT_SCALE_GROUP = 128  # fp8_ds_mla: one fp32 scale per 128 values of the latent
_FP32_BYTES = 4
_KIVI_PAIR_BYTES = 4  # a 16-bit scale and a 16-bit zero point per group


class Scales(enum.Enum):
    """Where the scales of a quantised cache live."""

    NONE = "none"  # none at all, or one per tensor kept outside the cache
    TOKEN_HEAD = "token_head"  # one fp32 for each token, head and side (K, V), inside the page
    GROUP = "group"  # scale and zero point for each group of values (KIVI)


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of cached numbers. `bits` is one element's payload; everything else is overhead of the format."""

    name: str
    bits: int
    scales: Scales = Scales.NONE
    group: int = 0
    packed_latent: bool = False  # MLA rows as 8-bit latent + fp32 scales + 16-bit rope (656 B for 512 + 64)

    def side_bytes(self, width: int) -> int:
        """Bytes of one head's K or V of one token, scales included."""
        if width == 0:
            return 0
        payload = -(-width * self.bits // 8)
        if self.scales is Scales.TOKEN_HEAD:
            return payload + _FP32_BYTES
        if self.scales is Scales.GROUP:
            return payload + -(-width // self.group) * _KIVI_PAIR_BYTES
        return payload

    def latent_bytes(self, rank: int, rope: int, sparse: bool) -> int:
        """Bytes of one token's latent row, scales included. `sparse`: the layer also runs an indexer (DSA)."""
        if self.latent_is_packed(sparse):
            return rank + -(-rank // _LATENT_SCALE_GROUP) * _FP32_BYTES + rope * 2
        if self.scales is Scales.TOKEN_HEAD:
            return -(-(rank + rope) * self.bits // 8) + 2 * _FP32_BYTES  # vLLM keeps a pair of scales beside a latent
        return self.side_bytes(rank + rope)

    def latent_payload_bits(self, rank: int, rope: int, sparse: bool) -> int:
        """Bits of one token's latent row without scales."""
        if self.latent_is_packed(sparse):
            return rank * 8 + rope * 16
        return (rank + rope) * self.bits

    def latent_is_packed(self, sparse: bool) -> bool:
        """FlashMLA's sparse kernel reads no other 8-bit layout; the dense ones read plain fp8 unless told otherwise."""
        return self.packed_latent or (sparse and self.name == "fp8")


BF16 = KVFormat(name="bf16", bits=16)

FORMATS: dict[str, KVFormat] = {
    form.name: form
    for form in (
        BF16,
        KVFormat(name="fp16", bits=16),
        KVFormat(name="fp32", bits=32),
        KVFormat(name="fp8", bits=8),
        KVFormat(name="fp8_ds_mla", bits=8, packed_latent=True),
        KVFormat(name="fp8_per_token_head", bits=8, scales=Scales.TOKEN_HEAD),
        KVFormat(name="int8", bits=8, scales=Scales.TOKEN_HEAD),
        KVFormat(name="int4", bits=4, scales=Scales.TOKEN_HEAD),
        KVFormat(name="kivi4", bits=4, scales=Scales.GROUP, group=32),
        KVFormat(name="kivi2", bits=2, scales=Scales.GROUP, group=32),
    )
}

_ALIASES = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}


def kv_format(name: str) -> KVFormat:
    """The format called `name`, in kvtier's spelling or in vLLM's (`auto` stands for the 16-bit model dtype)."""
    key = name.lower()
    found = FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise ConfigError(f"kv-dtype {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    return found


def element_bytes(dtype: str) -> int:
    """Bytes of one element of an unquantised tensor dtype, as configs and engines spell it."""
    sizes = {"float32": 4, "fp32": 4, "float": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "half": 2}
    size = sizes.get(dtype.lower().removeprefix("torch."))
    if size is None:
        raise ConfigError(f"dtype {dtype!r} is unknown; choose one of {', '.join(sizes)}")
    return size
