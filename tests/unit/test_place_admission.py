"""Write admission: by value, once per chain, never a tail without its head."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.index.tree import PrefixTree, Segment
from kvtier.model.request import Outcome, RequestContext, StopReason
from kvtier.place.admission import AdmitByValue, AlwaysAdmit
from kvtier.place.prices import Prices, TierPrice
from kvtier.predict.forecast import Forecast

BLOCK = 160 * 2**20  # bytes of 512 tokens of a 70B model
PREFILL_TOKENS_PER_S = 20_000.0


class Server:
    def __init__(self, tier: TierPrice | None = None) -> None:
        self.tree = PrefixTree(key_bytes=1)
        self.forecast = Forecast(self.tree)
        self.admission = AdmitByValue(
            self.tree,
            self.forecast,
            block_bytes=BLOCK,
            recompute_s=lambda start, stop: (stop - start) / PREFILL_TOKENS_PER_S,
            prices=Prices(gpus=8),
            tier=tier,
        )
        self.now = 0.0

    def ask(self, prompt: bytes) -> list[Segment]:
        self.now += 1.0
        context = RequestContext(request_id=str(self.now), arrival_s=self.now)
        path = self.tree.insert(prompt)
        self.forecast.on_arrival(path, context, self.now)
        outcome = Outcome(finished_s=self.now, stop_reason=StopReason.END_TURN)
        self.forecast.on_finish(path, context, outcome, self.now)
        return path


def test_always_means_always() -> None:
    server = Server()
    assert AlwaysAdmit().admit(server.ask(b"abc"), 1.0) == 1
    assert AlwaysAdmit().admit([], 1.0) == 0


def test_threshold_is_of_the_order_the_prices_imply() -> None:
    """A 70B block: 1.5e-5 of wear and rent against 2.8e-4 of GPU time: a few percent."""
    server = Server()
    assert 0.03 < server.admission.threshold(512) < 0.09
    server.admission.busy = 0.8
    assert server.admission.threshold(512) < 0.02


def test_cheap_media_take_everything_dear_ones_nothing() -> None:
    for wear, expected in ((0.0, 1), (1.0, 0)):
        server = Server(TierPrice(wear, 0.0))
        path = server.ask(b"abc")
        assert server.admission.admit(path, server.now) == expected


def test_the_decision_is_kept_and_holds_for_all_that_follows() -> None:
    server = Server(TierPrice(1.0))
    assert server.admission.admit(server.ask(b"abc"), server.now) == 0
    server.admission.tier = TierPrice()
    assert server.admission.admit(server.ask(b"abcdef"), server.now) == 0
    fork = server.ask(b"abxyz")
    assert len(fork) == 2
    assert server.admission.admit(fork, server.now) == 0
    assert server.admission.admit(server.ask(b"other"), server.now) == 1


def test_shared_segments_are_always_written_and_heads_come_first() -> None:
    server = Server(TierPrice(1.0))
    server.ask(b"sysA")
    server.ask(b"sysB")
    path = server.ask(b"sysA1")
    assert server.forecast.sessions.is_shared(path[0])
    assert server.admission.admit(path, server.now) == 1


def test_forgotten_segments_are_decided_anew() -> None:
    server = Server(TierPrice(1.0))
    path = server.ask(b"abc")
    assert server.admission.admit(path, server.now) == 0
    server.tree.truncate(path[0], 0)
    server.admission.tier = TierPrice()
    assert server.admission.admit(server.ask(b"abc"), server.now) == 1


def test_probability_counts_only_returns_the_faster_tier_does_not_serve() -> None:
    server = Server()
    path = server.ask(b"abc")
    ids = np.array([path[-1].id], np.int32)
    within = [server.forecast.return_probability(ids, server.now, h, at_age=0.0)[0] for h in (60.0, 14_400.0)]
    assert 0 < within[1] - within[0] < within[1]
    server.admission.shielded_s = 14_400.0
    assert server.admission.admit(path, server.now) == 0
    assert server.admission.threshold(512) == pytest.approx(server.admission.threshold(5120))
