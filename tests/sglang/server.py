"""The real SGLang server on the CPU, as a child process: start, ask, read what it counted, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvtier.testing.scenario import end_process_group

REPOSITORY = Path(__file__).resolve().parents[2]
CPU_PLUGIN = Path(__file__).resolve().parent / "cpu"
ADMIN_KEY = "kvtier-tests"
ENVIRONMENT_CLOCK = "KVTIER_TEST_CLOCK"
"""Names a file that holds the seconds which the radix policy takes for the time (tests/sglang/cpu)."""
PAGE_TOKENS = 16
_START_S = 900.0
_REQUEST_S = 300.0
_METRIC = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$")
Value = TypeVar("Value")
_LABEL = re.compile(r'(\w+)="([^"]*)"')

# What makes SGLang run without a GPU and bearable on a CPU that other processes use too.
ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def sglang_python() -> Path | None:
    """The Python of the environment that has SGLang: `$KVTIER_SGLANG_PYTHON`, or `.venv-sglang` of this checkout."""
    found = Path(os.environ.get("KVTIER_SGLANG_PYTHON") or REPOSITORY / ".venv-sglang" / "bin" / "python")
    return found if found.exists() else None


class ServerError(AssertionError):
    """The server did not start, or died; the message ends with what it last printed."""


@dataclass(frozen=True)
class Streamed:
    """A streamed answer: its tokens, the time to the first of them, where the prompt came from."""

    output: list[int]
    ttft_s: float
    cached: dict[str, int]


class SGLangServer:
    """A running server. A context manager: leaving it ends the server and everything it started.

    `storage` is the value of `--hicache-storage-backend-extra-config`; None starts without a storage level.
    """

    def __init__(
        self,
        model: Path,
        work_folder: Path,
        *,
        layout: str = "page_first",
        backend: str = "dynamic",
        storage: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        device_tokens: int = 4096,
        host_ratio: float = 2.0,
    ) -> None:
        python = sglang_python()
        if python is None:
            raise ServerError("there is no environment with SGLang; make it with `make env-sglang`")
        self.port = _free_port()
        self.log_path = work_folder / f"sglang-{time.monotonic_ns()}.log"
        io = {"page_first": "kernel"}.get(layout, "direct")
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        command += ["--attention-backend", "torch_native", "--skip-server-warmup", "--mem-fraction-static", "0.3"]
        command += ["--max-total-tokens", str(device_tokens), "--page-size", str(PAGE_TOKENS)]
        command += ["--enable-hierarchical-cache", "--hicache-ratio", str(host_ratio), "--hicache-mem-layout", layout]
        command += ["--hicache-io-backend", io, "--hicache-write-policy", "write_through"]
        command += ["--enable-metrics", "--enable-cache-report", "--admin-api-key", ADMIN_KEY, *options]
        if storage is not None:
            command += ["--hicache-storage-backend", backend, "--hicache-storage-prefetch-policy", "wait_complete"]
            command += ["--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 16, **storage})]
        path = os.pathsep.join([str(CPU_PLUGIN), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(environment or {})},
                cwd=work_folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> SGLangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server. Idempotent."""
        end_process_group(self._child)

    def generate(self, tokens: Sequence[int], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        """Answer a prompt of token ids greedily with exactly `max_tokens` tokens; adds `seconds` by the wall clock."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True},
            **fields,
        }
        began_s = time.perf_counter()
        answer: dict[str, Any] = json.loads(self.request("POST", "/generate", body))
        answer["seconds"] = time.perf_counter() - began_s
        return answer

    def cached_tokens(self, tokens: Sequence[int], max_tokens: int = 8) -> dict[str, Any]:
        """Answer a prompt; say what was generated and where its prompt tokens came from."""
        answer = self.generate(tokens, max_tokens)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        found: dict[str, Any] = {name: int(details.get(name) or 0) for name in ("device", "host", "storage")}
        return {**found, "output": answer["output_ids"], "seconds": answer["seconds"]}

    def stream(self, tokens: Sequence[int], max_tokens: int) -> Streamed:
        """Answer a prompt of token ids greedily, token by token."""
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        }
        began_s, ttft_s, last = time.perf_counter(), 0.0, dict[str, Any]()
        with urllib.request.urlopen(self._exchange("POST", "/generate", body), timeout=_REQUEST_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    last = json.loads(line[len(b"data: ") :])
        details = last["meta_info"].get("cached_tokens_details") or {}
        cached = {name: int(details.get(name) or 0) for name in ("device", "host", "storage")}
        return Streamed(last["output_ids"], ttft_s, cached)

    def flush(self) -> None:
        """Drop what device and host memory hold; the storage level stays."""
        self.when_idle(lambda: self.request("POST", "/flush_cache"))

    def when_idle(self, call: Callable[[], str]) -> str:
        """Make a call that SGLang refuses while anything is still running, as soon as it is taken."""
        deadline_s = time.monotonic() + _REQUEST_S
        while True:
            try:
                return call()
            except urllib.error.HTTPError as error:
                if time.monotonic() > deadline_s:
                    raise ServerError(f"{error.url}: {error.read().decode()}\n{log_tail(self.log_path)}") from error
            time.sleep(0.2)

    def wait_for(self, get: Callable[[], Value], good: Callable[[Value], bool], timeout_s: float = _REQUEST_S) -> Value:
        """Call `get` until what it returns is `good`, and return that."""
        deadline_s = time.monotonic() + timeout_s
        while not good(value := get()):
            if time.monotonic() > deadline_s:
                raise ServerError(f"still {value}\n{log_tail(self.log_path)}")
            time.sleep(0.2)
        return value

    def metrics(self, prefix: str = "kvtier_") -> dict[str, float]:
        """Samples of /metrics whose name starts with `prefix`, as `name{label=value,...}` -> value."""
        found: dict[str, float] = {}
        for line in self.request("GET", "/metrics").splitlines():
            match = _METRIC.match(line)
            if match is None or not match[1].startswith(prefix):
                continue
            labels = {name: value for name, value in _LABEL.findall(match[2] or "") if name != "pid"}
            text = ",".join(f"{name}={labels[name]}" for name in sorted(labels))
            key = f"{match[1]}{{{text}}}"
            found[key] = found.get(key, 0.0) + float(match[3])
        return found

    def wait_stored(self, at_least: float, name: str = "kvtier_blocks_stored_total") -> dict[str, float]:
        """Wait until a counter, summed over its labels, reached `at_least`; returns all metrics."""
        return self.wait_for(
            self.metrics, lambda found: sum(v for key, v in found.items() if key.startswith(name)) >= at_least
        )

    def wait_counted(self, tokens: int, source: str) -> None:
        """Wait until kvtier says that it loaded at least so many tokens from a tier."""
        self.wait_stored(tokens, f"kvtier_tokens_total{{source={source}}}")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """One HTTP exchange; raises HTTPError for a status that is not 2xx, ServerError if the server is gone."""
        request = self._exchange(method, path, body)
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            if self._child.poll() is not None:
                raise ServerError(f"the server is gone: {error}\n{log_tail(self.log_path)}") from error
            raise

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> urllib.request.Request:
        return urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )

    def log(self) -> str:
        """Everything the server printed so far."""
        return self.log_path.read_text(errors="replace")

    def _wait_healthy(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._child.poll() is not None:
                raise ServerError(f"the server ended with status {self._child.returncode}\n{log_tail(self.log_path)}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.request("GET", "/health")
                return
            time.sleep(0.5)
        raise ServerError(f"the server was not ready within {_START_S:.0f} s\n{log_tail(self.log_path)}")


def log_tail(path: Path, lines: int = 60) -> str:
    """The end of a server's log, without the one line that lists all of its arguments."""
    text = path.read_text(errors="replace") if path.exists() else "(no log)"
    kept = [line for line in text.splitlines() if "server_args=" not in line]
    return "\n".join([f"--- end of {path} ---", *kept[-lines:]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
