"""A grid of replays: traces × seeds × capacities × policies, each measured against LRU and Belady.

`gap_share` is how much of the distance from leaf-first LRU to the clairvoyant bound a policy closes:
(hit rate − LRU) / (Belady − LRU). Where that distance is under half a point it says nothing and is None. LRU and
Belady are replayed for it whether asked for or not, once for each (trace, seed, capacity).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec

from kvtier.errors import ConfigError
from kvtier.place.policy import make_policy, policy_names
from kvtier.sim.compiled import CompiledTrace
from kvtier.sim.replay import Factory, ReplayResult, replay
from kvtier.sim.rivals import RIVALS, Belady
from kvtier.sim.traces import TraceRequest

SMALLEST_GAP = 0.005


class RequestSource(Protocol):
    """A trace read from a file, or a generated workload."""

    @property
    def name(self) -> str: ...

    @property
    def seeded(self) -> bool:
        """Whether the requests depend on the seed."""
        ...

    def requests(self, seed: int = 1) -> list[TraceRequest]:
        """Requests in order of arrival."""
        ...


class ReplayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `kvtier replay --json`."""

    trace: str
    policy: str
    capacity_blocks: int
    seed: int
    requests: int
    blocks: int
    hit_blocks: int
    hit_rate: float
    gap_share: float | None
    evicted_blocks: int
    policy_us_per_request: float


def known_policies() -> list[str]:
    """Every policy a replay can run, sorted."""
    return sorted({*policy_names(), *RIVALS, "belady"})


def online_policy(name: str) -> Factory:
    """How to make a rival or a production policy that does not need the future. Raises ConfigError, when called, if
    there is none of this name."""
    return RIVALS[name] if name in RIVALS else partial(make_policy, name)


def parse_policies(text: str) -> list[str]:
    """Names from a comma-separated list. Raises ConfigError on one that does not exist."""
    names = _split(text, "policy")
    for name in names:
        if name not in known_policies():
            raise ConfigError(f"no policy named {name!r}; choose from {', '.join(known_policies())}")
    return names


class Capacity(msgspec.Struct, frozen=True):
    """A number of blocks, or a share of the footprint."""

    blocks: int = 0
    footprint_share: float | None = None

    def resolve(self, unique_blocks: int) -> int:
        """Blocks, at least one."""
        if self.footprint_share is None:
            return self.blocks
        return max(1, round(self.footprint_share * unique_blocks))


def parse_capacities(text: str) -> list[Capacity]:
    """Capacities from a comma-separated list such as `256,1024,5%`. Raises ConfigError on anything else."""
    capacities = []
    for part in _split(text, "capacity"):
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", part)
        blocks, percent = match.groups() if match else (None, None)
        if blocks is not None and int(blocks) > 0:
            capacities.append(Capacity(blocks=int(blocks)))
        elif percent is not None and float(percent) > 0:
            capacities.append(Capacity(footprint_share=float(percent) / 100.0))
        else:
            raise ConfigError(f"capacity {part!r} is neither a positive number of blocks nor a share such as 5%")
    return capacities


def parse_seeds(text: str) -> list[int]:
    """Seeds from a comma-separated list. Raises ConfigError on anything that is not a whole number."""
    seeds = []
    for part in _split(text, "seed"):
        if not re.fullmatch(r"\d+", part):
            raise ConfigError(f"seed {part!r} is not a whole number")
        seeds.append(int(part))
    return seeds


def _split(text: str, what: str) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ConfigError(f"no {what} given")
    return parts


class Progress(Protocol):
    """Told how a grid gets on."""

    def begin(self, description: str, requests: int) -> None:
        """A replay of so many requests starts."""
        ...

    def advance(self, requests: int) -> None:
        """So many more were served."""
        ...


class Silent:
    """A Progress that shows nothing."""

    def begin(self, description: str, requests: int) -> None:
        return

    def advance(self, requests: int) -> None:
        return


class Experiment:
    """One trace under one seed: compiles what Belady needs once, replays each (policy, capacity) once."""

    def __init__(self, source: RequestSource, seed: int, progress: Progress | None = None) -> None:
        self.trace = source.name
        self.requests = source.requests(seed)
        self.future = CompiledTrace(self.requests)
        self._progress = progress if progress is not None else Silent()
        self._done: dict[tuple[str, int], ReplayResult] = {}

    def result(self, policy: str, capacity_blocks: int) -> ReplayResult:
        """The replay of one policy at one capacity; kept, so that asking again costs nothing."""
        key = (policy, capacity_blocks)
        if key not in self._done:
            self._progress.begin(f"{self.trace} {policy} {capacity_blocks}", len(self.requests))
            self._done[key] = replay(
                self.requests,
                self._factory(policy),
                capacity_blocks,
                tree=self.future.tree if policy == "belady" else None,
                on_progress=self._progress.advance,
            )
        return self._done[key]

    def row(self, policy: str, capacity_blocks: int, seed: int) -> ReplayRow:
        """The replay, set against LRU and Belady, as that of `seed`."""
        mine, lru, best = (self.result(name, capacity_blocks) for name in (policy, "lru", "belady"))
        gap = best.hit_rate - lru.hit_rate
        return ReplayRow(
            trace=self.trace,
            policy=policy,
            capacity_blocks=capacity_blocks,
            seed=seed,
            requests=mine.requests,
            blocks=mine.blocks,
            hit_blocks=mine.hit_blocks,
            hit_rate=mine.hit_rate,
            gap_share=(mine.hit_rate - lru.hit_rate) / gap if gap >= SMALLEST_GAP else None,
            evicted_blocks=mine.evicted_blocks,
            policy_us_per_request=mine.policy_us_per_request,
        )

    def _factory(self, policy: str) -> Factory:
        return partial(Belady, future=self.future) if policy == "belady" else online_policy(policy)


def run_grid(
    source: RequestSource,
    policies: Sequence[str],
    capacities: Sequence[Capacity],
    seeds: Sequence[int],
    progress: Progress | None = None,
) -> Iterator[ReplayRow]:
    """Rows in order of seed, capacity, policy, each as soon as it is measured. Capacities that come to the same number
    of blocks are one. What does not depend on the seed is measured once and repeated for every seed."""
    experiment: Experiment | None = None
    for seed in seeds:
        if experiment is None or source.seeded:
            experiment = Experiment(source, seed, progress)
        footprint = experiment.future.unique_blocks
        for blocks in dict.fromkeys(capacity.resolve(footprint) for capacity in capacities):
            for policy in policies:
                yield experiment.row(policy, blocks, seed)
