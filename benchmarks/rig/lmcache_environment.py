"""LMCache beside vLLM: a thin virtual environment over the running one, built once under the cache folder.

LMCache must share an interpreter with vLLM, but must not change the packages kvtier is tested with. So its own
packages (pinned in lmcache.txt, installed without dependencies: the declared ones ask for CUDA) go into a virtual
environment that sees this one's packages through a `.pth` file.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from kvtier.testing.prepared import cache_root

PINS = Path(__file__).with_name("lmcache.txt")
_MARKER = ".complete"
_PROBE = "import lmcache.integration.vllm.vllm_v1_adapter"
_INSTALL_LIMIT_S = 900.0


class Absent(Exception):
    """The contender cannot run here; the message says why, in one line."""


def interpreter(report: Callable[[str], None]) -> str:
    """Return the interpreter of the LMCache environment, building it when missing. Raises Absent."""
    digest = hashlib.sha256(f"{PINS.read_text()}\0{sys.prefix}\0{sys.version}".encode()).hexdigest()[:12]
    folder = cache_root() / "venvs" / f"lmcache-{digest}"
    python = folder / "bin" / "python"
    if not (folder / _MARKER).exists():
        report("installing LMCache")
        _build(folder, python)
    return str(python)


def _build(folder: Path, python: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "below.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen))
    install = ["install", "--no-input", "--no-deps", "--only-binary", ":all:", "--requirement", str(PINS)]
    _run([sys.executable, "-m", "pip", "--python", str(python), *install], "pip could not install it")
    _run([str(python), "-c", _PROBE], "its vLLM adapter does not import")
    (folder / _MARKER).touch()


def _run(command: list[str], what_failed: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, cwd="/")
    except subprocess.TimeoutExpired as error:
        raise Absent(f"{what_failed}: no end within {_INSTALL_LIMIT_S:.0f} s") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise Absent(f"{what_failed}: {lines[-1].strip() if lines else f'exit status {done.returncode}'}")
