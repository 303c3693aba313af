"""The research references on a tiny random model: exactness where a method is exact, accounting where it is not.

Random weights say nothing about quality; that is measured on a real model in tests/e2e/test_codec_quality.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtier.errors import ConfigError  # noqa: E402
from kvtier.reference import prefix_subset, scorers, selection  # noqa: E402
from kvtier.reference.ema import EmaOrder, attention_mass  # noqa: E402
from kvtier.reference.prefix_model import PrefixModel  # noqa: E402
from kvtier.reference.quality import Passage, compare, prepare  # noqa: E402
from tests.e2e.models import tiny_llama  # noqa: E402

PREFIX, POSITIONS = 192, 64


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other over tiny tensors only cost time, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> PrefixModel:
    return PrefixModel(tiny_llama())


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (PREFIX + POSITIONS,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def passage(model: PrefixModel, ids: torch.Tensor) -> Passage:
    return prepare(model, "noise", ids, PREFIX, POSITIONS)


def test_the_model_computes_what_hugging_face_computes(model: PrefixModel, ids: torch.Tensor, passage: Passage) -> None:
    with torch.inference_mode():
        logits = model.model(ids[None]).logits[0, PREFIX:]
    assert compare(passage, torch.log_softmax(logits, dim=-1)).kl.max() < 1e-3  # the prefix was rounded to bfloat16


def test_a_budget_of_everything_is_exact(model: PrefixModel, passage: Passage) -> None:
    for selector in (
        selection.oracle,
        selection.recent,
        selection.quest(),
        selection.InfiniGen(model, passage, ratio=1.0),
    ):
        found = selection.evaluate(model, passage, selector, 1.0)
        assert found.recall == pytest.approx(1.0, abs=1e-5)
        assert found.comparison.kl.max() < 1e-5


def test_no_selector_keeps_more_than_the_oracle(model: PrefixModel, passage: Passage) -> None:
    best = selection.evaluate(model, passage, selection.oracle, 0.2).recall
    others = (
        selection.recent,
        selection.quest(),
        selection.InfiniGen(model, passage),
        selection.InfiniGen(model, passage, skew=False),
    )
    for selector in others:
        assert 0 < selection.evaluate(model, passage, selector, 0.2).recall <= best + 1e-6


def test_infinigens_turn_is_exact_and_speculation_off_with_all_columns_is_the_true_score(
    model: PrefixModel, passage: Passage
) -> None:
    infinigen = selection.InfiniGen(model, passage, ratio=1.0, speculate=False)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(1, model.query_heads, 5, model.head_dim, generator=generator)
    keys = passage.kv[2, 0][None]
    grouped = queries.reshape(model.heads, -1, 5, model.head_dim)
    want = torch.einsum("hgnd,htd->hgnt", grouped, keys[0]).mean(dim=1)
    assert torch.allclose(infinigen(2, queries, keys), want, rtol=1e-3, atol=1e-3)


def test_quests_bound_is_never_below_a_true_score(model: PrefixModel, passage: Passage) -> None:
    queries = torch.randn(1, model.heads, 3, model.head_dim, generator=torch.Generator().manual_seed(2))
    keys = passage.kv[1, 0][None]
    bound = selection.quest(16)(1, queries, keys)
    assert (bound >= torch.einsum("hnd,htd->hnt", queries[0], keys[0]) - 1e-4).all()


@pytest.mark.parametrize("policy", ["fifo", "lru", "counter"])
def test_the_pool_never_drops_its_newer_half(policy: str) -> None:
    rng = random.Random(0)
    pool = selection.SpeculationPool(20, policy)
    arrived: list[int] = []
    for token in range(200):
        held = [t for t in arrived if t in pool]
        victim = pool.add(token)
        if victim is not None:
            assert victim in held[: len(held) // 2]
        arrived.append(token)
        pool.use(rng.sample(arrived[-30:], k=min(5, len(arrived))))
    assert sum(token in pool for token in arrived) == 20


def test_turning_moves_keys_exactly(model: PrefixModel, ids: torch.Tensor) -> None:
    """Layer 0's keys depend on nothing but token and position: turned by 32 they are those of the shifted prompt."""
    shifted = torch.cat([torch.full((32,), 7), ids])
    here, there = model.prefill(ids[:64]), model.prefill(shifted[:96])
    turned = model.turn(here[0, 0], 32)
    assert torch.allclose(turned, there[0, 0, :, 32:], atol=2**-6)


def test_truncation_keeps_sinks_and_positions_in_order(model: PrefixModel, passage: Passage) -> None:
    cut = prefix_subset.truncate(model, passage.kv, 100)
    assert cut.kv.shape[3] == cut.next_position == PREFIX - 100
    assert torch.equal(cut.kv[:, :, :, :4], passage.kv[:, :, :, :4])
    assert torch.equal(cut.kv[:, 1, :, 4:], passage.kv[:, 1, :, 104:])
    assert torch.allclose(model.turn(cut.kv[:, 0, :, 4:], 100), passage.kv[:, 0, :, 104:], atol=1e-4)
    naive = prefix_subset.truncate(model, passage.kv, 100, turn=False)
    assert torch.equal(naive.kv[:, 0, :, 4:], passage.kv[:, 0, :, 104:])
    with pytest.raises(ConfigError):
        prefix_subset.truncate(model, passage.kv, PREFIX)


def test_mixed_precision_counts_its_bits_and_takes_the_important_tokens(passage: Passage) -> None:
    fine, coarse = passage.kv, torch.zeros_like(passage.kv)
    scores = torch.arange(PREFIX, dtype=torch.float32).expand(passage.kv.shape[0], 1, -1)
    mixed = prefix_subset.mixed_precision(fine, coarse, scores, 0.25, 8.0, 2.0)
    assert torch.equal(mixed.kv[:, :, :, -48:], fine[:, :, :, -48:])
    assert not mixed.kv[:, :, :, :-48].any()
    assert mixed.bits_per_element == pytest.approx(3.5 + 1 / (2 * 2 * 32))


def test_scorers_rank_what_queries_look_at(model: PrefixModel, ids: torch.Tensor, passage: Passage) -> None:
    queries = scorers.prefix_queries(model, ids[:PREFIX], passage.kv)
    assert queries.shape == (model.layers, model.query_heads, 64, model.head_dim)
    weights = scorers.window_weights(queries[1], passage.kv[1, 0])
    assert torch.allclose(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    for scorer in (scorers.snapkv, scorers.h2o):
        score = scorer(queries[1], passage.kv[1, 0])
        assert score.shape == (model.heads, PREFIX)
    snap = scorers.snapkv(queries[1], passage.kv[1, 0])
    assert snap[:, -64:].min() > snap[:, :-64].max()
    probe = scorers.probe_heads(queries[1], passage.kv[1, 0])
    assert torch.allclose(probe, weights[:1].mean(dim=(0, 1, 2)))


def test_head_overlap_and_its_threshold() -> None:
    same = torch.arange(100.0).expand(2, 3, -1)
    assert torch.equal(prefix_subset.jaccard_of_heads(same, 0.1), torch.ones(2))
    rng = torch.Generator().manual_seed(0)
    noise = torch.rand(40, 2, 1000, generator=rng)
    share = 0.3
    random_overlap = share / (2 - share)
    assert float(prefix_subset.jaccard_of_heads(noise, share).mean()) == pytest.approx(random_overlap, abs=0.02)
    assert prefix_subset.probe_threshold(share) == pytest.approx(random_overlap**0.6)


def test_a_reordered_prefix_is_undone_by_its_order(passage: Passage) -> None:
    moved, order = prefix_subset.reordered(passage.kv, torch.rand(PREFIX, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(moved[:, :, :, order.argsort()], passage.kv)
    assert torch.equal(prefix_subset.probe_keys(passage.kv, 1), passage.kv[:, 0, :1])


def test_attention_mass_is_a_share(model: PrefixModel, passage: Passage) -> None:
    mass = attention_mass(model, passage)
    assert mass.shape == (model.layers, model.heads)
    assert ((mass >= 0) & (mass <= 1)).all()


def test_order_preserving_keys_name_the_true_victim_where_stale_scores_do_not() -> None:
    """Against brute force, victim by victim; keeping each item's score at its last touch is wrong most of the time."""
    rng = random.Random(0)
    order, stale = EmaOrder(alpha=0.05), {}
    scores: dict[int, tuple[float, float]] = {}
    wrong_stale = victims = 0
    for step in range(4000):
        now = float(step)
        item = rng.randrange(300)
        mass = rng.random() ** 4
        before = scores.get(item)
        value = mass if before is None else before[0] * 0.95 ** (now - before[1]) * 0.95 + 0.05 * mass
        scores[item] = (value, now)
        order.touch(item, mass, now)
        stale[item] = value
        if len(scores) > 200:
            brute = min(scores, key=lambda i: scores[i][0] * 0.95 ** (now - scores[i][1]))
            wrong_stale += min(stale, key=lambda i: stale[i]) != brute
            victims += 1
            assert order.victim() == brute
            del scores[brute], stale[brute]
    assert len(order) == len(scores)
    assert victims > 500
    assert wrong_stale > 0.5 * victims


def test_scores_decay_with_time() -> None:
    order = EmaOrder(alpha=0.5)
    order.touch("a", 8.0, 0.0)
    assert order.score("a", 3.0) == pytest.approx(1.0)
    order.touch("b", 0.0, 0.0)
    assert order.victim() == "b"
    with pytest.raises(ConfigError):
        EmaOrder(alpha=1.0)
    assert math.isclose(order.score("a", 1.0), 4.0)


def test_models_are_told_apart(tmp_path: Path) -> None:
    from kvtier.codec.calibration import model_fingerprint
    from kvtier.errors import ConfigError

    with pytest.raises(ConfigError, match=r"config\.json"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(np.zeros(100, np.uint8).tobytes())
    one = model_fingerprint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(np.ones(100, np.uint8).tobytes())
    assert model_fingerprint(tmp_path) != one
