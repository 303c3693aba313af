"""Every codec on every tier: what comes back, what is learned about positions, what is counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.codec.form import RowForm
from kvtier.codec.header import read_header
from kvtier.codec.registry import LOSSLESS, NAMES, CodecChoice, build_codec
from kvtier.errors import ConfigError
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.rows import chain_rows
from kvtier.tiers.codec_tier import ChainPositions, CodecTier, codec_identity, encoded_row_bytes
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import MooncakeClient, PoolOptions
from kvtier.tiers.protocol import RowId, RowStatus, Tier
from kvtier.tiers.shared_fs import SharedFsTier
from tests.pool_rig import needs_mooncake, running_pool
from tests.unit.codec_rows import SMALL, calibration_of, numbers_in, relative_error, row_of, values_of


def pool_tier(client: MooncakeClient, row_bytes: int) -> PoolTier:
    return PoolTier(
        PoolOptions(master="unused"), os.urandom(32), "layout", row_bytes, handles=ROWS, connect=lambda _: client
    )


CODECS = {name: build_codec(CodecChoice(name=name), SMALL, calibration_of(SMALL, gates={})) for name in NAMES}
ROWS = 12


@pytest.fixture(scope="module")
def pool_client() -> Iterator[MooncakeClient]:
    """A pool on loopback, and one client for all tiers: joining and leaving take a second each."""
    with running_pool() as running:
        client = MooncakeClient(PoolOptions(master=running.address, host="127.0.0.1"))
        leave, client.close = client.close, lambda: None  # type: ignore[method-assign]
        yield client
        leave()


@pytest.fixture(params=["memory", "dram", "cxl", "nvme", "shared_fs", pytest.param("pool", marks=needs_mooncake)])
def make_inner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Tier]]:
    made: list[Tier] = []

    def make(row_bytes: int) -> Tier:
        kinds: dict[str, Callable[[], Tier]] = {
            "memory": lambda: MemoryTier(row_bytes, ROWS),
            "dram": lambda: DramTier.own(row_bytes, ROWS * (row_bytes + 4096)),
            "nvme": lambda: NvmeTier(
                str(tmp_path), b"\7" * 32, "layout", row_bytes, 400_000 + 2 * ROWS * (row_bytes + 8192)
            ),
            "cxl": lambda: CxlTier(
                str(tmp_path / "cxl"), b"\7" * 32, "layout", row_bytes, (4 << 20) + ROWS * (row_bytes + 4224)
            ),
            "shared_fs": lambda: SharedFsTier(
                str(tmp_path), b"\7" * 32, "layout", row_bytes, (4 << 20) + 2 * ROWS * (row_bytes + 40_960)
            ),
            "pool": lambda: pool_tier(request.getfixturevalue("pool_client"), row_bytes),
        }
        made.append(kinds[request.param]())
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.mark.parametrize("name", NAMES)
def test_round_trips(name: str, make_inner: Callable[[int], Tier]) -> None:
    codec = CODECS[name]
    tier = CodecTier(make_inner(encoded_row_bytes(codec)), codec)
    rows, sources = chain_rows(5), [row_of(SMALL, seed) for seed in range(5)]
    slots = tier.reserve(5)
    assert slots is not None
    assert tier.write(slots, rows, sources) == [RowStatus.OK] * 5
    targets = [memoryview(bytearray(b"\xa5" * SMALL.row_bytes)) for _ in rows]
    order = [3, 0, 4, 1, 2]
    assert tier.read(slots[order], [rows[i] for i in order], [targets[i] for i in order]) == [RowStatus.OK] * 5
    for seed, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if name in LOSSLESS:
            assert target == source
        else:
            assert relative_error(numbers_in(SMALL, target), values_of(SMALL, seed)) < 0.6
    stats = tier.stats()
    assert stats.written_bytes == stats.read_bytes == 5 * SMALL.row_bytes
    assert tier.lossless is (name in LOSSLESS)
    tier.release(slots)
    assert tier.stats().used_rows == 0


def test_fewer_bytes_reach_the_medium(tmp_path: Path) -> None:
    form = RowForm(layers=8, heads=4, tokens=64, head_dim=64, axes="lhtkd")
    codec = build_codec(CodecChoice(name="d4"), form, calibration_of(form, gates={}))
    identity = codec_identity(codec)
    inner = NvmeTier(str(tmp_path), b"\7" * 32, "layout" + identity, encoded_row_bytes(codec), 4 << 20)
    tier = CodecTier(inner, codec)
    assert inner.row_bytes < 0.29 * tier.row_bytes
    slots = tier.reserve(3)
    assert slots is not None
    assert tier.write(slots, chain_rows(3), [row_of(form, seed) for seed in range(3)]) == [RowStatus.OK] * 3
    assert inner.stats().written_bytes <= 0.29 * 3 * form.row_bytes
    tier.close()


def test_positions_are_learned_from_parents_and_survive_a_restart() -> None:
    codec = CODECS["d4"]
    inner = MemoryTier(encoded_row_bytes(codec), ROWS)
    tier = CodecTier(inner, codec)
    rows = chain_rows(6)
    slots = tier.reserve(6)
    assert slots is not None
    tier.write(slots[:4], rows[:4], [row_of(SMALL)] * 4)
    positions = [read_header(memoryview(inner.published[int(slot)][1])).first_token for slot in slots[:4]]
    assert positions == [0, 64, 128, 192]
    orphan = chain_rows(3, seed="other")[2]
    tier.write(slots[5:], [orphan], [row_of(SMALL)])
    assert read_header(memoryview(inner.published[int(slots[5])][1])).first_token == -1
    again = inner.reopen()
    after = CodecTier(again, codec)
    after.recover()
    slot = after.reserve(1)
    assert slot is not None
    after.write(slot, rows[4:5], [row_of(SMALL)])
    assert read_header(memoryview(again.published[int(slot[0])][1])).first_token == 256


def test_positions_are_forgotten_with_the_last_slot_that_held_a_key() -> None:
    places = ChainPositions()
    first, second, third = chain_rows(3)
    assert [places.learn(slot, row) for slot, row in enumerate((first, second))] == [0, 1]
    assert places.learn(7, RowId(second.key, second.parent, 1)) == 1
    places.forget([1])
    assert places.learn(2, third) == 2
    places.forget([7, 2, 0, 99])
    assert len(places) == 0
    assert places.learn(3, third) is None


def test_groups_have_their_own_codecs_and_rows_may_be_padded() -> None:
    other = RowForm(kind="opaque", opaque_bytes=5_000)
    codecs = {0: CODECS["int8"], 2: build_codec(CodecChoice(name="zstd"), other)}
    inner = MemoryTier(encoded_row_bytes(codecs), ROWS)
    row_bytes = SMALL.row_bytes + 512
    tier = CodecTier(inner, codecs, row_bytes=row_bytes)
    rows = [chain_rows(1, group=group)[0] for group in (0, 1, 2)]
    source = memoryview(np.resize(np.frombuffer(row_of(SMALL), np.uint8), row_bytes))
    slots = tier.reserve(3)
    assert slots is not None
    assert tier.write(slots, rows, [source] * 3) == [RowStatus.OK, RowStatus.FOREIGN, RowStatus.OK]
    target = memoryview(bytearray(row_bytes))
    assert tier.read(slots[2:], rows[2:], [target]) == [RowStatus.OK]
    assert target[:5_000] == source[:5_000]
    with pytest.raises(ConfigError, match="shorter"):
        CodecTier(inner, codecs, row_bytes=100)


def test_the_probe_adds_the_codecs_time() -> None:
    codec = CODECS["d4"]
    inner = MemoryTier(encoded_row_bytes(codec), ROWS)
    raw, coded = inner.probe(), CodecTier(inner, codec).probe()
    fewer = SMALL.row_bytes / encoded_row_bytes(codec)
    assert 0 < coded.read_bytes_per_s < raw.read_bytes_per_s * fewer
    assert 0 < coded.write_bytes_per_s < raw.write_bytes_per_s * fewer


def test_threads_encode_side_by_side() -> None:
    codec = CODECS["d4"]
    tier = CodecTier(MemoryTier(encoded_row_bytes(codec), 64), codec)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rows = chain_rows(8, seed=seed)
        with lock:
            slots = tier.reserve(8)
        assert slots is not None
        tier.write(slots, rows, [row_of(SMALL, seed)] * 8)
        targets = [memoryview(bytearray(SMALL.row_bytes)) for _ in rows]
        tier.read(slots, rows, targets)
        wrong.extend(
            seed for target in targets if relative_error(numbers_in(SMALL, target), values_of(SMALL, seed)) > 0.3
        )

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_write_parts_of_a_chain_know_their_places_whoever_comes_first() -> None:
    """The mover cuts a prompt into calls of several threads; the later part may begin before the earlier one."""
    codec = CODECS["d4"]
    inner = MemoryTier(encoded_row_bytes(codec), ROWS)
    tier = CodecTier(inner, codec)
    rows = chain_rows(8)
    slots = tier.reserve(8)
    assert slots is not None
    later = threading.Thread(target=tier.write, args=(slots[4:], rows[4:], [row_of(SMALL)] * 4))
    later.start()
    tier.write(slots[:4], rows[:4], [row_of(SMALL)] * 4)
    later.join()
    positions = [read_header(memoryview(inner.published[int(slot)][1])).first_token for slot in slots]
    assert positions == [64 * i for i in range(8)]
