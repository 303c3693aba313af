"""The one configuration schema. Unknown keys are start-up errors that name the nearest valid key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_UNITS |= {f"{u}i": 1024**n for n, u in enumerate("kmgtp", start=1)}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]i?)?b?\s*$", re.IGNORECASE)


def parse_bytes(name: str, value: object) -> int:
    """A size in bytes from an int or a string such as "32GiB" or "500 GB". Raises ConfigError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f'{name} is {value!r}; write a size such as "32GiB" or a number of bytes')
    if isinstance(value, str):
        found = _SIZE.match(value)
        if found is None:
            raise ConfigError(f'{name} is {value!r}; write a size such as "32GiB", "500GB" or a number of bytes')
        value = float(found[1]) * _UNITS[(found[2] or "").lower()]
    if value < 0 or value != value or value > 2**60:
        raise ConfigError(f"{name} is {value!r}; it must be between 0 and 1 EiB")
    return int(value)


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may set. Sizes are per node, in bytes, and are hard caps."""

    dram_bytes: int = 0
    """Size of the memory tier; required."""
    cxl_path: str = ""
    """Memory behind a link: a devdax device, "node:N", a file, or "auto" to look for one; empty: no such tier."""
    cxl_bytes: int = 0
    """Cap on that tier, headers included."""
    nvme_path: str = ""
    """Folder for the NVMe tier; empty: no such tier."""
    nvme_bytes: int = 0
    """Cap on everything kvtier keeps under nvme_path, journal included."""
    nvme_daily_write_bytes: int = 0
    """Most bytes written to the drive in a day, against wear; what exceeds it is refused and counted. 0: no limit."""
    direct_io: bool = True
    """Bypass the page cache on NVMe and shared_fs where the file system allows it."""
    shared_fs_path: str = ""
    """Folder on a file system that other machines mount too; empty: no such tier."""
    shared_fs_bytes: int = 0
    """Cap on everything kvtier keeps under shared_fs_path, of all machines together; the same on each."""
    pool_master: str = ""
    """host:port of the Mooncake master of a shared pool; empty: no such tier."""
    pool_metadata: str = "P2PHANDSHAKE"
    """Mooncake's metadata server; P2PHANDSHAKE: none is needed."""
    pool_protocol: str = "tcp"
    """How rows travel to and from the pool: tcp or rdma."""
    pool_device: str = ""
    """RDMA devices the pool may use, comma-separated; empty: all."""
    pool_host: str = ""
    """Name or address by which other machines reach this one; empty: the address that leads to the master."""
    pool_bytes: int = 0
    """Memory this process lends to the pool; 0: it only uses what others lend."""
    pool_replicas: int = 1
    """Copies the pool keeps of each row."""
    policy: str = "kvtier"
    """Which eviction policy orders what leaves a tier."""
    hbm_policy: str = "kvtier"
    """What leaves the device first: "kvtier" (the order of `policy`) or "engine" (the engine's own order)."""
    gate: bool = True
    """Decline loads that are slower than recomputing."""
    io_threads: int = 4
    """Threads that carry bytes between tiers."""
    chunk_bytes: int = 16 << 20
    """Largest single call into a tier: what a demand read may have to wait for."""
    link_budgets: dict[str, int] = {}
    """Bytes per second a tier may be read or written at, as {"nvme.write": "500MB"}; what is not named has no limit."""
    store_backlog_bytes: int = 1 << 30
    """Write-through is dropped, whole suffixes at a time, while more than this is queued."""
    load_deadline_s: float = 5.0
    """Longest a request waits for its blocks before it recomputes."""
    write_admission: str = "always"
    """What tiers that wear take: "always" everything, "value" what is worth its wear and room by prices_file."""
    prices_file: str = ""
    """JSON file with what GPUs, tiers and wear cost; empty: the defaults."""
    look_ahead: bool | str = True
    """Move up and protect what requests in the engine's queue need; "speculation": and what is likely to come soon."""
    hint_pin_bytes: int = 0
    """Memory one client may pin by hints; 0: pins are rejected."""
    control: str = ""
    """Where the control endpoint (hints, state) listens, such as "127.0.0.1:7077"; empty: nowhere."""
    discover_deadline_s: float = 0.1
    """Longest a request waits to learn what other engines have put into a shared tier."""
    canary_share: float = 0.0
    """Share of requests that compute what they could have loaded, to compare it with what is cached."""
    memory_checks: bool = True
    """Seal memory rows when they are written, and verify them whenever they are loaded from memory."""
    ghost_blocks: int = 200_000
    """Blocks remembered after they left every tier."""
    store_generated: bool = True
    """Also cache the blocks a request generates, not only its prompt."""
    codecs: dict[str, str] = {}
    """What rows are encoded with, by tier: {"nvme": "d4"}. dram can be int8, on CUDA. Others keep them as they are."""
    dedup: dict[str, float] = {}
    """Tiers that keep equal payloads once, and how many rows may share the room of one: {"nvme": 2}. cxl, nvme."""
    codec_max_kl: dict[str, float] = {}
    """Quality budget by tier, in nats a token on the calibration text; a lossy codec beyond it is refused."""
    calibration: str = ""
    """File made by kvtier calibrate; empty: where it puts it for this model."""
    lossy_requests: str = "opt_in"
    """Whom lossy tiers serve: requests that ask for it ("opt_in"), or all that do not refuse ("opt_out")."""
    allow_slow_codecs: bool = False
    """Accept a codec that decodes more slowly than its tier reads plain rows: for the room."""
    weights_fingerprint: str = ""
    """Names the weights; empty: derived from the model folder or its name and revision."""
    epoch: int = 0
    """Raise it to make everything cached so far unreachable (after changing weights in place)."""

    def __post_init__(self) -> None:
        if self.write_admission not in ("always", "value"):
            raise ConfigError(f'write_admission is {self.write_admission!r}; choose "always" or "value"')
        if self.look_ahead not in (True, False, "speculation"):
            raise ConfigError(f'look_ahead is {self.look_ahead!r}; choose true, false or "speculation"')
        for name, low, high in (
            ("io_threads", 2, 256),
            ("chunk_bytes", 1 << 12, 1 << 26),
            ("epoch", 0, 2**31),
            ("pool_replicas", 1, 16),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be between {low} and {high}")
        for link in self.link_budgets:
            if not re.fullmatch(r"\w+\.(read|write)", link):
                raise ConfigError(f'link_budgets names {link!r}; write a tier and a direction, such as "nvme.write"')
        if not 0 <= self.canary_share <= 1:
            raise ConfigError(f"canary_share is {self.canary_share}; it must be between 0 and 1")
        if self.hbm_policy not in ("kvtier", "engine"):
            raise ConfigError(f'hbm_policy is {self.hbm_policy!r}; write "kvtier" or "engine"')
        if not 0 < self.load_deadline_s <= 3600:
            raise ConfigError(f"load_deadline_s is {self.load_deadline_s}; it must be between 0 and 3600 seconds")
        if not 0 <= self.discover_deadline_s <= 60:
            raise ConfigError(f"discover_deadline_s is {self.discover_deadline_s}; it must be between 0 and 60 seconds")
        if self.pool_protocol not in ("tcp", "rdma"):
            raise ConfigError(f'pool_protocol is {self.pool_protocol!r}; it must be "tcp" or "rdma"')
        if self.pool_bytes and not self.pool_master:
            raise ConfigError("pool_bytes lends memory to a pool that is not named; set pool_master, or remove it")
        for tier, names in (("CXL", "cxl"), ("NVMe", "nvme"), ("shared_fs", "shared_fs")):
            if bool(getattr(self, f"{names}_path")) != bool(getattr(self, f"{names}_bytes")):
                raise ConfigError(
                    f"{names}_path and {names}_bytes go together: set both, or neither to have no {tier} tier"
                )
        if self.lossy_requests not in ("opt_in", "opt_out"):
            raise ConfigError(f'lossy_requests is {self.lossy_requests!r}; it must be "opt_in" or "opt_out"')
        for tier, rows in self.dedup.items():
            if tier not in ("cxl", "nvme"):
                raise ConfigError(f"dedup names the tier {tier!r}; it is for cxl and nvme, which are one process's own")
            if not 1 <= rows <= 64:
                raise ConfigError(f"dedup is {rows} for {tier}; it must be between 1 and 64 rows for the room of one")
        for tier, kl in self.codec_max_kl.items():
            if not 0 < kl < 10:
                raise ConfigError(f"codec_max_kl is {kl} for {tier}; it must be between 0 and 10 nats a token")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CacheConfig:
        """Check and convert what an engine passes on. Raises ConfigError with one line that says what to change."""
        known = list(cls.__struct_fields__)
        converted: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(_unknown(name, known))
            if name == "link_budgets" and isinstance(value, dict):
                value = {link: parse_bytes(f"{name}[{link}]", rate) for link, rate in value.items()}
            converted[name] = parse_bytes(name, value) if name.endswith("_bytes") else value
        try:
            return msgspec.convert(converted, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error).replace("`", "").replace("$.", "")) from error


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown kvtier configuration key {name!r}; {hint}"
