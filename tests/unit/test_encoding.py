"""Codecs by configuration: what is refused at the start, what a tier is opened with, and whom a lossy tier serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvtier.cache.geometry import Geometry
from kvtier.cache.stores import RowRef
from kvtier.cache.tier_cache import TierCache
from kvtier.codec.calibration import Calibration, Gate
from kvtier.codec.form import RowForm
from kvtier.codec.registry import NAMES
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError
from kvtier.model.keys import KeySpace
from kvtier.model.request import Outcome, RequestContext
from kvtier.testing.clock import VirtualClock
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows
from kvtier.tiers.codec_tier import CodecTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.encoding import ZSTD_SHARE, Encoding, GroupForm, encodings_of
from kvtier.tiers.open import Site, open_lower_tiers
from kvtier.tiers.protocol import RowStatus, Tier, TierProbe
from tests.unit.codec_rows import SMALL, calibration_of, row_of

GATES = {"int8": Gate(2e-4, 8.25), "d6": Gate(1e-4, 6.6), "d4": Gate(1e-3, 4.5), "d3": Gate(1.9e-2, 3.5)}


def encodings(
    codecs: Mapping[str, str],
    max_kl: Mapping[str, float] | None = None,
    group: GroupForm | None = None,
    calibration: Calibration | None = None,
    *,
    allow_slow: bool = True,
) -> dict[str, Encoding]:
    form = group or GroupForm(SMALL)
    model = calibration or calibration_of(SMALL, gates=GATES)
    size = form.form.row_bytes * form.ranks
    return encodings_of(codecs, max_kl or {}, {0: form}, size, lambda: model, allow_slow=allow_slow)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "raw"])
def test_every_codec_can_be_named_for_a_tier(name: str) -> None:
    encoding = encodings({"nvme": name})["nvme"]
    assert encoding.lossless is (name == "zstd")
    tier = encoding.around(MemoryTier(encoding.row_bytes, 4, name="nvme"))
    slots = tier.reserve(2)
    assert slots is not None
    rows, targets = chain_rows(2), [memoryview(bytearray(SMALL.row_bytes)) for _ in range(2)]
    wrote = tier.write(slots, rows, [row_of(SMALL, seed) for seed in range(2)])
    if name != "zstd":  # noise may not shrink
        assert wrote == [RowStatus.OK] * 2
        assert tier.read(slots, rows, targets) == [RowStatus.OK] * 2
        work = tier.stats().codec
        assert work is not None
        assert work.plain_written_bytes == work.plain_read_bytes == 2 * SMALL.row_bytes
        assert 0 < work.encoded_written_bytes <= 2 * encoding.row_bytes
        assert work.encode_s > 0
        assert work.decode_s > 0


def test_raw_is_no_codec_at_all() -> None:
    assert encodings({"nvme": "raw"}) == {}


def test_rows_that_zstd_does_not_shrink_are_refused_and_counted() -> None:
    encoding = encodings({"nvme": "zstd"})["nvme"]
    assert encoding.row_bytes == int(ZSTD_SHARE * SMALL.row_bytes)
    tier = encoding.around(MemoryTier(encoding.row_bytes, 4, name="nvme"))
    slots = tier.reserve(2)
    assert slots is not None
    noise = memoryview(np.random.default_rng(0).bytes(SMALL.row_bytes))
    zeros = memoryview(bytearray(SMALL.row_bytes))
    assert tier.write(slots, chain_rows(2), [noise, zeros]) == [RowStatus.FULL, RowStatus.OK]
    work = tier.stats().codec
    assert work is not None
    assert work.refused == {"not_encodable": 1}


@pytest.mark.parametrize(
    ("codecs", "max_kl", "group", "message"),
    [
        ({"nvme": "d5"}, {}, None, "'d5' for the nvme tier is not one of raw"),
        ({"nvme": "d4"}, {"nvme": 5e-4}, None, r"d4 costs 0.001 nats .* budget is 0.0005. Use d6 or int8"),
        ({"nvme": "d3"}, {"nvme": 1e-2}, None, r"d3 costs 0.019 nats .* Use d4 or d6 or int8|Use d6 or d4 or int8"),
        ({"nvme": "int8"}, {"nvme": 1e-4}, None, "int8 costs 0.0002 nats"),
        ({"nvme": "kivi4"}, {"nvme": 1e-2}, None, "no calibration KL"),
        ({}, {"nvme": 1e-3}, None, "which has no codec"),
        (
            {"nvme": "d4"},
            {},
            GroupForm(RowForm(layers=3, heads=2, tokens=16, head_dim=32)),
            "needs 32 of them, not 16: raise blocks_per_chunk",
        ),
        (
            {"nvme": "int8"},
            {},
            GroupForm(RowForm(kind="opaque", opaque_bytes=4096), refusal="its layers differ"),
            "int8 must find the numbers in a row, and cannot: its layers differ",
        ),
        (
            {"nvme": "m4"},
            {},
            GroupForm(RowForm(kind="mla", layers=3, heads=1, tokens=64, head_dim=64)),
            "keys and values, not mla",
        ),
        ({"nvme": "d4"}, {}, GroupForm(RowForm(layers=4, heads=2, tokens=64, head_dim=32)), "the calibration has"),
    ],
)
def test_what_does_not_fit_stops_the_start(
    codecs: dict[str, str], max_kl: dict[str, float], group: GroupForm | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encodings(codecs, max_kl, group)


def test_a_calibration_is_read_only_where_a_codec_needs_it() -> None:
    def missing() -> Calibration:
        raise ConfigError("run kvtier calibrate")

    assert encodings_of({"nvme": "int8"}, {}, {0: GroupForm(SMALL)}, SMALL.row_bytes, missing)
    for codecs, budget in (({"nvme": "d4"}, {}), ({"nvme": "int8"}, {"nvme": 1e-3})):
        with pytest.raises(ConfigError, match="run kvtier calibrate"):
            encodings_of(codecs, budget, {0: GroupForm(SMALL)}, SMALL.row_bytes, missing)


def test_ranks_and_their_replicas_take_their_own_heads() -> None:
    whole = calibration_of(SMALL, gates=GATES)
    half = RowForm(layers=3, heads=1, tokens=64, head_dim=32)
    one = encodings({"nvme": "d4"}, group=GroupForm(half, 2), calibration=whole)["nvme"]
    two = encodings({"nvme": "d4"}, group=GroupForm(half, 4, 2), calibration=whole)["nvme"]
    assert one.codecs[0].form.row_bytes == SMALL.row_bytes
    assert two.codecs[0].form.row_bytes == 2 * SMALL.row_bytes
    assert one.identity != two.identity


class Quick(MemoryTier):
    """A medium that reads faster than anything decodes."""

    def probe(self) -> TierProbe:
        return TierProbe(1e-5, 1e13, 1e-5, 1e13)


def test_a_codec_slower_than_its_tier_is_refused_with_both_numbers_unless_allowed() -> None:
    encoding = encodings({"nvme": "cachegen"}, allow_slow=False)["nvme"]
    with pytest.raises(ConfigError, match=r"cachegen decodes \d+\.\d\d GB/s .* reads 10000\.00 GB/s"):
        encoding.around(Quick(encoding.row_bytes, 4, name="nvme"))
    allowed = encodings({"nvme": "cachegen"}, allow_slow=True)["nvme"]
    assert allowed.around(Quick(allowed.row_bytes, 4, name="nvme")).row_bytes == SMALL.row_bytes


def test_a_tier_is_opened_with_the_codecs_rows_and_finds_nothing_of_another_codec(tmp_path: Path) -> None:
    config = CacheConfig(nvme_path=str(tmp_path), nvme_bytes=4 << 20, codecs={"nvme": "d4"})

    def open_with(name: str, calibration: Calibration) -> Tier:
        made = encodings({"nvme": name}, calibration=calibration)
        return open_lower_tiers(Site(config, b"\1" * 32, "layout", SMALL.row_bytes, encodings=made)).tiers[0]

    ours, other = calibration_of(SMALL, gates=GATES), calibration_of(SMALL, 1, gates=GATES)
    found = []
    for name, calibration in (("d4", ours), ("d4", ours), ("d4", other), ("d3", other), ("raw", other)):
        tier = open_with(name, calibration)
        found.append(len(tier.recover()))
        assert isinstance(tier, CodecTier) is (name != "raw")
        slots = tier.reserve(3 - found[-1])
        assert slots is not None
        assert tier.write(slots, chain_rows(3)[found[-1] :], [row_of(SMALL)] * len(slots)) == [RowStatus.OK] * len(
            slots
        )
        tier.close()
    assert found == [0, 3, 0, 0, 0]


def test_codecs_of_tiers_that_are_none(tmp_path: Path) -> None:
    config = CacheConfig(codecs={"hbm": "int8"})
    with pytest.raises(ConfigError, match="names the tier 'hbm'; codecs are for dram and the tiers below it"):
        open_lower_tiers(Site(config, b"\1" * 32, "layout", 64))


def test_encoded_memory_serves_only_those_who_accept_it() -> None:
    config = CacheConfig(dram_bytes=1, gate=False, policy="lru", io_threads=2, codecs={"dram": "int8"})
    memory = DramTier.over(np.zeros(4 * 64, np.uint8), 64, 4, 64, checksums=False)
    cache = TierCache(config, Geometry(16), memory, memory.row, [], VirtualClock())
    assert cache.levels.lossy, "requests are told apart"
    chain = KeySpace(weights="w", kv_dtype="bfloat16", block_tokens=16, layout="l").chain_keys(list(range(64)))
    for accepts in (False, True):
        request = cache.open(RequestContext(request_id="r", arrival_s=0.0, prompt_tokens=64, lossy=accepts), chain)
        assert bool(cache.offer_store(request, [RowRef(0, 0)])) is accepts
        cache.close_request(request, Outcome(finished_s=0.0))
    cache.close()


@pytest.mark.parametrize(
    ("codec", "lossy", "reaches"),
    [("raw", False, True), ("zstd", False, True), ("int8", True, True), ("int8", False, False)],
)
def test_a_lossy_tier_serves_only_those_who_accept_it(codec: str, lossy: bool, reaches: bool) -> None:
    config = CacheConfig(dram_bytes=1, gate=False, policy="lru", io_threads=2, codecs={"nvme": codec})
    memory = DramTier.over(np.zeros(4 * 64, np.uint8), 64, 4, 64, checksums=False)
    lower = MemoryTier(64, 16, name="nvme")
    cache = TierCache(config, Geometry(16), memory, memory.row, [lower], VirtualClock())
    assert cache.levels.lossy is (codec == "int8")
    space = KeySpace(weights="w", kv_dtype="bfloat16", block_tokens=16, layout="l")
    chain = space.chain_keys(list(range(64)))

    def ask(accepts: bool) -> int:
        context = RequestContext(request_id="r", arrival_s=0.0, prompt_tokens=64, lossy=accepts)
        request = cache.open(context, chain)
        while (plan := cache.lookup(request, 0)) is None:
            cache.mover.drain(5.0)
            cache.poll()
        blocks = plan.blocks
        granted = cache.offer_store(request, [RowRef(i, 0) for i in range(4)])
        cache.commit_store(request, [row for row, _ in granted])
        cache.mover.drain(5.0)
        cache.poll()
        cache.close_request(request, Outcome(finished_s=0.0))
        return blocks

    assert ask(lossy) == 0
    assert lower.stats().used_rows == (4 if reaches else 0)
    for segment in list(cache.tree.segments()):
        cache.memory.evict(segment, 0, "test")
    # Even a row that did get there, under the very same key, is not read by an exact request.
    assert ask(False) == (4 if reaches and codec != "int8" else 0)
    cache.close()


def test_below_sglang_only_lossless_codecs() -> None:
    from kvtier_sglang.encoding import encodings as sglang_encodings

    def made(codec: str, dtype: str = "bfloat16") -> dict[str, Encoding]:
        return sglang_encodings(CacheConfig(codecs={"nvme": codec}), 32_768, 2, 64, dtype)

    assert made("raw") == {}
    encoding = made("zstd")["nvme"]
    assert encoding.lossless
    assert encoding.row_bytes == int(ZSTD_SHARE * 32_768)
    assert sorted(encoding.codecs) == [0, 1]
    assert made("zstd", "float8_e4m3fn")["nvme"].row_bytes > 32_768  # bytes, of which zstd finds nothing to save
    with pytest.raises(ConfigError, match="a page is not of one request"):
        made("int8")
