"""SGLang under the engine contract: the real server on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.contract.engine.harness import NVME_BYTES, Answer, hang_up
from tests.e2e.models import tiny_llama
from tests.sglang.conftest import kvtier_storage
from tests.sglang.server import PAGE_TOKENS, SGLangServer

ROWS_OF_A_PAGE = 2
# Requests are admitted by what they need now and not by what they may grow to: then the device's memory runs out.
_OPTIONS = ("--schedule-conservativeness", "0.05")


class SGLangUnderTest:
    """An `EngineUnderTest`. HiCache's own levels are flushed before each question, so that only kvtier can help."""

    block_tokens = PAGE_TOKENS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nvme_path = folder / "nvme"
        self._start()

    def answer(self, prompt: Sequence[int], *, tenant: str = "", adapter: str = "") -> Answer:
        self.flush()  # waits for what runs and drops what waits, so no earlier store is counted from here on
        self._rows_before = self._settled_rows()
        fields = {"cache_salt": tenant} if tenant else {}
        fields |= {"extra_key": adapter} if adapter else {}
        answer = self._server.generate(prompt, **fields)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        self._from_kvtier = int(details.get("storage") or 0)
        return Answer(answer["output_ids"], self._from_kvtier)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        # Not `ignore_eos`: of such requests SGLang knows how long they get, reserves it all, and never preempts.
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens}
        return list(self._server.generate(prompt, sampling_params=sampling)["output_ids"])

    def abandon(self, prompt: Sequence[int], max_tokens: int, after_s: float) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        hang_up(self._server.port, "/generate", body, after_s)

    def flush(self) -> None:
        self._server.flush()

    def wait_stored(self, prompt: Sequence[int]) -> None:
        pages = len(prompt) // PAGE_TOKENS - self._from_kvtier // PAGE_TOKENS
        self._server.wait_stored(self._rows_before + ROWS_OF_A_PAGE * pages)

    def counters(self) -> dict[str, float]:
        return self._server.metrics()

    def preemptions(self) -> float:
        return sum(self._server.metrics("sglang:num_retracted_requests_total").values())

    def restart(self, shared_fs_path: Path | None = None) -> None:
        self._server.stop()
        self._start(shared_fs_path)

    def clear(self) -> None:
        self._server.request("POST", "/hicache/storage-backend/clear")

    def stop(self) -> None:
        self._server.stop()

    def _start(self, shared_fs_path: Path | None = None) -> None:
        more = {"shared_fs_path": str(shared_fs_path), "shared_fs_bytes": "64MiB"} if shared_fs_path else {}
        storage = kvtier_storage(self.nvme_path, **{"nvme_bytes": NVME_BYTES, "gate": False, **more})
        self._server = SGLangServer(tiny_llama(), self._folder, storage=storage, options=_OPTIONS)

    def _settled_rows(self) -> float:
        """Rows stored so far, once the server has exported all it counted (twice a second)."""
        rows = -1.0
        while True:
            found = self._server.metrics()
            now = sum(value for key, value in found.items() if key.startswith("kvtier_blocks_stored_total"))
            if now == rows:
                return now
            rows = now
            time.sleep(0.8)
