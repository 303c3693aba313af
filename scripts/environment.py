"""Build the Python environment of this checkout; does nothing where it is already right.

    python3.11 scripts/environment.py requirements/vllm-0.32.toml --venv .venv

Two layers, because the engine's packages take gigabytes and minutes while kvtier must be editable per checkout:

1. A virtual environment with everything in the lock file, under `$XDG_CACHE_HOME/kvtier/venvs/` (default `~/.cache`),
   named by a digest of all it depends on and shared by every checkout. It is built in place, since virtual
   environments cannot be moved, under a file lock; a marker written last says that it is complete.
2. The checkout's own small virtual environment: its packages are kvtier, installed editable (entry points included,
   so that vLLM finds the plug-in in every process it starts); a `.pth` file adds the packages of the first.

Runs on a bare Debian with Python and needs only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[1]
# What vLLM's CPU kernels and Mooncake's client link to: shared library -> Debian package
SYSTEM_LIBRARIES = {"libnuma.so.1": "libnuma1", "libibverbs.so.1": "libibverbs1", "libcurl.so.4": "libcurl4"}
MARKER = ".kvtier-complete"
STAMP = "kvtier-environment.json"
_REPORT_EVERY_S = 15.0
_LOG_TAIL_LINES = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("description", type=Path, help="the environment's .toml file; its .lock file lies beside it")
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv", help="the checkout's environment")
    options = parser.parse_args()
    description = tomllib.loads(options.description.read_text())
    lock_path = options.description.with_suffix(".lock")
    refuse_wrong_python(description["python"], options.description)

    own = options.venv.absolute()
    shared = cache_folder() / f"{lock_path.stem}-{digest_of(lock_path, description)}"
    stamp = {"packages": str(shared), "project": project_digest(REPOSITORY), "folder": str(REPOSITORY)}
    if is_ready(own, shared, stamp):
        say(f"{own.name} is up to date")
        return
    shared.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(shared.with_name(shared.name + ".lock")):
        install_system_packages(description.get("system_files", {}))
        if (shared / MARKER).exists():
            say(f"using the packages in {shared}")
        else:
            build_shared(shared, lock_path, description)
        build_own(own, shared, stamp)


def build_shared(shared: Path, lock_path: Path, description: dict[str, Any]) -> None:
    """Fill the shared environment from the lock file and mark it complete."""
    started_s = time.monotonic()
    count = lock_path.read_text().count("==")
    say(f"installing {count} packages from {lock_path.name} into {shared}")
    if shared.exists():
        say("a former attempt was interrupted: starting again")
        shutil.rmtree(shared)
    venv.create(shared, with_pip=True, symlinks=True)
    command = [str(shared / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", str(lock_path)]
    run_logged(command, shared.with_name(shared.name + ".log"), count)
    write_alias(site_packages(shared), description.get("alias"), lock_path)
    (shared / MARKER).touch()
    say(f"installed in {time.monotonic() - started_s:.0f} s")


def build_own(own: Path, shared: Path, stamp: dict[str, str]) -> None:
    """Make the checkout's environment on top of the shared one and install kvtier into it."""
    started_s = time.monotonic()
    if own.is_symlink():
        own.unlink()
    elif own.exists():
        shutil.rmtree(own)
    venv.create(own, with_pip=False, symlinks=True)
    add_packages(own, shared)
    python = str(own / "bin" / "python")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(REPOSITORY)]
    if subprocess.run([python, "-m", "pip", *install], stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
        fail("kvtier itself could not be installed; pip's message is above")
    (own / STAMP).write_text(json.dumps(stamp))
    say(f"{own.name} made in {time.monotonic() - started_s:.0f} s")


def is_ready(own: Path, shared: Path, stamp: dict[str, str]) -> bool:
    """Tell whether the checkout's environment was made from exactly these inputs and its base is complete."""
    with contextlib.suppress(OSError, ValueError):
        return (shared / MARKER).exists() and bool(json.loads((own / STAMP).read_text()) == stamp)
    return False


def add_packages(own: Path, shared: Path) -> None:
    """Let the checkout's environment see the shared packages, and run their commands by its own Python."""
    chain = site_packages(own) / "kvtier_packages.pth"
    chain.write_text(f"import site; site.addsitedir({str(site_packages(shared))!r})\n")
    # A preamble that sh and Python both can read, for an interpreter's path of any length and with spaces in it.
    preamble = b"#!/bin/sh\n'''exec' \"%s\" \"$0\" \"$@\"\n' '''\n" % os.fsencode(own / "bin" / "python")
    old = os.fsencode(shared / "bin" / "python")
    for command in sorted((shared / "bin").iterdir()):
        destination = own / "bin" / command.name
        if command.name.startswith(("python", "activate", "Activate")) or destination.exists() or command.is_dir():
            continue
        lines = command.read_bytes().splitlines(keepends=True)
        length = 3 if lines[1:2] and lines[1].startswith(b"'''exec'") else 1
        if lines[0].startswith(b"#!") and old in b"".join(lines[:length]):
            destination.write_bytes(preamble + b"".join(lines[length:]))
            destination.chmod(0o755)
        else:
            destination.symlink_to(command)


def write_alias(packages: Path, alias: dict[str, str] | None, lock_path: Path) -> None:
    """Record an installed distribution under a second name, as the description asks."""
    if alias is None:
        return
    pinned = dict(line.split(" ")[0].split("==") for line in lock_path.read_text().splitlines() if "==" in line)
    name, version = alias["name"], pinned[alias["of"]] + alias["version_suffix"]
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvtier\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))


def install_system_packages(files: dict[str, str]) -> None:
    """Install the few Debian packages the environment needs, if missing and if this is root; else say what to do.

    `files` maps a file the environment needs to the package it comes in.
    """
    missing = [package for library, package in SYSTEM_LIBRARIES.items() if not has_library(library)]
    missing += [package for path, package in files.items() if not Path(path).exists()]
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(f"python{sys.version_info.major}.{sys.version_info.minor}-venv")
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        fail(f"please install these system packages first: {' '.join(missing)}")
    say(f"installing system packages: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *missing]):
        if subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode:
            fail(f"`{' '.join(command)}` failed; its message is above")


def run_logged(command: list[str], log_path: Path, count: int) -> None:
    """Run pip with its output in a log, telling how far it is; on failure show the log's end and stop."""
    started_s = reported_s = time.monotonic()
    with log_path.open("w") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while child.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - reported_s >= _REPORT_EVERY_S:
                reported_s = time.monotonic()
                say(f"{stage(log_path, count)} ({reported_s - started_s:.0f} s)")
    if child.returncode:
        lines = log_path.read_text(errors="replace").splitlines()
        print("\n".join(lines[-_LOG_TAIL_LINES:]), file=sys.stderr)
        hint = ""
        if any("torch" in line and line.startswith("ERROR") for line in lines):
            hint = "; CPU builds of torch are not on PyPI: point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to them"
        fail(f"pip failed with status {child.returncode}, the whole log is {log_path}{hint}")


def stage(log_path: Path, count: int) -> str:
    """Say in words how far pip is, from what it has logged."""
    text = log_path.read_text(errors="replace")
    if "Installing collected packages" in text:
        return "unpacking and compiling"
    return f"fetched {text.count('Collecting ')} of {count} packages"


def refuse_wrong_python(wanted: str, description: Path) -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != wanted or sys.platform != "linux" or platform.machine() != "x86_64":
        here = f"Python {running} on {sys.platform} {platform.machine()}"
        fail(f"{description.name} is locked for Python {wanted} on linux x86_64, this is {here}")


def digest_of(lock_path: Path, description: dict[str, Any]) -> str:
    """Return a name for everything the shared environment depends on: lock, alias, interpreter."""
    parts = [lock_path.read_text(), json.dumps(description, sort_keys=True), sys.version, sys.base_prefix]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def project_digest(repository: Path) -> str:
    """Return a digest of what an editable install fixes: pyproject.toml and which import packages there are."""
    packages = sorted(str(path.relative_to(repository)) for path in repository.glob("*/*/__init__.py"))
    content = (repository / "pyproject.toml").read_bytes() + "\0".join(packages).encode()
    return hashlib.sha256(content).hexdigest()


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier" / "venvs"


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def has_library(name: str) -> bool:
    with contextlib.suppress(OSError):
        ctypes.CDLL(name)
        return True
    return False


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that builds the same environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"env: {text}", file=sys.stderr, flush=True)  # stdout belongs to what runs in the environment


def fail(text: str) -> NoReturn:
    sys.exit(f"env: {text}")


if __name__ == "__main__":
    main()
