"""Prepared folders: made once, never seen half-made, made again when damaged."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from kvtier.testing.prepared import cache_root, folder_is_intact, prepared_folder


def _write_two_files(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "weights").write_bytes(b"w" * 3_000_000)
    (folder / "sub" / "config").write_text("{}")


def _count_build(folder: Path) -> None:
    with (folder.parent / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.2)
    _write_two_files(folder)


def _prepare_in_child(root: str) -> None:
    prepared_folder("model", _count_build, Path(root))


def test_builds_once_and_returns_the_same_folder(tmp_path: Path) -> None:
    first = prepared_folder("model", _count_build, tmp_path)
    second = prepared_folder("model", _count_build, tmp_path)
    assert first == second == tmp_path / "model"
    assert (first / "sub" / "config").read_text() == "{}"
    assert (tmp_path / "builds").read_text() == "x"


def test_a_failing_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail_half_way(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepared_folder("model", fail_half_way, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    assert folder_is_intact(prepared_folder("model", _write_two_files, tmp_path))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: str) -> None:
    folder = prepared_folder("model", _write_two_files, tmp_path)
    weights = folder / "weights"
    if damage == "flip":
        content = bytearray(weights.read_bytes())
        content[2_000_000] ^= 1
        weights.write_bytes(content)
    elif damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        (folder / "sub" / "config").unlink()
    else:
        (folder / ".kvtier-manifest.json").write_text("{ torn")
    assert not folder_is_intact(folder)
    assert folder_is_intact(prepared_folder("model", _write_two_files, tmp_path))
    assert weights.read_bytes() == b"w" * 3_000_000


def test_leftovers_of_a_killed_build_are_not_used(tmp_path: Path) -> None:
    draft = tmp_path / ".model.draft"
    draft.mkdir()
    (draft / "weights").write_bytes(b"half")
    folder = prepared_folder("model", _write_two_files, tmp_path)
    assert (folder / "weights").read_bytes() == b"w" * 3_000_000
    assert not draft.exists()


def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_prepare_in_child, args=(str(tmp_path),)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "kvtier"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "kvtier"
