"""Nothing that executes what it reads: no pickle and none of its kin anywhere in the code that handles bytes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("kvtier", "connectors", "kernels") for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "__import__"}


def offences(source: str) -> list[str]:
    """Imports of such modules, calls that unpickle behind another name, and evaluated text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called in ("torch.load", "yaml.load", "np.fromregex"):
                found.append(called)
            if any(word.arg == "allow_pickle" for word in node.keywords):
                found.append(f"{called}(allow_pickle)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, dill",
        "torch.load('x')",
        "np.load('x', allow_pickle=True)",
        "exec(text)",
    ],
)
def test_it_would_be_found(source: str) -> None:
    assert len(offences(source)) == 1
