"""Folders that are expensive to make, made once under the cache directory and never used half-written.

A folder is built beside its final place, every file is recorded with its size and xxh3-128 digest in a manifest that
is written last, and one rename publishes it. A file lock lets exactly one of several processes build; the others wait
and take what was built. A folder whose files no longer match its manifest is thrown away and built again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

MANIFEST_NAME = ".kvtier-manifest.json"
_READ_BYTES = 1 << 20


def cache_root() -> Path:
    """Return the folder kvtier keeps re-creatable files in: `$XDG_CACHE_HOME/kvtier`, `~/.cache/kvtier` by default."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvtier"


def prepared_folder(name: str, build: Callable[[Path], None], root: Path | None = None) -> Path:
    """Return the folder `name`, calling `build(empty folder)` first where it is missing or damaged.

    `name` must say what the contents depend on (put a digest of the recipe into it): a folder that matches its
    manifest is never rebuilt. Safe across processes; if `build` raises, nothing is left behind and it propagates.
    """
    root = (root if root is not None else cache_root() / "prepared").absolute()
    root.mkdir(parents=True, exist_ok=True)
    final = root / name
    with _exclusive(root / f"{name}.lock"):
        if folder_is_intact(final):
            return final
        draft = root / f".{name}.draft"
        for leftover in (draft, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        draft.mkdir()
        try:
            build(draft)
            _write_manifest(draft)
            draft.rename(final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return final


def folder_is_intact(folder: Path) -> bool:
    """Tell whether every file in the manifest is there with its size and digest. Reads the whole folder."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
    except (OSError, ValueError):
        return False
    for relative, (size_bytes, digest) in manifest.items():
        path = folder / relative
        if not path.is_file() or path.stat().st_size != size_bytes or _file_digest(path) != digest:
            return False
    return True


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(path.relative_to(folder)): (path.stat().st_size, _file_digest(path)) for path in files}
    with (folder / MANIFEST_NAME).open("w") as stream:
        json.dump(entries, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _file_digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


@contextmanager
def _exclusive(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
