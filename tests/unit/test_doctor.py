"""`kvtier doctor` and `kvtier clear`: what is wrong and the fix; nothing touched, nothing removed under an engine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtier.cli.main import app
from kvtier.config import CacheConfig
from kvtier.doctor.findings import State
from kvtier.doctor.machine import check_machine
from kvtier.doctor.tiers import examine
from kvtier.errors import ConfigError
from kvtier.testing.rows import chain_rows, store_rows
from kvtier.tiers.cxl import CxlTier
from kvtier.tiers.nvme import NvmeTier
from tests.machines import add_dax, add_node

MIB = 1 << 20


def nvme(path: Path, key: bytes = b"\1", cap: int = 4 * MIB) -> NvmeTier:
    tier = NvmeTier(str(path), key * 32, "layout", 5000, cap)
    store_rows(tier, chain_rows(20))
    return tier


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def on_nvme(path: Path, size: str = "8MiB") -> tuple[int, dict[str, dict[str, str]], dict[str, Any]]:
    code, report = doctor("--set", f"nvme_path={path}", "--set", f"nvme_bytes={size}")
    return code, {f["check"]: f for f in report["findings"] if f["subject"] == "nvme"}, report


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        entry.name: (hashlib.sha256(entry.read_bytes()).hexdigest(), entry.stat().st_mtime_ns)
        for entry in folder.iterdir()
    }


def test_a_sound_folder_in_use_is_fine_and_measured(tmp_path: Path) -> None:
    tier = nvme(tmp_path)
    code, findings, report = on_nvme(tmp_path)
    assert code == 0
    assert report["ok"]
    (slab,) = [says for check, says in findings.items() if check.endswith(".slab")]
    assert f"in use by process {os.getpid()}" in slab["says"]
    assert [point["n_bytes"] for point in report["curves"]["nvme"]] == [4096, 65536, MIB, 8 * MIB]
    assert all(point["read_s"] > 0 and point["write_s"] > 0 for point in report["curves"]["nvme"])
    tier.close()


@pytest.mark.parametrize(
    ("suffix", "at", "says"),
    [
        (".slab", 40, "has a damaged superblock"),
        (".slab", 0, "is not kvtier's, in spite of its name"),
        (".journal", 9, "its .journal file is corrupt"),
        (".journal", None, ".journal is missing"),
        (".slab", -1, "the file is cut off"),
    ],
)
def test_damage_is_named_with_its_fix_and_left_as_it_is(tmp_path: Path, suffix: str, at: int | None, says: str) -> None:
    nvme(tmp_path).close()
    (file,) = tmp_path.glob(f"*{suffix}")
    if at is None:
        file.unlink()
    elif at < 0:
        os.truncate(file, 9000)
    else:
        data = bytearray(file.read_bytes())
        data[at] ^= 255
        file.write_bytes(data)
    before = fingerprint(tmp_path)
    code, findings, report = on_nvme(tmp_path)
    assert code == 1
    assert not report["ok"]
    (fault,) = [finding for finding in findings.values() if finding["state"] == "fault"]
    assert says in fault["says"]
    assert fault["fix"]
    assert fingerprint(tmp_path) == before


def test_caps_and_paths_that_cannot_be_are_faults(tmp_path: Path) -> None:
    code, findings, _ = on_nvme(tmp_path, "900TiB")
    assert code == 1
    assert "set nvme_bytes to" in findings["room"]["fix"]
    file = tmp_path / "file"
    file.write_bytes(b"x")
    code, findings, _ = on_nvme(file / "below")
    assert code == 1
    assert "is not a folder" in findings["path"]["says"]
    code, report = doctor("--set", "dram_bytes=900TiB")
    assert code == 1
    (fault,) = [f for f in report["findings"] if f["state"] == "fault"]
    assert "set dram_bytes to" in fault["fix"]


def test_cxl_is_found_measured_and_judged(tmp_path: Path) -> None:
    add_node(tmp_path, 2, total=0, hmat=(250, 30_000, 300, 20_000))
    device = add_dax(tmp_path, "dax0.0", 32 * MIB, node=2)
    report = examine(CacheConfig(cxl_path="auto", cxl_bytes=16 * MIB), str(tmp_path))
    says = {finding.check: finding for finding in report.findings if finding.subject == "cxl"}
    assert str(device) in says["path"].says
    assert "reads 30 GB/s, latency 250 ns" in says["hmat"].says
    assert report.ok
    assert "cxl" not in report.curves  # measuring would need memory that may hold rows
    report = examine(CacheConfig(cxl_path="auto", cxl_bytes=64 * MIB), str(tmp_path))
    assert [f.fix for f in report.findings if f.state is State.FAULT] == ["set cxl_bytes to 32MiB at most"]

    file = tmp_path / "file"
    tier = CxlTier(str(file), b"\1" * 32, "layout", 5000, 8 * MIB)
    report = examine(CacheConfig(cxl_path=str(file), cxl_bytes=8 * MIB))
    assert report.ok
    assert any("in use by process" in finding.says for finding in report.findings)
    assert len(report.curves["cxl"]) == 4
    tier.close()
    file.write_bytes(b"a database")
    report = examine(CacheConfig(cxl_path=str(file), cxl_bytes=8 * MIB))
    assert not report.ok
    assert file.read_bytes() == b"a database"


def test_a_pool_s_master_is_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        found = {f.check: f for f in examine(CacheConfig(pool_master=master)).findings if f.subject == "pool"}
        assert found["master"].state is State.OK
    found = {f.check: f for f in examine(CacheConfig(pool_master=master)).findings if f.subject == "pool"}
    assert found["master"].state is State.FAULT
    assert "start mooncake_master there" in found["master"].fix


def test_a_machine_with_nothing_has_nothing_wrong(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in check_machine(str(tmp_path))}
    assert {found[check].state for check in ("huge_pages", "numa", "cxl", "gpudirect")} == {State.ABSENT}
    add_node(tmp_path, 0, cpus="0-3")
    add_node(tmp_path, 1)
    found = {finding.check: finding for finding in check_machine(str(tmp_path))}
    assert found["numa"].says == "memory on nodes 0, 1"
    assert "node:1" in found["cxl"].says


def test_options_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text(json.dumps({"kv_connector_extra_config": {"dram_bytes": "16MiB"}}))
    code, report = doctor(str(given))
    assert code == 0
    assert "dram" in report["curves"]
    done = CliRunner().invoke(app, ["doctor", "--set", "nvme_pth=/x"])
    assert isinstance(done.exception, ConfigError)
    assert "did you mean nvme_path" in str(done.exception)
    done = CliRunner().invoke(app, ["doctor", "--set", "nonsense"])
    assert "write it as NAME=VALUE" in str(done.exception)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "no tier is configured" in " ".join(done.stdout.split())


def test_clear_removes_what_is_kvtier_s_and_nothing_else(tmp_path: Path) -> None:
    folder, below, region = tmp_path / "cache", tmp_path / "cache" / "dp1", tmp_path / "region"
    nvme(folder).close()
    nvme(folder, b"\2", 16 * MIB).close()
    nvme(below).close()
    (folder / "notes.txt").write_text("mine")
    CxlTier(str(region), b"\1" * 32, "layout", 5000, 8 * MIB).close()
    refused = CliRunner().invoke(app, ["clear", str(folder)], input="n\n")
    assert refused.exit_code == 1
    assert len(list(folder.glob("*.slab"))) == 2
    done = CliRunner().invoke(app, ["clear", str(folder), str(region), "--yes"])
    assert done.exit_code == 0, done.output
    assert "3 slabs" in done.stdout
    assert not list(folder.glob("kvtier-*")) + list(below.glob("kvtier-*"))
    assert (folder / "notes.txt").read_text() == "mine"
    assert not region.exists()
    again = CliRunner().invoke(app, ["clear", str(folder), "--yes"])
    assert "there is nothing of kvtier's at" in str(again.exception)


def test_clear_refuses_all_of_it_while_an_engine_uses_any(tmp_path: Path) -> None:
    nvme(tmp_path, b"\2").close()
    tier = nvme(tmp_path, cap=16 * MIB)
    done = CliRunner().invoke(app, ["clear", str(tmp_path), "--yes"])
    assert isinstance(done.exception, ConfigError)
    assert f"in use by process {os.getpid()}; stop that engine first" in str(done.exception)
    assert len(list(tmp_path.glob("*.slab"))) == 2
    tier.close()
    other = tmp_path / "not-ours"
    other.write_text("precious")
    done = CliRunner().invoke(app, ["clear", str(other), "--yes"])
    assert "there is nothing of kvtier's" in str(done.exception)
    assert other.read_text() == "precious"
