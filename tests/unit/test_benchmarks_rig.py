"""The parts of the benchmark rig that need no engine: prompts, flips, pairs, figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import ablation
from benchmarks.rig.contenders import CONTENDERS, Room, contender
from benchmarks.rig.engine import Answer
from benchmarks.rig.figures import Samples, percentile
from benchmarks.rig.process import EngineProcess, Run
from benchmarks.rig.prompts import Tokenizer, agent_sessions, document, unique_prompts
from benchmarks.rig.workloads import count_different, flip_bits, run_pairs

BLOCK = 4_096
WORDS = Tokenizer(lambda text: [len(word) for word in text.split()])


def answer(*tokens: int) -> Answer:
    return Answer(0, 0, 1, 0, 0.1, 0.1, list(tokens))


def test_a_file_of_one_block_gets_one_flip_in_its_middle(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "block.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(BLOCK))
    assert flip_bits(tmp_path, BLOCK) == 1
    changed = [at for at, byte in enumerate(path.read_bytes()) if byte]
    assert changed == [BLOCK // 2 + 3]
    assert path.read_bytes()[changed[0]] == 0x40


@pytest.mark.parametrize("slot_bytes", [BLOCK, BLOCK + 64, BLOCK + 512])
@pytest.mark.parametrize("head_bytes", [0, 512, BLOCK])
def test_every_block_of_a_slab_gets_exactly_one_flip(tmp_path: Path, slot_bytes: int, head_bytes: int) -> None:
    slots = 20
    slab = tmp_path / "slab"
    slab.write_bytes(bytes(head_bytes + slots * slot_bytes))
    flip_bits(tmp_path, BLOCK)
    found = slab.read_bytes()
    for slot in range(slots - 1):  # the rule may end before the last block of the file
        start = head_bytes + slot * slot_bytes
        assert sum(byte != 0 for byte in found[start : start + BLOCK]) == 1


def test_flipping_twice_restores_and_short_files_are_left_alone(tmp_path: Path) -> None:
    journal, block = tmp_path / "journal", tmp_path / "block"
    journal.write_bytes(b"x" * (BLOCK // 2))
    block.write_bytes(bytes(range(256)) * (BLOCK // 256))
    before = block.read_bytes()
    flip_bits(tmp_path, BLOCK)
    assert block.read_bytes() != before
    flip_bits(tmp_path, BLOCK)
    assert block.read_bytes() == before
    assert journal.read_bytes() == b"x" * (BLOCK // 2)


class Clockwork:
    """Stands for an engine: answers in a fixed time and notes when it was asked."""

    def __init__(self, name: str, wall_s: float, log: list[str]) -> None:
        self.name, self.wall_s, self.log = name, wall_s, log

    def run(self, sessions: list[Any], *, max_tokens: int, in_flight: int, profile: str = "") -> Run:
        assert in_flight == len(sessions)
        self.log.append(self.name)
        return Run([answer(1)], self.wall_s, 2 * self.wall_s)


def test_pairs_alternate_who_goes_first_and_give_throughput_ratios() -> None:
    log: list[str] = []
    plain, other = (cast(EngineProcess, Clockwork(name, wall_s, log)) for name, wall_s in (("a", 1.0), ("b", 1.25)))
    pairs = run_pairs(plain, other, [[[[1, 2]]]] * 3, max_tokens=4)
    assert log == ["a", "b", "b", "a", "a", "b"]
    assert pairs.wall_ratios == [0.8] * 3
    assert pairs.cpu_ratios == [0.8] * 3


def test_documents_have_the_length_asked_for_and_are_the_same_every_time() -> None:
    first, again, other = (document(WORDS, seed, 300) for seed in (1, 1, 2))
    assert len(first.body) == 300
    assert first == again
    assert first.body != other.body
    assert len({tuple(question) for question in first.questions}) == len(first.questions) == 5
    assert first.prompt(2) == first.body + first.questions[2]


def test_agent_sessions_are_reproducible_and_vary_in_length() -> None:
    sessions = agent_sessions(WORDS, 7, count=4, turns=5, first_tokens=80, turn_tokens=40)
    assert sessions == agent_sessions(WORDS, 7, count=4, turns=5, first_tokens=80, turn_tokens=40)
    assert [len(session) for session in sessions] == [5] * 4
    assert all(60 <= len(session[0]) <= 100 for session in sessions)
    assert all(30 <= len(turn) <= 50 for session in sessions for turn in session[1:])
    assert len({len(turn) for session in sessions for turn in session}) > 3


def test_unique_prompts_share_no_first_block() -> None:
    prompts = [p for seed in ("a", "b") for p in unique_prompts(seed, 40, 64, range(256))]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 80


def test_different_answers_are_counted_by_tokens() -> None:
    assert count_different([answer(1, 2), answer(3)], [answer(1, 2), answer(4)]) == 1


def test_samples_say_median_range_and_count() -> None:
    assert Samples([3.0, 1.0, 2.0]).as_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert Samples([3.0, 1.0, 2.0]).text(1) == "2.0 [1.0–3.0]"
    assert Samples().as_json() is None
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert percentile([5.0], 0.95) == 5.0


def test_every_contender_gets_the_same_memory(tmp_path: Path) -> None:
    room = Room(dram_bytes=256 << 20, disk_bytes=1 << 30)
    extra = {known.name: known.connector(tmp_path, room) for known in CONTENDERS}
    assert extra["none"] is None
    assert extra["native"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == room.dram_bytes
    assert extra["kvtier"]["kv_connector_extra_config"]["dram_bytes"] == room.dram_bytes
    for name in ("lmcache-disk", "lmcache-fs"):
        environment = contender(name).environment(tmp_path, room)
        assert float(environment["LMCACHE_MAX_LOCAL_CPU_SIZE"]) * 2**30 == room.dram_bytes
        assert environment["PYTHONHASHSEED"] == "0"


def test_the_ablation_runs_without_a_trace_as_make_bench_runs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--only", "lru", "--seed", "1", "--capacity", "64", "--hours", "0.05"]
    monkeypatch.setattr("sys.argv", ["ablation", *options])
    ablation.main()
    out = capsys.readouterr().out
    assert '"variant": "lru"' in out
    assert out.splitlines()[-1].startswith("| lru | ")
