"""Prices: data with defaults, and the arithmetic of a million tokens."""

from __future__ import annotations

import math

import pytest

from kvtier.errors import ConfigError
from kvtier.place.prices import Prices, TierPrice


def test_a_million_tokens_cost_gpus_room_and_wear() -> None:
    prices = Prices(gpu_per_hour=5.0, gpus=8)
    assert prices.compute(3600.0) == pytest.approx(40.0)
    spent = prices.serving(3600.0, {"dram": 1e12, "nvme": 8e12}, {"nvme": 1e12})
    assert spent == pytest.approx(40.0 + 8.8 + 0.656 + 0.055)
    assert prices.per_mtok(3600.0, 2e6, {"dram": 1e12, "nvme": 8e12}, {"nvme": 1e12}) == pytest.approx(spent / 2)
    assert prices.per_mtok(3600.0, 0, {}) == math.inf


def test_a_tier_listed_overrides_its_default_and_an_unknown_one_costs_nothing() -> None:
    prices = Prices(tiers={"nvme": TierPrice(wear_per_gb=1.0)})
    assert prices.of("nvme") == TierPrice(1.0, 0.0)
    assert prices.of("dram").hold_per_gb_hour == 0.0088
    assert prices.of("tape") == TierPrice()


def test_prices_are_read_from_json_and_refused_with_one_line() -> None:
    read = Prices.from_json(b'{"gpu_per_hour": 2, "tiers": {"nvme": {"wear_per_gb": 0.1}}}', "prices.json")
    assert (read.gpu_per_hour, read.of("nvme").wear_per_gb) == (2.0, 0.1)
    for text, said in (
        (b'{"gpu": 2}', "gpu"),
        (b"{", "prices.json"),
        (b'{"gpus": -1}', "gpus"),
        (b'{"tiers": {"nvme": {"wear_per_gb": -1}}}', "tiers.nvme.wear_per_gb"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            Prices.from_json(text, "prices.json")
        assert "\n" not in str(caught.value)
