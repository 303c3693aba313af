"""vLLM in this process, asked one question at a time. vLLM is imported when an engine is made, in a child process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from prometheus_client import REGISTRY

from examples.demo.conversation import unrelated_prompt
from examples.demo.report import Answer

BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 4_096
_SOURCES = {"device": "hbm", "host": "dram", "disk": "nvme"}  # vLLM's names -> kvtier's


class DemoEngine:
    """An engine, with kvtier if `kvtier` configures it. A context manager: leaving it lets stores finish."""

    def __init__(
        self, model: str, *, kvtier: dict[str, Any] | None, prefix_caching: bool, dtype: str = "float32"
    ) -> None:
        from vllm import LLM

        transfer = {"kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": kvtier}
        self._llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_MODEL_TOKENS,
            max_num_batched_tokens=MAX_MODEL_TOKENS,
            enable_prefix_caching=prefix_caching,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=transfer if kvtier is not None else None,
        )
        self.tokenizer = self._llm.get_tokenizer()

    def __enter__(self) -> DemoEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def warm_up(self, prompt_tokens: int) -> None:
        """Let first-use costs of this process be paid by a prompt no process has asked before."""
        self.ask(unrelated_prompt(self.tokenizer, prompt_tokens, seed=os.getpid()), max_tokens=2)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Answer one prompt greedily."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        before = self._cached_tokens()
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        [output] = self._llm.generate([TokensPrompt(prompt_token_ids=list(prompt))], parameters, use_tqdm=False)
        after = self._cached_tokens()
        by_source = {name: after[name] - before[name] for name in after}
        by_source["recompute"] = len(prompt) - sum(by_source.values())
        completion = output.outputs[0]
        assert output.metrics is not None  # kept because of disable_log_stats=False
        ttft_s = output.metrics.first_token_latency
        return Answer(list(completion.token_ids), completion.text.strip(), ttft_s, len(prompt), by_source)

    def forget_device_cache(self) -> None:
        """Drop every block from the device; what kvtier holds below stays."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache: blocks are still in use")

    def bytes_kept(self) -> int:
        """Bytes of rows kvtier has written to its nvme tier, as they lie there, once everything has arrived."""
        core = self._llm.llm_engine.engine_core.engine_core
        cache = core.scheduler.connector.manager.cache
        while core.scheduler.has_requests() or cache.busy:
            self._llm.llm_engine.step()
            cache.mover.drain(5.0)
            cache.poll()
        [stats] = [level.tier.stats() for level in cache.lower if level.name == "nvme"]
        return stats.codec.encoded_written_bytes if stats.codec is not None else stats.written_bytes

    def bytes_loaded(self) -> dict[str, int]:
        """Bytes kvtier has read so far, by tier."""
        return {
            labels["tier"]: int(value)
            for labels, value in _samples("kvtier_bytes_total")
            if labels["direction"] == "read"
        }

    def _cached_tokens(self) -> dict[str, int]:
        counts = dict.fromkeys(_SOURCES.values(), 0)
        for labels, value in _samples("vllm:prompt_tokens_cached_by_source_total"):
            if labels["source"] in _SOURCES:
                counts[_SOURCES[labels["source"]]] += int(value)
        return counts


def _samples(name: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    ]
