"""kvtier beside SGLang's own `file` backend, one server: TTFT of a storage hit, bytes written, a flipped bit.

A prompt is also asked for after it was announced: sent with `max_new_tokens` 0, so that SGLang brings it up beforehand.

    python -m benchmarks.sglang [--json] [--rounds 5]      (after `make env-sglang`)

The two are attached in turn through the server's admin endpoint, in alternating order, and asked for prompts of the
same length, so that whatever else the machine does falls on both. A tiny random Llama, float32, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.rig.settings import end_in_order
from kvtier.testing.prepared import cache_root
from tests.e2e.models import prompt_tokens, tiny_llama
from tests.sglang.backends import BACKENDS, Backend
from tests.sglang.server import PAGE_TOKENS, ServerError, SGLangServer, sglang_python

_PROMPT_TOKENS = 3_003
_WHOLE = _PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
_ANSWER_TOKENS = 8
_STORED_PAGES = (_PROMPT_TOKENS + _ANSWER_TOKENS - 1) // PAGE_TOKENS  # of the last token no state exists
_ASKED_PER_ROUND = 3


def measure(folder: Path, rounds: int, console: Console) -> dict[str, dict[str, Any]]:
    """Both backends, by name. Raises ServerError."""
    console.print("benchmark: starting SGLang")
    with SGLangServer(tiny_llama(), folder) as server:
        prompts = {name: prompt_tokens(seed, _PROMPT_TOKENS) for seed, name in enumerate(BACKENDS, start=40)}
        server.stream(prompt_tokens(1, _PROMPT_TOKENS), 1)  # first touches
        backends = {name: Backend(server, name, folder / name) for name in BACKENDS}
        found: dict[str, dict[str, Any]] = {
            name: {"storage_hit_ttft_s": [], "announced_ttft_s": []} for name in BACKENDS
        }
        for name, backend in backends.items():
            with backend:
                server.flush()
                cold = server.stream(prompts[name], _ANSWER_TOKENS)
                found[name] |= {"cold_ttft_s": cold.ttft_s, "truth": cold.output}
                found[name]["bytes_written"] = backend.wait_written(_STORED_PAGES)
        for number in range(rounds):
            console.print(f"benchmark: round {number + 1} of {rounds}")
            for name in BACKENDS if number % 2 else BACKENDS[::-1]:
                with backends[name]:
                    for _ in range(_ASKED_PER_ROUND):
                        server.flush()
                        hit = server.stream(prompts[name], _ANSWER_TOKENS)
                        if hit.cached["storage"] != _WHOLE or hit.output != found[name]["truth"]:
                            raise ServerError(f"{name}: {hit.cached} of {_WHOLE} tokens came from storage")
                        found[name]["storage_hit_ttft_s"].append(hit.ttft_s)
                    server.flush()
                    server.generate(prompts[name], 0)
                    announced = server.stream(prompts[name], _ANSWER_TOKENS)
                    if announced.cached["device"] != _WHOLE or announced.output != found[name]["truth"]:
                        raise ServerError(f"{name}: {announced.cached} of {_WHOLE} announced tokens were on the device")
                    found[name]["announced_ttft_s"].append(announced.ttft_s)
        for name, backend in backends.items():
            with backend:
                backend.flip_a_bit(page=20)
                server.flush()
                damaged = server.stream(prompts[name], _ANSWER_TOKENS)
                found[name]["after_a_flipped_bit"] = {
                    "tokens_from_storage": damaged.cached["storage"],
                    "output_is_right": damaged.output == found[name].pop("truth"),
                }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--rounds", type=int, default=5, help="times each backend is attached and measured (default 5)")
    options = parser.parse_args()
    end_in_order()
    if sglang_python() is None:
        print("skipped: there is no environment with SGLang; make it with `make env-sglang`")
        return 0
    root = cache_root() / "benchmarks"  # on a disk: /tmp may be memory
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            found = measure(Path(folder), options.rounds, Console(stderr=True))
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"prompt_tokens": _PROMPT_TOKENS, "backends": found}))
        return 0
    print(f"prompts of {_PROMPT_TOKENS:,} tokens, {_WHOLE:,} of them from storage")
    for name, values in found.items():
        times, damaged = values["storage_hit_ttft_s"], values["after_a_flipped_bit"]
        print(
            f"{name:7} cold {values['cold_ttft_s'] * 1e3:.0f} ms; storage hit {median(times) * 1e3:.0f} ms (median), "
            f"{min(times) * 1e3:.0f} ms (least of {len(times)}); announced before "
            f"{median(values['announced_ttft_s']) * 1e3:.0f} ms; wrote {values['bytes_written']:,} bytes"
        )
        right = "right" if damaged["output_is_right"] else "WRONG"
        print(f"        after a flipped bit: {damaged['tokens_from_storage']:,} tokens from storage, output {right}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
