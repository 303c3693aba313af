"""Resolve an environment description into a lock file: every package with its exact version and hash.

    python3.11 scripts/lock.py requirements/vllm-0.32.toml      writes requirements/vllm-0.32.lock

Needs only the standard library and pip. Nothing is installed: pip resolves in a throw-away virtual environment and
reports what it would install. The lock is for the platform and the Python it was made with; its header says which.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("description", type=Path, help="the environment's .toml file")
    description_path = parser.parse_args().description
    description = tomllib.loads(description_path.read_text())
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != description["python"]:
        sys.exit(f"lock: {description_path} is for Python {description['python']}, this is {running}")

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = description["requirements"] + project["dependencies"]
    for extra in description.get("extras", ["dev"]):
        wanted += project["optional-dependencies"][extra]
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch) / "bin" / "python")
        resolved = pip_report(python, wanted, [])
        resolved += pip_report(python, description["without_dependencies"], ["--no-deps"])
    kept = drop_packages(resolved, set(description["leave_out"]), wanted)

    lock_path = description_path.with_suffix(".lock")
    lines = [
        f"# Made by `make lock` from {description_path.name} and pyproject.toml; install with --no-deps.",
        f"# python {running}, {sys.platform} {platform.machine()}",
    ]
    for item in sorted(kept, key=lambda item: canonical(item["metadata"]["name"])):
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines += [f"{name}=={version} \\", f"    --hash=sha256:{digest}"]
    lock_path.write_text("\n".join(lines) + "\n")
    print(f"lock: {len(kept)} packages in {lock_path}")


def pip_report(python: str, requirements: list[str], options: list[str]) -> list[dict[str, Any]]:
    """Return pip's report of what it would install into an empty environment."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        subprocess.run([*command, *options, "--report", report.name, *requirements], check=True)
        installed: list[dict[str, Any]] = json.loads(Path(report.name).read_text())["install"]
    return installed


def drop_packages(resolved: list[dict[str, Any]], unwanted: set[str], wanted: list[str]) -> list[dict[str, Any]]:
    """Remove the unwanted packages, and those that only they had asked for."""
    by_name = {canonical(item["metadata"]["name"]): item for item in resolved}
    reached: set[str] = set()
    # What pip lists without a requester (the without_dependencies ones) is asked for directly, as `requested` says.
    waiting = [name for name, item in by_name.items() if item["requested"]] + [canonical(text) for text in wanted]
    while waiting:
        name = waiting.pop()
        if name in reached or name in unwanted or name not in by_name:
            continue
        reached.add(name)
        waiting += [canonical(text) for text in by_name[name]["metadata"].get("requires_dist", [])]
    return [by_name[name] for name in reached]


def canonical(requirement: str) -> str:
    """Return the normalised distribution name a requirement or a name begins with."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


if __name__ == "__main__":
    main()
