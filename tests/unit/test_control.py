"""The control endpoint: who may call, what is taken, and that bad requests change nothing."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtier.cache.control import Control
from kvtier.cache.geometry import Geometry
from kvtier.cache.tier_cache import TierCache
from kvtier.cli.main import app
from kvtier.config import CacheConfig
from kvtier.errors import ConfigError, HintError
from kvtier.observe.endpoint import TOKEN_VARIABLE, is_loopback, parse_address
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.dram import DramTier
from kvtier.tiers.protocol import TierProbe

ROW = 64


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rig:
    def __init__(self, host: str = "127.0.0.1") -> None:
        memory = DramTier.over(np.zeros(32 * ROW, np.uint8), ROW, 32, ROW, checksums=False)
        config = CacheConfig(dram_bytes=1, policy="lru", io_threads=2, control=f"{host}:{free_port()}")
        self.cache = TierCache(config, Geometry(16), memory, memory.row, [MemoryTier(ROW, 256, name="nvme")])
        self.engine = FakeEngine(self.cache)
        self.control = Control(self.cache)
        assert self.control.server is not None
        self.port = self.control.server.port

    def call(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode() if method == "POST" else None
        sent = {"Content-Type": "application/json"} if method == "POST" else {}
        try:
            connection.request(method, path, raw, {**sent, **(headers or {})})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def close(self) -> None:
        self.control.close()
        self.cache.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig()
    with r.cache.lock:
        r.engine.serve(range(10), session="s")
        r.engine.settle()
    yield r
    r.close()


def test_a_hint_is_carried_out_although_the_engine_sleeps(rig: Rig) -> None:
    with rig.cache.lock:
        rig.cache.memory.clear()
        rig.cache.epoch += 1
    status, answer = rig.call("POST", "/v1/hints", {"session": "s", "returns_in": "0.2s"})
    assert (status, answer["results"][0]["outcome"]) == (200, "accepted")
    deadline = time.monotonic() + 10
    while rig.cache.memory.residency.resident_rows < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert rig.cache.memory.residency.resident_rows == 10, "nobody but the timekeeper polled"


def test_state_says_mode_tiers_and_decisions(rig: Rig) -> None:
    status, state = rig.call("GET", "/v1/state")
    assert status == 200
    assert state["mode"] == "normal"
    assert [tier["name"] for tier in state["tiers"]] == ["dram", "nvme"]
    assert state["tiers"][1]["rows"] == 10


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ({"session": "s", "returns_inn": 3}, "did you mean returns_in"),
        ([{"session": "s", "returns_in": 3}, {"session": "s", "pin": "soon"}], "pin is 'soon'"),
        ("s", "JSON object"),
        ([{}] * 1001, "at most 1000"),
    ],
)
def test_a_malformed_hint_is_one_clear_error_and_changes_nothing(rig: Rig, body: object, said: str) -> None:
    status, answer = rig.call("POST", "/v1/hints", body)
    assert status == 400
    assert said in answer["error"]
    assert "\n" not in answer["error"]
    assert len(rig.cache.hinted) == 0


def test_nothing_refused_touches_what_holds_already(rig: Rig) -> None:
    assert (
        rig.call("POST", "/v1/hints", {"session": "s", "returns_in": "30s"})[1]["results"][0]["outcome"] == "accepted"
    )
    before = rig.cache.hinted.standing("s")
    for body in (
        b"{",
        [{"session": "s", "demote": True}, {"session": "s", "returns_in": -1}],
        {"session": "s", "pin": {}},
    ):
        assert rig.call("POST", "/v1/hints", body)[0] == 400
    assert rig.call("POST", "/v1/tiers/detach", {"tier": "nvmee"})[0] == 400
    assert rig.call("POST", "/v1/tiers/attach", {"tier": 3})[0] == 400
    assert rig.cache.hinted.standing("s") == before
    assert [level.name for level in rig.cache.lower] == ["nvme"]


def test_what_a_web_page_could_send_is_refused(rig: Rig) -> None:
    hint = {"session": "s", "returns_in": 3}
    assert rig.call("POST", "/v1/hints", hint, {"Content-Type": "text/plain"})[0] == 415
    assert rig.call("POST", "/v1/hints", hint, {"Host": "evil.example:7077"})[0] == 403
    assert rig.call("POST", "/v1/hints", b"", {"Content-Length": "99999999"})[0] == 413
    assert rig.call("GET", "/v1/hints")[0] == 405
    assert rig.call("GET", "/etc/passwd")[0] == 404
    assert len(rig.cache.hinted) == 0


def test_with_a_token_only_its_holders_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    rig = Rig()
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            assert rig.call("GET", "/v1/state", headers=headers)[0] == 401
            assert rig.call("POST", "/v1/hints", {"session": "s", "returns_in": 3}, headers)[0] == 401
            assert rig.call("POST", "/v1/tiers/detach", {"tier": "nvme"}, headers)[0] == 401
        assert len(rig.cache.hinted) == 0
        assert rig.cache.lower, "still there"
        assert rig.call("GET", "/v1/state", headers={"Authorization": "Bearer s3cret"})[0] == 200
    finally:
        rig.close()


def test_others_can_reach_it_only_with_a_token_and_a_taken_port_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        Rig("0.0.0.0")
    rig = Rig()
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{rig.port}"):
            Control(rig.cache)
    finally:
        rig.close()


def test_addresses_are_read_or_refused() -> None:
    assert parse_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert parse_address("[::1]:7077") == ("::1", 7077)
    assert parse_address(":7077") == ("127.0.0.1", 7077)
    for bad in ("7077", "localhost", "localhost:", "localhost:http", "localhost:0", "localhost:65536"):
        with pytest.raises(ConfigError, match="such as"):
            parse_address(bad)


def test_loopback_is_told_from_other_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "localhost.evil.example", "", "::"))


def test_the_command_line_hints_and_says_what_became_of_it(rig: Rig) -> None:
    url = f"http://127.0.0.1:{rig.port}"
    run = CliRunner().invoke
    done = run(app, ["hint", "s", "--returns-in", "3s", "--retain-for", "2h", "--url", url])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == ["returns_in: accepted", "retain_until: clipped (time)"]
    done = run(app, ["hint", "nobody", "--returns-in", "3s", "--url", url])
    assert (done.exit_code, done.output) == (1, "returns_in: rejected (unknown_session)\n")
    for arguments, said in (
        (["hint", "s", "--returns-in", "soon", "--url", url], "returns_in is 'soon'"),
        (["hint", "s", "--url", url], "at least one of"),
        (["hint", "s", "--demote", "--url", f"http://127.0.0.1:{free_port()}"], "does not answer"),
    ):
        done = run(app, arguments)
        assert isinstance(done.exception, HintError)
        assert said in str(done.exception)


def test_tiers_are_detached_and_attached_again(rig: Rig) -> None:
    rig.engine.serve(range(4))
    rig.engine.settle()
    kept = rig.cache.lower[0].tier
    assert isinstance(kept, MemoryTier)
    assert rig.call("POST", "/v1/tiers/detach", {"tier": "nvme"}) == (200, {"tier": "nvme", "gone": True})
    assert not rig.cache.lower
    assert rig.call("POST", "/v1/tiers/attach", {"tier": "nvme"})[0] == 400, "nobody said how"
    rig.cache.reopen = lambda name: kept.reopen()
    assert rig.call("POST", "/v1/tiers/attach", {"tier": "nvme"}) == (
        200,
        {"tier": "nvme", "rows": len(kept.published)},
    )
    status, answer = rig.call("POST", "/v1/tiers/detach", {"tier": "tape"})
    assert status == 400
    assert "there are: nvme" in answer["error"]
    assert rig.call("POST", "/v1/tiers/attach", {"tier": "nvme"})[0] == 400, "it is there already"
    assert rig.call("POST", "/v1/tiers/attach", [])[0] == 400


def test_a_tier_that_is_there_is_not_opened_again_and_one_that_fails_is_closed(rig: Rig) -> None:
    class Broken(MemoryTier):
        closed = False

        def probe(self) -> TierProbe:
            raise OSError("gone again")

        def close(self) -> None:
            self.closed = True

    opened: list[Broken] = []

    def reopen(name: str) -> Broken:
        opened.append(Broken(ROW, 8, name=name))
        return opened[-1]

    rig.cache.reopen = reopen
    assert rig.call("POST", "/v1/tiers/attach", {"tier": "nvme"})[0] == 400
    assert not opened, "two on one medium would overwrite each other"
    assert rig.call("POST", "/v1/tiers/attach", {"tier": "other"})[0] == 500
    assert opened[0].closed


def test_the_timekeeper_outlives_what_goes_wrong_in_a_beat(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    left = [True]

    def poll() -> None:
        if left:
            left.clear()
            raise RuntimeError("once")
        done.set()

    monkeypatch.setattr(rig.cache, "poll", poll)
    assert rig.call("POST", "/v1/hints", {"session": "s", "returns_in": 3})[0] == 200
    assert done.wait(10)
    assert rig.cache.recorder.drain()[0]["kvtier_faults", ("engine", "timekeeper")] == 1
