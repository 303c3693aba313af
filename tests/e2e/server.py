"""`vllm serve` as an operator starts it: a real server with its processes, asked over HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.testing.scenario import ScenarioError, end_process_group, engine_environment, log_tail
from tests.e2e.engine import BLOCK_TOKENS, CONNECTOR_NAME

START_TIMEOUT_S = 420.0
REQUEST_TIMEOUT_S = 120.0
_POLL_S = 0.5


class Server:
    """A running server's HTTP interface."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._base = f"http://127.0.0.1:{port}"
        self.engine_id = f"kvtier-test-{port}-{time.time_ns()}"
        """Part of the names of the shared memory the engine makes."""

    def complete(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """Answer a token prompt greedily over the OpenAI API and return the whole response."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        response: dict[str, Any] = json.loads(self._send("/v1/completions", {**body, **fields}))
        return response

    def reset_device_cache(self, *, and_kvtier: bool = False) -> bool:
        """Drop the device's blocks; kvtier's tiers keep theirs unless they are to forget, too. False if some blocks
        were in use, and stay. A route of vLLM's development mode."""
        answer = self._send(f"/reset_prefix_cache?reset_external={str(and_kvtier).lower()}", {})
        return bool(json.loads(answer)["success"])

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the samples of /metrics whose name starts with `prefix`, as `name{labels}` -> value."""
        found: dict[str, float] = {}
        for line in self._send("/metrics").splitlines():
            if line.startswith(prefix):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def is_healthy(self) -> bool:
        """Tell whether the server answers its health check."""
        try:
            self._send("/health")
        except OSError:
            return False
        return True

    def _send(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} answered {error.code}: {error.read().decode()}") from error


@contextmanager
def vllm_server(model: str, kvtier: dict[str, Any], work_folder: Path, *options: str) -> Iterator[Server]:
    """Start `vllm serve` with kvtier, wait until it is healthy, and end it with all its processes afterwards.

    The plug-in is found by its entry point, in every process. Raises ScenarioError with the log's tail if the server
    does not come up. `options` are further command-line arguments.
    """
    port = _free_port()
    server = Server(port)
    transfer = {
        "engine_id": server.engine_id,
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": kvtier,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer), *options]
    environment = engine_environment({"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    log_path = work_folder / f"serve-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=work_folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not server.is_healthy():
                if process.poll() is not None:
                    raise ScenarioError(f"vllm serve ended with status {process.returncode}\n{log_tail(log_path)}")
                if time.monotonic() > deadline_s:
                    raise ScenarioError(f"vllm serve is not up after {START_TIMEOUT_S:.0f} s\n{log_tail(log_path)}")
                time.sleep(_POLL_S)
            yield server
        finally:
            end_process_group(process, grace_s=20.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
