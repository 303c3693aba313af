"""What was measured, as a hardware file for `kvtier replay --hardware FILE`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvtier.bench.turns import Line
from kvtier.errors import ConfigError

# What this benchmark cannot measure: the model and the GPUs.
_ASSUMED = """block_bytes = 167_772_160  # of 512 tokens, all layers: Llama-3-70B in 16 bits
block_tokens = 512
gpus = 8

[compute]  # assumed: a benchmark of tiers does not see the GPUs
prefill_tokens_per_s = 20_000
decode_tokens_per_s = 50
attention_tokens = 0
layers = 80
max_running = 256
"""
_TIERS = """[tiers]  # sizes: --tiers overrides them
hbm = "240GiB"
dram = "1TiB"
nvme = "8TiB"
"""


def hardware_file(lines: Sequence[Line], name: str) -> str:
    """TOML with the measured links, for a hardware point of this name. Host to device is what the dram tier reads:
    there is no GPU in this benchmark.

    Raises ConfigError if the lines of dram and nvme are not all there.
    """
    rates = {(line.tier, line.op): line.bytes_per_s for line in lines}
    links = (("h2d", "dram", "read"), ("d2h", "dram", "write"), ("nvme_read", "nvme", "read"))
    entries = []
    for link, tier, op in (*links, ("nvme_write", "nvme", "write")):
        if (tier, op) not in rates:
            raise ConfigError("a hardware file needs memory and nvme; add both to --only")
        entries.append(f"{link} = {{ bytes_per_s = {rates[tier, op]} }}")
    head = f'name = {json.dumps(name)}\ndescription = "links as kvtier bench tiers measured them; compute is assumed"\n'
    return f"{head}{_ASSUMED}\n[links]\n" + "\n".join(entries) + f"\n\n{_TIERS}"
