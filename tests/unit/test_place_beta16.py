"""The paper's policy, to the letter."""

from __future__ import annotations

from kvtier.index.tree import PrefixTree
from kvtier.model.request import BlockType, Outcome, RequestContext, RoleSpan, Transition
from kvtier.place.beta16 import Beta16Policy
from kvtier.sim.tier import SimTier


def serve(tier: SimTier, policy: Beta16Policy, prompt: bytes, now: float, block_type: BlockType) -> None:
    context = RequestContext(
        request_id=str(now),
        arrival_s=now,
        transition=Transition.SAME_TOOL_REPEAT,
        role_spans=(RoleSpan(0, len(prompt), block_type),),
    )
    path = tier.tree.insert(prompt)
    policy.on_arrival(path, context, now)
    for segment, old in tier.admit(path):
        policy.on_resident(segment, old, now)
    policy.on_finish(path, context, Outcome(finished_s=now), now)
    while tier.resident_rows > tier.capacity_rows:
        for victim in policy.victims(tier.resident_rows - tier.capacity_rows, now):
            policy.on_evicted(victim.segment, tier.evict(victim.segment, victim.keep), now)


def test_a_cell_that_hits_is_kept_over_one_that_does_not() -> None:
    tier = SimTier(PrefixTree(key_bytes=1), 8)
    policy = Beta16Policy(tier)
    for n in range(6):
        serve(tier, policy, b"sys!", float(2 * n), BlockType.SYSTEM_PROMPT)
        serve(tier, policy, bytes([100 + n]) * 4, float(2 * n + 1), BlockType.USER_CONTEXT)
    assert tier.leading(tier.tree.walk(b"sys!").path) == 4
    serve(tier, policy, b"mine", 20.0, BlockType.USER_CONTEXT)
    serve(tier, policy, b"more", 21.0, BlockType.USER_CONTEXT)
    assert tier.leading(tier.tree.walk(b"sys!").path) == 4


def test_within_a_cell_the_least_recent_goes() -> None:
    tier = SimTier(PrefixTree(key_bytes=1), 6)
    policy = Beta16Policy(tier)
    for n, prompt in enumerate((b"aa", b"bb", b"cc", b"aa", b"dd")):
        serve(tier, policy, prompt, float(n), BlockType.USER_CONTEXT)
    assert [tier.leading(tier.tree.walk(p).path) for p in (b"aa", b"bb", b"cc", b"dd")] == [2, 0, 2, 2]


def test_age_means_nothing_to_it() -> None:
    """The paper's flaw: what hit long ago outlives all that came since."""
    tier = SimTier(PrefixTree(key_bytes=1), 6)
    policy = Beta16Policy(tier)
    for n in range(30):
        serve(tier, policy, b"aaaa", float(n), BlockType.SYSTEM_PROMPT)
    for n in range(50):
        serve(tier, policy, bytes([n]) * 2, 1e6 * (n + 1), BlockType.USER_CONTEXT)
    assert tier.leading(tier.tree.walk(b"aaaa").path) == 4
