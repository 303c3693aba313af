"""`kvtier config show`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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
    for given in ('{"dram_byte": 1}', "{", "[]", "nowhere.json"):
        result = show(given)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert result.stderr.startswith("kvtier: ")
