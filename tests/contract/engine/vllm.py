"""vLLM under the engine contract: `vllm serve` on the CPU, with two LoRA adapters beside the model."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.contract.engine.harness import NVME_BYTES, Answer, hang_up
from tests.e2e.engine import BLOCK_TOKENS
from tests.e2e.models import tiny_llama
from tests.e2e.server import vllm_server

_DEVICE_BLOCKS = 128
_LORA_RANK = 8
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})?$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_PATIENCE_S = 60.0


class VLLMUnderTest:
    """An `EngineUnderTest`. Before each question the device's cache is reset and what kvtier's memory tier holds of
    earlier sessions is demoted by a hint, so that only the durable tier can help."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nvme_path = folder / "nvme"
        self.nvme_path.mkdir()
        self._adapters = {name: _make_adapter(folder / name, seed) for seed, name in enumerate(("b", "c"))}
        self._control_port = _free_port()
        self._start()

    def answer(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> Answer:
        self.flush()
        self._rows_before = self._rows()
        fields: dict[str, Any] = {"cache_salt": tenant} if tenant else {}
        fields |= {"model": adapter} if adapter else {}
        response = self._complete(prompt, 8, **fields)
        self._from_kvtier = int(response["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
        return Answer(list(response["choices"][0]["token_ids"]), self._from_kvtier)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return list(self._complete(prompt, max_tokens)["choices"][0]["token_ids"])

    def abandon(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        body |= {"ignore_eos": True, "session_id": self._session(prompt)}
        hang_up(self._server.port, "/v1/completions", body, after_s)

    def flush(self) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not (self._server.reset_device_cache() and self._is_idle()):
            assert time.monotonic() < deadline_s, "the device's blocks are still in use"
            time.sleep(0.05)
        if self._sessions:
            self._control("/v1/hints", [{"session": session, "demote": True} for session in sorted(self._sessions)])
            self._sessions.clear()

    def wait_stored(self, prompt: Sequence[int]) -> None:
        expected = self._rows_before + (len(prompt) - self._from_kvtier) // BLOCK_TOKENS
        deadline_s = time.monotonic() + _PATIENCE_S
        while (rows := self._rows()) < expected:
            assert time.monotonic() < deadline_s, f"{rows} rows are stored, and {expected} should be"
            time.sleep(0.1)

    def counters(self) -> dict[str, float]:
        # vLLM hands counters on when a step runs, and gauges once a second: a short prompt brings both.
        time.sleep(1.1)
        self._server.complete([1, 2, 3], max_tokens=2)
        return self._metrics("kvtier_")

    def preemptions(self) -> float:
        return sum(self._metrics("vllm:num_preemptions_total").values())

    def restart(self, shared_fs_path: Path | None = None) -> None:
        self._stack.close()
        self._start(shared_fs_path)

    def clear(self) -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self._server.reset_device_cache(and_kvtier=True):
            assert time.monotonic() < deadline_s, "the device's blocks are still in use"
            time.sleep(0.05)

    def stop(self) -> None:
        self._stack.close()

    def _start(self, shared_fs_path: Path | None = None) -> None:
        kvtier: dict[str, Any] = {"dram_bytes": "16MiB", "nvme_path": str(self.nvme_path), "nvme_bytes": NVME_BYTES}
        kvtier |= {"gate": False, "control": f"127.0.0.1:{self._control_port}"}
        if shared_fs_path is not None:
            kvtier |= {"shared_fs_path": str(shared_fs_path), "shared_fs_bytes": "64MiB"}
        modules = [f"{name}={path}" for name, path in self._adapters.items()]
        options = ["--enable-lora", "--max-lora-rank", str(_LORA_RANK), "--max-loras", "2", "--lora-modules", *modules]
        options += ["--num-gpu-blocks-override", str(_DEVICE_BLOCKS)]
        self._sessions: set[str] = set()
        self._stack = ExitStack()
        self._server = self._stack.enter_context(vllm_server(str(tiny_llama()), kvtier, self._folder, *options))

    def _complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        session = self._session(prompt, fields.get("cache_salt", ""), fields.get("model", ""))
        return self._server.complete(list(prompt), max_tokens, session_id=session, return_token_ids=True, **fields)

    def _session(self, prompt: Sequence[int], *whose: str) -> str:
        """The name under which what a request leaves in memory can be demoted."""
        session = hashlib.sha256(json.dumps([list(prompt), *whose]).encode()).hexdigest()
        self._sessions.add(session)
        return session

    def _is_idle(self) -> bool:
        """Nothing is promised, and nothing is being written down: then all that memory holds may leave it."""
        state = self._control("/v1/state")
        return not state["leases"] and not any(tier["pinned_rows"] for tier in state["tiers"])

    def _rows(self) -> int:
        return next(int(tier["rows"]) for tier in self._control("/v1/state")["tiers"] if tier["name"] == "nvme")

    def _metrics(self, prefix: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in self._server.metrics(prefix).items():
            sample = _SAMPLE.match(name.replace(":", "_"))
            assert sample is not None
            labels = sorted(pair for pair in _LABEL.findall(sample[2] or "") if pair[0] not in ("engine", "model_name"))
            found[f"{sample[1]}{{{','.join(f'{label}={text}' for label, text in labels)}}}"] = value
        return found

    def _control(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._control_port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:
            return json.loads(response.read())


def _make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of the tiny Llama's queries, large enough to change what it says."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    shape = json.loads((tiny_llama() / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    queries = heads * (shape.get("head_dim") or hidden // heads)
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(_LORA_RANK, hidden, generator=draw)
        tensors[f"{name}.lora_B.weight"] = torch.randn(queries, _LORA_RANK, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _LORA_RANK, "lora_alpha": _LORA_RANK, "target_modules": ["q_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(tiny_llama())}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
