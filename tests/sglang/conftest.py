"""Fixtures of the SGLang tests: tiny models, and the real server in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.scenario import run_scenario
from tests.e2e import models
from tests.sglang.server import ENVIRONMENT, REPOSITORY, SGLangServer, sglang_python

HERE = Path(__file__).parent
EVERYTHING = "KVTIER_SGLANG_FULL" in os.environ
in_the_full_run = pytest.mark.skipif(not EVERYTHING, reason="only in the full run: make test-sglang")
StartServer = Callable[..., SGLangServer]
# What SGLang reads from a DeepSeek configuration and transformers no longer writes.
MLA_OPTIONS = ("--json-model-override-args", '{"moe_layer_freq": 1}')


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder e2e, and skip them where there is no environment with SGLang."""
    missing = sglang_python() is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(pytest.mark.skip(reason="no environment with SGLang here: make env-sglang"))


def kvtier_storage(folder: Path, **options: Any) -> dict[str, Any]:
    """The storage level's extra configuration, with an nvme tier under `folder`."""
    engine = {"backend_name": "kvtier", "module_path": "kvtier_sglang", "class_name": "KVTierStorage"}
    return {**engine, "interface_v1": 1, "nvme_path": str(folder), "nvme_bytes": "128MiB", **options}


def run_in_sglang(
    scenario: Callable[..., Any], folder: Path, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Any:
    """Call `scenario(folder, **arguments)` in a process of SGLang's environment, and return its JSON result."""
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("tests/sglang/cpu", "", "connectors", "kernels"))
    return run_scenario(
        scenario,
        work_folder=folder,
        arguments={"folder": str(folder), **arguments},
        environment={**ENVIRONMENT, "PYTHONPATH": path, **(environment or {})},
        timeout_s=600,
        python=sglang_python(),
    )


@pytest.fixture
def start(tmp_path: Path) -> StartServer:
    """`start(model, **options)`: a server whose files lie in this test's temporary folder; use it in a `with`."""

    def call(model: Path, **options: Any) -> SGLangServer:
        if "mla" in model.name:
            options["options"] = (*options.get("options", ()), *MLA_OPTIONS)
        return SGLangServer(model, tmp_path, **options)

    return call


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A random Llama: K and V pages."""
    return models.tiny_llama()


@pytest.fixture(scope="session")
def tiny_mla() -> Path:
    """A random DeepSeek: one latent page."""
    return models.tiny_mla()
