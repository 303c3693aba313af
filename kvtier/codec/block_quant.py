"""Block quantisation: recipes D and M, and the KIVI form, over one engine.

D: keys un-rotated and quantised per channel over groups of 64 tokens; values Hadamard-rotated and quantised per token.
M: keys un-rotated, minus the model's mean key, Hadamard-rotated, per token: no token groups, for short blocks.
Both keep the first four tokens of a prompt (attention sinks) as they are, outside every minimum and maximum, and take
their bits from a map. KIVI (arXiv:2402.02750) is the same without rotation, sinks and map.

Keys are un-rotated by their absolute position. Where it is not known, D un-rotates relative to the block's first token:
one rotation common to all keys of the block is left in, which mixes the ranges of paired channels (about 1.3 times the
KL at 6 bits), and M leaves the mean out. Rotations add up, so a block can be decoded at another position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.codec.arithmetic import F16_SLACK, NOT_FINITE, PLANES, Arithmetic, Bytes, Floats, pack, range_shares, unpack
from kvtier.codec.bits_map import BitsMap, bits_digest
from kvtier.codec.boxes import Box, boxes_of
from kvtier.codec.checksum import checksum64
from kvtier.codec.form import RowForm
from kvtier.codec.fused import Passes, places_of
from kvtier.codec.header import HEADER_BYTES, POSITION_UNKNOWN, Header, checked_payload, read_header
from kvtier.codec.planes import PayloadPlan, Sections, plan_payload
from kvtier.codec.rope import rope_tables
from kvtier.codec.scratch import Scratch
from kvtier.errors import ConfigError, CorruptBlockError, ForeignBlockError, NotEncodableError

FIRST_BLOCK = 1
WITHOUT_MEAN = 2


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What is done to K and V before they are quantised. `key_group` is in tokens, None means per token."""

    key_group: int | None = 64
    value_group: int = 1 << 16
    unrotate: bool = True
    subtract_mean: bool = False
    hadamard_keys: bool = False
    hadamard_values: bool = True
    sinks: int = 4
    mixed_channels: int = 64


RECIPE_D = Recipe()
RECIPE_M = Recipe(key_group=None, subtract_mean=True, hadamard_keys=True)
RECIPE_KIVI = Recipe(value_group=32, unrotate=False, hadamard_values=False, sinks=0)


class BlockQuantCodec:
    """A `RowCodec`; see the module docstring. `bits` is used for every block but the first of a prompt, `first_bits`
    (fewer, so that the sinks fit the same row) for that one.

    `inverse_frequencies` and `means` come from the model's calibration, whose digest is `calibration`.
    """

    lossless: bool = False

    def __init__(
        self,
        name: str,
        form: RowForm,
        recipe: Recipe,
        arithmetic: Arithmetic,
        bits: BitsMap,
        first_bits: BitsMap,
        *,
        inverse_frequencies: tuple[float, ...] = (),
        means: Floats | None = None,
        calibration: bytes = b"",
    ) -> None:
        if recipe.unrotate and not inverse_frequencies:
            raise ConfigError(f"codec {name} un-rotates keys and needs the model's rotary frequencies")
        if recipe.subtract_mean and means is None:
            raise ConfigError(f"codec {name} subtracts mean keys and needs a calibration of the model")
        if recipe.sinks >= form.tokens // form.blocks:
            raise ConfigError(
                f"codec {name} keeps {recipe.sinks} first tokens whole; blocks have only {form.tokens // form.blocks}"
            )
        self.name, self.form, self.recipe = name, form, recipe
        self._arithmetic = arithmetic
        self._passes = arithmetic.passes
        self._scratch = Scratch()
        self.frequencies = inverse_frequencies
        self.means = means
        self.mixed = mixed_channels(form.head_dim, recipe.mixed_channels)
        key_group, value_group = recipe.key_group, recipe.value_group
        self.plan = plan_payload(form, bits, sinks=0, key_group=key_group, value_group=value_group)
        self.first_plan = plan_payload(
            form, first_bits, sinks=recipe.sinks, key_group=key_group, value_group=value_group
        )
        unit = form.tokens * form.head_dim
        self._places, self._first_places = places_of(self.plan, unit), places_of(self.first_plan, unit)
        self._bits_digest = bits_digest(bits, first_bits)
        described = msgspec.json.encode((name, form.identity, recipe, inverse_frequencies))
        self.parameters = hashlib.sha256(described + self._bits_digest + calibration).digest()[:16]
        self.encoded_bytes = HEADER_BYTES + max(self.plan.payload_bytes, self.first_plan.payload_bytes)
        self.base_bytes = HEADER_BYTES + max(self.plan.base_bytes, self.first_plan.base_bytes)

    def encode(self, row: memoryview, target: memoryview, first_token: int | None = None) -> int:
        """See RowCodec.encode."""
        first = first_token == 0 and self.recipe.sinks > 0
        blind = self.recipe.subtract_mean and first_token is None
        plan = self.first_plan if first else self.plan
        raw = self.form.views(row)
        payload = target[HEADER_BYTES : HEADER_BYTES + plan.payload_bytes]
        sections = Sections(np.frombuffer(payload, dtype=np.uint8), plan, self.form)
        codes = self._codes()
        for box in self._boxes():
            values = self._arithmetic.load(box.cut_view(raw), self.form.dtype)
            values = values.reshape(box.units, self.form.tokens, self.form.head_dim)
            if first:
                box.cut(sections.sinks)[...] = self.form.first_tokens(box.cut_view(raw), box.part, plan.sinks)
            if self._passes is not None:
                self._write_compiled(self._passes, values, box, plan, sections, first_token, blind)
                continue
            values = self._forward(values, box, first_token, blind)
            if first:
                values[:, : plan.sinks] = values[:, plan.sinks : plan.sinks + 1]
            self._quantise(values, box, plan, sections, codes)
        for c in plan.classes if self._passes is None else ():
            mine = codes[c.start : c.start + c.count]
            pack(mine, c.bits, sections.base(c), sections.residual(c))
        position = POSITION_UNKNOWN if first_token is None else first_token
        flags = FIRST_BLOCK * first | WITHOUT_MEAN * blind
        checksum = checksum64(payload)
        size = plan.payload_bytes
        Header(self.name, flags, self.parameters, self._bits_digest, position, size, checksum, 0).pack_into(target)
        return HEADER_BYTES + size

    def decode(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """See RowCodec.decode."""
        header, payload = checked_payload(encoded, self.name, self.parameters)
        self._restore(header, payload, row, first_token, with_residual=True)

    def decode_base(self, encoded: memoryview, row: memoryview, first_token: int | None = None) -> None:
        """Restore a coarser row from the first `base_bytes` of an encoded row (the progressive form).

        The header is checked, the payload's checksum cannot be: the caller vouches for the bytes. Raises as decode.
        """
        header = read_header(encoded, partial=True)
        if header.codec != self.name or header.parameters != self.parameters:
            raise ForeignBlockError(f"the row was encoded by {header.codec!r} with other parameters")
        self._restore(header, encoded[HEADER_BYTES:], row, first_token, with_residual=False)

    def scale_offsets(self) -> npt.NDArray[np.int64]:
        """Where in the payload of a later block each unit's scales and minima begin, [units, 2]; for device kernels."""
        form, plan = self.form, self.plan
        offsets = np.empty((form.layers, form.parts, form.heads, 2), dtype=np.int64)
        start = plan.scales_offset
        for part, count in enumerate((plan.key_scales, plan.value_scales)):
            each = 2 * count // (form.layers * form.heads)
            unit = np.arange(form.layers * form.heads, dtype=np.int64).reshape(form.layers, form.heads) * each
            offsets[:, part, :, 0], offsets[:, part, :, 1] = start + unit, start + 2 * count + unit
            start += 4 * count
        return offsets.reshape(-1, 2)

    def _restore(
        self, header: Header, payload: memoryview, row: memoryview, first_token: int | None, *, with_residual: bool
    ) -> None:
        first = bool(header.flags & FIRST_BLOCK)
        plan = self.first_plan if first else self.plan
        if header.payload_bytes != plan.payload_bytes:
            raise CorruptBlockError(f"{self.name}: a payload of {header.payload_bytes} bytes, not {plan.payload_bytes}")
        if len(payload) < (plan.payload_bytes if with_residual else plan.base_bytes):
            raise CorruptBlockError(f"{self.name}: only {len(payload)} bytes of payload are there")
        raw = self.form.views(row)
        sections = Sections(np.frombuffer(payload, dtype=np.uint8), plan, self.form)
        passes = self._passes if with_residual else None
        codes = self._codes()
        for c in plan.classes if passes is None else ():
            mine = codes[c.start : c.start + c.count]
            unpack(sections.base(c), sections.residual(c) if with_residual else None, c.bits, mine)
            if not with_residual and c.residual_bytes:
                mine += np.uint8((1 << PLANES[c.bits][1]) // 2)
        for box in self._boxes():
            kept = self._kept_sinks(box, sections, header, first_token) if first else None
            if passes is not None:
                values = self._read_compiled(passes, box, plan, sections, header, first_token)
            else:
                values = self._dequantise(box, plan, sections, codes)
                values = self._backward(values, box, header, first_token)
            if first:
                values[:, : plan.sinks] = kept
            cut = box.cut_view(raw)
            self._arithmetic.store(values.reshape(cut.shape), cut, self.form.dtype)

    def _kept_sinks(self, box: Box, sections: Sections, header: Header, first_token: int | None) -> Any:
        """The sinks of a box, [units, sinks, d], turned if the row is wanted elsewhere."""
        kept = self._arithmetic.load(box.cut(sections.sinks), self.form.dtype).reshape(
            box.units, -1, self.form.head_dim
        )
        shift = 0 if first_token is None else first_token - header.first_token
        if shift and box.part == 0 and self.frequencies:
            kept = self._arithmetic.rotate(kept, *rope_tables(self.frequencies, shift, 1), inverse=False)
        return kept * 1.0  # out of the thread's buffers, which the rest of the row is about to use

    def _forward(self, values: Any, box: Box, first_token: int | None, blind: bool) -> Any:
        """From what the engine stores to what is quantised."""
        recipe, arithmetic = self.recipe, self._arithmetic
        if box.part == 1:
            return arithmetic.hadamard(values, self.mixed) if recipe.hadamard_values else values
        if recipe.unrotate:
            tables = rope_tables(self.frequencies, first_token or 0, self.form.tokens)
            values = arithmetic.rotate(values, *tables, inverse=True)
        if recipe.subtract_mean and not blind:
            values = arithmetic.add(values, self._mean_of(box), -1)
        return arithmetic.hadamard(values, self.mixed) if recipe.hadamard_keys else values

    def _backward(self, values: Any, box: Box, header: Header, first_token: int | None) -> Any:
        """The inverse of _forward, for the position the row is wanted at."""
        recipe, arithmetic = self.recipe, self._arithmetic
        if box.part == 1:
            return arithmetic.hadamard(values, self.mixed) if recipe.hadamard_values else values
        if recipe.hadamard_keys:
            values = arithmetic.hadamard(values, self.mixed)
        if recipe.subtract_mean and not header.flags & WITHOUT_MEAN:
            values = arithmetic.add(values, self._mean_of(box), 1)
        known = header.first_token != POSITION_UNKNOWN
        shift = first_token - header.first_token if known and first_token is not None else 0
        if recipe.unrotate:
            origin = header.first_token if known else 0
            tables = rope_tables(self.frequencies, origin + shift, self.form.tokens)
            values = arithmetic.rotate(values, *tables, inverse=False)
        return values

    def _quantise(self, values: Any, box: Box, plan: PayloadPlan, sections: Sections, codes: Bytes) -> None:
        per_channel = box.part == 0 and self.recipe.key_group is not None
        grouped, levels = self._grouped(values, box, plan, per_channel), self._levels(box, plan, per_channel)
        found, scales, minima = self._arithmetic.quantise(grouped, levels, per_channel=per_channel)
        codes[plan.rank[box.unit_index]] = found.reshape(box.units, self.form.tokens, self.form.head_dim)
        scale_view, minimum_view = sections.scales(box)
        scale_view[...] = scales.reshape(scale_view.shape)
        minimum_view[...] = minima.reshape(minimum_view.shape)

    def _dequantise(self, box: Box, plan: PayloadPlan, sections: Sections, codes: Bytes) -> Any:
        per_channel = box.part == 0 and self.recipe.key_group is not None
        mine = self._grouped(codes[plan.rank[box.unit_index]], box, plan, per_channel)
        scales, minima = (view.reshape(mine.shape[0], -1) for view in sections.scales(box))
        values = self._arithmetic.dequantise(mine, scales, minima, per_channel=per_channel)
        return values.reshape(box.units, self.form.tokens, self.form.head_dim)

    def _write_compiled(
        self,
        passes: Passes,
        loaded: Any,
        box: Box,
        plan: PayloadPlan,
        sections: Sections,
        first_token: int | None,
        blind: bool,
    ) -> None:
        """What `_forward`, `_quantise` and `pack` do, in two compiled passes."""
        recipe, form, sinks = self.recipe, self.form, plan.sinks
        per_channel = box.part == 0 and recipe.key_group is not None
        groups = plan.value_groups if box.part == 1 else plan.key_groups
        shape = (box.units, groups, form.head_dim) if per_channel else (box.units, 1, form.tokens * groups)
        low, high = (self._floats(name, shape) for name in ("low", "high"))
        frequencies = self.frequencies if box.part == 0 and recipe.unrotate else ()
        cosine, sine = rope_tables(frequencies, first_token or 0, form.tokens)
        if per_channel:
            values = np.asarray(loaded)
            passes.rotate_range(values, cosine, sine, sinks, low, high)
        else:
            if frequencies:
                loaded = self._arithmetic.rotate(loaded, cosine, sine, inverse=True)
            if box.part == 0 and recipe.subtract_mean and not blind:
                loaded = self._arithmetic.add(loaded, self._mean_of(box), -1)
            values, mixed = np.asarray(loaded), self._mixed_in(box)
            passes.token_range(values, mixed, mixed**-0.5, sinks, low, high)
        levels = plan.levels[box.unit_index]
        scales, minima = np.empty(shape, np.uint16), np.empty(shape, np.uint16)
        drawn_in, broken = range_shares(levels), np.zeros(1, np.bool_)
        drawn = np.ones_like(levels) if drawn_in is None else drawn_in.reshape(-1)
        passes.steps(low, high, drawn, np.float32(1 + F16_SLACK) / levels, scales, minima, broken)
        if broken[0]:
            raise NotEncodableError(NOT_FINITE)
        places = (self._first_places if sinks else self._places)[box.unit_index]
        codes = self._scratch.bytes_of("unit", form.tokens * form.head_dim).reshape(form.tokens, form.head_dim)
        passes.quantise(values, low, high, levels, per_channel, groups, places, sections.payload, codes)
        scale_view, minimum_view = sections.scales(box)
        scale_view[...] = scales.view(np.float16).reshape(scale_view.shape)
        minimum_view[...] = minima.view(np.float16).reshape(minimum_view.shape)

    def _read_compiled(
        self,
        passes: Passes,
        box: Box,
        plan: PayloadPlan,
        sections: Sections,
        header: Header,
        first_token: int | None,
    ) -> Any:
        """What `unpack`, `_dequantise` and `_backward` do, in one compiled pass and, for recipe M's keys, two more."""
        recipe, form = self.recipe, self.form
        per_channel = box.part == 0 and recipe.key_group is not None
        groups = plan.value_groups if box.part == 1 else plan.key_groups
        shape = (box.units, groups, form.head_dim) if per_channel else (box.units, 1, form.tokens * groups)
        steps, least = (view.astype(np.float32).reshape(shape) for view in sections.scales(box))
        origin = 0 if header.first_token == POSITION_UNKNOWN else header.first_token
        moved = first_token if first_token is not None and header.first_token != POSITION_UNKNOWN else origin
        frequencies = self.frequencies if box.part == 0 and recipe.unrotate else ()
        cosine, sine = rope_tables(frequencies, moved, form.tokens)
        places = (self._first_places if plan.sinks else self._places)[box.unit_index]
        codes = self._scratch.bytes_of("unit", form.tokens * form.head_dim).reshape(form.tokens, form.head_dim)
        values = self._floats("read", (box.units, form.tokens, form.head_dim))
        mixed = 1 if per_channel else self._mixed_in(box)
        passes.dequantise(
            sections.payload, steps, least, per_channel, groups, places, values, codes,
            cosine, sine, per_channel and recipe.unrotate, mixed, mixed**-0.5,
        )  # fmt: skip
        found = self._arithmetic.wrap(values)
        if box.part == 0 and not per_channel:
            if recipe.subtract_mean and not header.flags & WITHOUT_MEAN:
                found = self._arithmetic.add(found, self._mean_of(box), 1)
            if frequencies:
                found = self._arithmetic.rotate(found, cosine, sine, inverse=False)
        return found

    def _mixed_in(self, box: Box) -> int:
        """Channels a Hadamard rotation mixes in this part; 1 if it does not."""
        return self.mixed if (self.recipe.hadamard_values if box.part else self.recipe.hadamard_keys) else 1

    def _floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        flat = self._scratch.bytes_of(name, 4 * int(np.prod(shape))).view(np.float32)
        return flat.reshape(shape)

    def _grouped(self, values: Any, box: Box, plan: PayloadPlan, per_channel: bool) -> Any:
        """[units, tokens, d] with the groups of tokens, or of channels, moved to where the arithmetic expects them."""
        if per_channel:
            return values.reshape(box.units * plan.key_groups, -1, self.form.head_dim)
        groups = plan.value_groups if box.part == 1 else plan.key_groups
        return values.reshape(box.units, self.form.tokens * groups, -1)

    def _levels(self, box: Box, plan: PayloadPlan, per_channel: bool) -> Floats:
        levels = plan.levels[box.unit_index]
        return np.repeat(levels, plan.key_groups) if per_channel else levels

    def _mean_of(self, box: Box) -> Floats:
        assert self.means is not None
        return self.means[box.layer : box.layer_end, box.head : box.head_end].reshape(box.units, 1, -1)

    def _codes(self) -> Bytes:
        """Room for a row's codes [units, tokens, d] in class order, the thread's until its next row."""
        form = self.form
        return self._scratch.bytes_of("codes", form.elements).reshape(form.units, form.tokens, form.head_dim)

    def _boxes(self) -> Iterator[Box]:
        return boxes_of(self.form)


def mixed_channels(head_dim: int, most: int) -> int:
    """How many channels one Hadamard rotation mixes: the largest power of two that divides head_dim, up to `most`."""
    return min(most, head_dim & -head_dim)
