"""scripts/environment.py: the checkout's environment sees the shared packages, and only a complete one is used."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOCK = "alpha==1.5 \\\n    --hash=sha256:00\nengine-cpu==2.0 \\\n    --hash=sha256:11\n"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = load("environment")
lock = load("lock")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A shared environment with one package, one script and one binary command."""
    folder = tmp_path / "shared packages"
    venv.create(folder, with_pip=False, symlinks=True)
    packages = environment.site_packages(folder)
    (packages / "shared_only.py").write_text("VALUE = 7\n")
    body = "import shared_only, sys\nprint(shared_only.VALUE, sys.prefix)\n"
    (folder / "bin" / "short").write_text(f"#!{folder}/bin/python\n{body}")
    # What pip writes where the path is too long for a kernel's #! line, or has a space.
    (folder / "bin" / "long").write_text(f"#!/bin/sh\n'''exec' \"{folder}/bin/python\" \"$0\" \"$@\"\n' '''\n{body}")
    (folder / "bin" / "binary").write_bytes(b"\x7fELF not a script")
    return folder


def test_commands_run_with_the_checkouts_python_and_see_the_shared_packages(shared: Path, tmp_path: Path) -> None:
    own = tmp_path / "own environment"
    venv.create(own, with_pip=False, symlinks=True)
    environment.add_packages(own, shared)
    for name in ("short", "long"):
        shown = subprocess.run([own / "bin" / name], capture_output=True, text=True, check=True).stdout
        assert shown == f"7 {own}\n"
    assert (own / "bin" / "binary").resolve() == shared / "bin" / "binary"
    assert not (own / "bin" / "python").resolve().is_relative_to(shared)


def test_the_alias_is_a_second_name_for_the_installed_version(shared: Path, tmp_path: Path) -> None:
    lock_path = tmp_path / "x.lock"
    lock_path.write_text(LOCK)
    alias = {"name": "engine", "of": "engine-cpu", "version_suffix": "+cpu"}
    environment.write_alias(environment.site_packages(shared), alias, lock_path)
    program = "import importlib.metadata as m; print(m.version('engine'))"
    shown = subprocess.run([shared / "bin" / "python", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "2.0+cpu"


def test_only_a_complete_environment_made_from_the_same_inputs_is_ready(shared: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    stamp = {"packages": str(shared), "project": "digest", "folder": str(REPOSITORY)}
    assert not environment.is_ready(own, shared, stamp)
    (own / environment.STAMP).write_text(json.dumps(stamp))
    assert not environment.is_ready(own, shared, stamp), "the shared environment has no marker: it was interrupted"
    (shared / environment.MARKER).touch()
    assert environment.is_ready(own, shared, stamp)
    assert not environment.is_ready(own, shared, {**stamp, "project": "changed"})
    (own / environment.STAMP).write_text("{ torn")
    assert not environment.is_ready(own, shared, stamp)


def test_the_name_of_the_shared_environment_follows_its_inputs(tmp_path: Path) -> None:
    lock_path = tmp_path / "x.lock"
    lock_path.write_text(LOCK)
    first = environment.digest_of(lock_path, {"python": "3.11"})
    assert environment.digest_of(lock_path, {"python": "3.11"}) == first
    assert environment.digest_of(lock_path, {"python": "3.11", "alias": {}}) != first
    lock_path.write_text(LOCK.replace("1.5", "1.6"))
    assert environment.digest_of(lock_path, {"python": "3.11"}) != first


def test_a_new_import_package_or_entry_point_asks_for_a_new_install(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    first = environment.project_digest(tmp_path)
    package = tmp_path / "connectors" / "other"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    second = environment.project_digest(tmp_path)
    (package / "module.py").touch()
    assert environment.project_digest(tmp_path) == second != first
    (tmp_path / "pyproject.toml").write_text("[project.scripts]\n")
    assert environment.project_digest(tmp_path) not in (first, second)


def test_a_failing_pip_is_shown_and_ends_the_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "print('ERROR: no matching distribution for torch'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"status 3.*PIP_FIND_LINKS"):
        environment.run_logged(command, tmp_path / "pip.log", 1)
    assert "no matching distribution for torch" in capsys.readouterr().err


def test_the_lock_drops_what_only_unwanted_packages_asked_for() -> None:
    def package(name: str, *requires: str, requested: bool = False) -> dict[str, Any]:
        return {"metadata": {"name": name, "requires_dist": list(requires)}, "requested": requested}

    resolved = [
        package("Engine", "vision_lib>=1", "numpy", requested=True),
        package("vision-lib", "codec"),
        package("codec"),
        package("numpy"),
    ]
    kept = lock.drop_packages(resolved, {"vision-lib"}, ["engine==1"])
    assert sorted(item["metadata"]["name"] for item in kept) == ["Engine", "numpy"]


def test_every_locked_package_has_an_exact_version_and_a_hash() -> None:
    for path in (REPOSITORY / "requirements").glob("*.lock"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in line for line in lines[::2])
        assert all(line.startswith("    --hash=sha256:") for line in lines[1::2])
        assert "://" not in path.read_text(), "a lock names packages, not hosts"
