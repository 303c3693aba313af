"""`kvtier config show`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.cli.config import check_options, read_options
from kvtier.cli.main import main
from kvtier.errors import ConfigError


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "config", "show", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_option_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    file.write_text(
        json.dumps({"kv_connector": "KVTierConnector", "kv_connector_extra_config": {"dram_bytes": "1GiB"}})
    )
    for given in ('{"dram_bytes": "1GiB"}', str(file)):
        rows = json.loads(show(given, "--json").stdout)
        assert rows["dram_bytes"] == {"value": 1 << 30, "origin": "given"}
        assert rows["policy"] == {"value": "kvtier", "origin": "default"}


def test_what_is_wrong_is_one_line_and_exit_code_2() -> None:
    for given in ('{"dram_byte": 1}', "{", "[]", "nowhere.json", '{"kv_connector_extra_config": [1]}'):
        result = show(given)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert result.stderr.startswith("kvtier: ")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    binary = tmp_path / "kv.json"
    binary.write_bytes(b"\xa4\x00")
    for given in (str(binary), "a" * 5000):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            read_options(given)
        assert len(str(caught.value)) <= 300
    assert read_options('{"kv_connector": "KVTierConnector"}') == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"policy": "lur"}, "policy is 'lur'; choose one of "),
        ({"control": "7077"}, "control is '7077'"),
        ({"prices_file": "/no/such/file"}, "prices_file /no/such/file cannot be read"),
        ({"codecs": {"nvme": "d44"}}, "'d44' for the nvme tier is not one of"),
        ({"codecs": {"nvem": "d4"}}, "codecs names 'nvem', which is no tier"),
        ({"codec_max_kl": {"nvem": 0.1}}, "codec_max_kl names 'nvem', which is no tier"),
    ],
)
def test_what_the_start_of_an_engine_would_refuse_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_options(given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["clear"], "Missing argument"),
        (["hint", "s", "--returns", "3s"], "No such option: --returns"),
        (["replay", "workload:chat", "--load", "inf", "--variant", "native"], "Invalid value for '--load'"),
    ],
)
def test_wrong_usage_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.setattr("sys.argv", ["kvtier", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("kvtier: ")
    assert err.count("\n") == 1
    assert says in err
