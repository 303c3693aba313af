"""Sizes advised from a trace: against every choice by hand, and what prices do to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.errors import ConfigError
from kvtier.place.prices import Prices, TierPrice
from kvtier.sim.advice import Advice, advise
from kvtier.sim.node.hardware import load_hardware
from kvtier.sim.traces import TraceRequest
from kvtier.sim.workloads import AgentWorkload

FREE = {"dram": TierPrice(), "nvme": TierPrice()}


def requests() -> list[TraceRequest]:
    return AgentWorkload(sessions=30).requests(1)


def advice(**tiers: TierPrice) -> Advice:
    return advise(requests(), load_hardware("A25"), Prices(gpus=8, tiers={**FREE, **tiers}), 50, 512)


def test_where_room_costs_nothing_everything_that_returns_is_kept() -> None:
    found = advice()
    assert found.best.hit_rate > found.without.hit_rate
    assert found.best.usd_per_mtok < found.without.usd_per_mtok
    assert found.best.tiers_usd_per_hour == 0.0
    everything = advise(requests(), load_hardware("A25"), Prices(gpus=8, tiers=FREE), 10**9, 512)
    assert found.best.hit_rate == pytest.approx(everything.without.hit_rate)
    assert everything.best.dram_blocks == everything.best.nvme_blocks == 0, "HBM has it all"


def test_dear_room_is_not_bought_and_the_cheaper_kind_takes_its_place() -> None:
    dear = TierPrice(0.0, 1e6)
    assert advice(dram=dear).best.dram_blocks == 0
    assert advice(dram=dear).best.nvme_blocks > 0
    assert advice(nvme=dear).best.nvme_blocks == 0
    assert advice(nvme=dear).best.dram_blocks > 0
    none = advice(dram=dear, nvme=dear)
    assert none.best == none.without


def test_no_choice_is_worse_than_none_and_dearer_prices_never_pay_more_room() -> None:
    before = None
    for price in (0.0, 1e-4, 1e-2, 1.0, 100.0):
        found = advice(dram=TierPrice(0.0, price), nvme=TierPrice(0.0, price))
        assert found.best.usd_per_mtok <= found.without.usd_per_mtok
        room = found.best.dram_blocks + found.best.nvme_blocks
        assert before is None or room <= before
        before = room


def test_a_trace_without_time_gives_no_advice() -> None:
    with pytest.raises(ConfigError, match="arrival times"):
        advise(requests()[:1], load_hardware("A25"), Prices(), 50, 512)


def test_the_command_line_advises(tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text('{"gpus": 8, "tiers": {"dram": {"hold_per_gb_hour": 1e6}}}')
    arguments = ["analyze", "workload:agent?sessions=30", "--advise", "--tiers", "hbm=8GiB", "--prices", str(prices)]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["best"]["dram_bytes"] == 0
    assert found["best"]["usd_per_mtok"] <= found["without"]["usd_per_mtok"]
    assert "HBM alone" in CliRunner().invoke(app, arguments).output
