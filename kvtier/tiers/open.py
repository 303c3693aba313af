"""Opens every tier below the engine's own memory that the configuration names, for both connectors.

Each tier has its opener in `_OPENERS`: a new tier is one entry there. A medium that fails, or does not answer within a
few seconds, costs its tier and never the engine; a wrong option stops the start with one clear error.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, TierError
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.dedup import DedupTier
from kvtier.tiers.encoding import Encoding
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.pool import PoolTier
from kvtier.tiers.pool.client import PoolOptions
from kvtier.tiers.protocol import Tier
from kvtier.tiers.shared_fs import SharedFsTier

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 4.0
"""Longest the engine's start waits for a medium: a dead mount or peer answers never."""


class Share(NamedTuple):
    """Which part of a node's media belongs to this process.

    `of` processes on this node each have tiers of their own, in the folder `folder` (relative; empty: the whole medium)
    and with an equal share of each cap, for caps are per node (LMCache#1399). Shared tiers are one for all of them.
    """

    of: int = 1
    folder: str = ""


_WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Site:
    """What a tier is opened for: the configuration, the process's share, and what its rows are."""

    config: CacheConfig
    key_space_digest: bytes
    layout_digest: str
    row_bytes: int
    share: Share = _WHOLE
    encodings: Mapping[str, Encoding] = field(default_factory=dict)

    def of(self, tier: str) -> Site:
        """What one tier is opened for: rows of the size its codec makes of them, in a layout that names the codec."""
        encoding = self.encodings.get(tier)
        if encoding is None:
            return self
        return replace(self, layout_digest=self.layout_digest + encoding.identity, row_bytes=encoding.row_bytes)

    def encoded(self, tier: Tier) -> Tier:
        """The opened tier, behind its codec if it has one. Raises ConfigError if that is too slow for it.

        Encoded rows are what is compared where equal payloads are kept once: equal rows at equal positions are equal.
        """
        names_per_row = self.config.dedup.get(tier.name)
        if names_per_row is not None:
            tier = DedupTier(tier, names_per_row=names_per_row)
        encoding = self.encodings.get(tier.name)
        if encoding is None:
            return tier
        try:
            return encoding.around(tier)
        except ConfigError:
            tier.close()
            raise

    def path(self, configured: str) -> str:
        """This process's own folder below a configured one."""
        return os.path.join(configured, self.share.folder) if self.share.folder else configured

    def cap_bytes(self, name: str) -> int:
        """This process's part of a cap per node. Raises ConfigError if nothing is left."""
        configured: int = getattr(self.config, name)
        if configured < self.share.of:
            raise ConfigError(f"{name} is {configured} for {self.share.of} ranks; raise it")
        return configured // self.share.of


class Opened(NamedTuple):
    """The tiers that opened, in the order of the openers, and why each of the others did not."""

    tiers: list[Tier]
    missing: dict[str, str]


Opener = Callable[[Site], Tier | None]
"""Opens one tier, or gives None where the configuration names none. Raises ConfigError or TierError."""


def _open_cxl(site: Site) -> Tier | None:
    config = site.config
    if not config.cxl_path:
        return None
    path, folder = config.cxl_path, site.share.folder
    if folder and os.path.isabs(path) and not path.startswith("/dev/dax"):
        path = f"{path}.{folder}"  # a file for each process
    elif folder and not path.startswith("node:"):
        raise ConfigError(
            f"cxl_path is {path!r} for {site.share.of} processes, but a device serves one; "
            "name a file or a node (node:2)"
        )
    cap_bytes = site.cap_bytes("cxl_bytes")
    return CxlTier(path, site.key_space_digest, site.layout_digest, site.row_bytes, cap_bytes)


def _open_nvme(site: Site) -> Tier | None:
    config = site.config
    if not config.nvme_path:
        return None
    return NvmeTier(
        site.path(config.nvme_path),
        site.key_space_digest,
        site.layout_digest,
        site.row_bytes,
        site.cap_bytes("nvme_bytes"),
        direct=config.direct_io,
        backend="auto",
        daily_write_bytes=config.nvme_daily_write_bytes // site.share.of,
    )


def _open_pool(site: Site) -> Tier | None:
    config = site.config
    if not config.pool_master:
        return None
    options = PoolOptions(
        master=config.pool_master,
        metadata=config.pool_metadata,
        protocol=config.pool_protocol,
        device=config.pool_device,
        host=config.pool_host,
        segment_bytes=config.pool_bytes // site.share.of,
        replicas=config.pool_replicas,
    )
    return PoolTier(options, site.key_space_digest, site.layout_digest, site.row_bytes)


def _open_shared_fs(site: Site) -> Tier | None:
    config = site.config
    if not config.shared_fs_path:
        return None
    return SharedFsTier(
        config.shared_fs_path,
        site.key_space_digest,
        site.layout_digest,
        site.row_bytes,
        config.shared_fs_bytes,
        direct=config.direct_io,
    )


_OPENERS: dict[str, Opener] = {"cxl": _open_cxl, "nvme": _open_nvme, "pool": _open_pool, "shared_fs": _open_shared_fs}
SHARED_TIERS = frozenset({"pool", "shared_fs"})
"""Tiers whose rows every process that names the same medium can find."""

_NAMED_BY = {"cxl": "cxl_path", "nvme": "nvme_path", "pool": "pool_master", "shared_fs": "shared_fs_path"}
LOWER_TIERS = tuple(_NAMED_BY)
"""Names of all tiers below memory."""


def configured_tiers(config: CacheConfig) -> list[str]:
    """Names of the tiers below memory that the configuration asks for, fast to slow."""
    return [name for name in _OPENERS if getattr(config, _NAMED_BY[name])]


def open_lower_tiers(
    site: Site, openers: Mapping[str, Opener] | None = None, timeout_s: float = OPEN_TIMEOUT_S
) -> Opened:
    """Open all configured tiers side by side, within `timeout_s`. Raises ConfigError for a wrong option.

    A tier that answers too late is closed again by the thread that opened it.
    """
    for tier in sorted(set(site.config.codecs) - set(openers or _OPENERS) - {"dram"}):
        known = ", ".join(openers or _OPENERS)
        raise ConfigError(f"codecs names the tier {tier!r}; codecs are for dram and the tiers below it: {known}")
    openings = [_Opening(name, opener, site) for name, opener in (openers or _OPENERS).items()]
    deadline = time.monotonic() + timeout_s
    outcomes = [opening.outcome(deadline) for opening in openings]
    tiers, missing = [], {}
    for opening, outcome in zip(openings, outcomes, strict=True):
        if isinstance(outcome, TierError):
            missing[opening.name] = str(outcome)
            logger.error("kvtier starts without its %s tier: %s", opening.name, outcome)
        elif isinstance(outcome, Exception):
            for other in openings:
                other.abandon()
            raise outcome
        elif outcome is not None:
            tiers.append(outcome)
    return Opened(tiers, missing)


def register_memory(tiers: Sequence[Tier], memory: memoryview) -> None:
    """Tell the tiers that can use it where the engine's rows lie: a network card reads and writes them there without a
    copy. A card that refuses (a low memlock limit) costs copies, not the tier."""
    for tier in tiers:
        register = getattr(tier, "register", None)
        if register is not None and not register(memory):
            logger.warning("kvtier: %s copies rows, their memory could not be registered; raise ulimit -l", tier.name)


def open_tier(site: Site, name: str, openers: Mapping[str, Opener] | None = None) -> Tier:
    """Open one configured tier again, after it was detached. Blocks. Raises ConfigError or TierError."""
    known = openers or _OPENERS
    if name not in known:
        raise ConfigError(f"no tier is called {name!r}; there are: {', '.join(known)}")
    outcome = _Opening(name, known[name], site).outcome(time.monotonic() + OPEN_TIMEOUT_S)
    if isinstance(outcome, Exception):
        raise outcome
    if outcome is None:
        raise ConfigError(f"the tier {name!r} is not configured: set {_NAMED_BY.get(name, name)} and start again")
    return outcome


class _Opening:
    """One tier being opened in a thread of its own, so that a medium that hangs holds up nobody."""

    def __init__(self, name: str, opener: Opener, site: Site) -> None:
        self.name = name
        self._opener = opener
        self._site = site
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._outcome: Tier | Exception | None = None
        self._abandoned = False
        threading.Thread(target=self._open, name=f"kvtier-open-{name}", daemon=True).start()

    def outcome(self, deadline: float) -> Tier | Exception | None:
        """The tier, None if none is configured, or what went wrong; TierError if nothing came before `deadline`."""
        if self._ended.wait(max(0.0, deadline - time.monotonic())):
            return self._outcome
        self.abandon()
        return TierError("its medium did not answer in time")

    def abandon(self) -> None:
        """Nobody wants the tier: close it now, or once it has opened. Idempotent."""
        with self._lock:
            self._abandoned = True
            ended = self._ended.is_set()
        if ended:
            self._close()

    def _open(self) -> None:
        outcome: Tier | Exception | None
        try:
            tier = self._opener(self._site.of(self.name))
            outcome = tier if tier is None else self._site.encoded(tier)
        except OSError as error:
            outcome = TierError(str(error))
        except Exception as error:  # noqa: BLE001 - thread boundary: raised again by whoever asks for the outcome
            outcome = error
        with self._lock:
            self._outcome = outcome
            self._ended.set()
            abandoned = self._abandoned
        if abandoned:
            self._close()

    def _close(self) -> None:
        if self._outcome is not None and not isinstance(self._outcome, Exception):
            self._outcome.close()
