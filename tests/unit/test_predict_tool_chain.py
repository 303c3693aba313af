"""The tool chain: recovers a known matrix, backs off for new tools, keeps sizes and durations."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.predict.tool_chain import MAX_TOOLS, Spread, ToolChain


def test_recovers_a_known_matrix() -> None:
    rng, chain = np.random.default_rng(0), ToolChain()
    truth = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.5, 0.5, 0.0]])
    ids = [chain.id_of(name) for name in ("read", "edit", "test")]
    state, visits = 0, np.zeros(3)
    for _ in range(6000):
        following = int(rng.choice(3, p=truth[state]))
        chain.observe_call(ids[state], ids[following])
        visits[state] += 1
        state = following
    for i in range(3):
        shares = dict(chain.next_tools(ids[i]))
        for j, name in enumerate(chain.names):
            # Decayed counts: about half-life / ln 2 of them count.
            effective = min(visits[i], 2885 * visits[i] / visits.sum())
            assert abs(shares[name] - truth[i, j]) < 3.5 * np.sqrt(0.25 / effective)


def test_a_new_tool_backs_off_to_the_global_frequencies() -> None:
    chain = ToolChain()
    a, b = chain.id_of("a"), chain.id_of("b")
    for _ in range(30):
        chain.observe_call(a, b)
        chain.observe_call(b, a)
        chain.observe_call(a, b)
    new = chain.id_of("new")
    shares = dict(chain.next_tools(new))
    assert shares["b"] == pytest.approx(2 / 3, abs=0.02)
    assert sum(shares.values()) == pytest.approx(1.0)
    chain.observe_return(a, 10.0, 100)
    assert chain.expected_return_s(new) == pytest.approx(chain.expected_return_s(a), rel=0.1)
    assert ToolChain().next_tools(0) == []


def test_per_tool_statistics() -> None:
    rng, chain = np.random.default_rng(1), ToolChain()
    tool = chain.id_of("grep")
    sizes = rng.integers(100, 10_000, 3000)
    for size in sizes.tolist():
        chain.observe_return(tool, 3.0, size)
    mean, variance, p99 = chain.expected_added_tokens(tool)
    assert mean == pytest.approx(sizes.mean())
    assert variance == pytest.approx(sizes.var(ddof=1))
    assert p99 == pytest.approx(np.quantile(sizes, 0.99), rel=0.06)
    assert chain.expected_return_s(tool) == pytest.approx(3.0, rel=0.06)


def test_names_are_capped() -> None:
    chain = ToolChain()
    ids = {chain.id_of(f"tool{n}") for n in range(3 * MAX_TOOLS)}
    assert len(chain.names) == MAX_TOOLS
    assert len(ids) == MAX_TOOLS


def test_an_empty_spread_has_no_size() -> None:
    assert (Spread().mean, Spread().variance, Spread().quantile(0.99)) == (0.0, 0.0, 0.0)
