"""Raw prompts of agent runs (LMCache's agent trace) as a trace `kvtier replay` reads.

    python -m benchmarks.agent_text lmcache_agent_text_70sessions.tar.gz agent_text.jsonl

The archive has a folder for each benchmark that was run, and a file of `{timestamp µs, session_id, input, output}` for
each session. Four bytes of text count as a token: equal texts give equal blocks, cut elsewhere than by a tokenizer.
The runs were days apart; here all of them begin at once.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import PurePosixPath

BYTES_PER_TOKEN = 4
DECODE_TOKENS_PER_S = 50.0


def tokens_of(text: str) -> list[int]:
    """A number for each four bytes; equal texts give equal numbers."""
    data = text.encode()
    whole = len(data) // BYTES_PER_TOKEN * BYTES_PER_TOKEN
    return [int.from_bytes(data[n : n + BYTES_PER_TOKEN], "little") for n in range(0, whole, BYTES_PER_TOKEN)]


def convert(archive: str, target: str) -> int:
    """Write the trace, requests in order of arrival; returns how many there are."""
    runs: dict[str, list[tuple[float, str, dict[str, str]]]] = {}
    with tarfile.open(archive) as files:
        for member in sorted(files.getmembers(), key=lambda m: m.name):
            text = files.extractfile(member) if member.isfile() else None
            for line in text or ():
                told = json.loads(line)
                run = runs.setdefault(PurePosixPath(member.name).parent.name, [])
                run.append((told["timestamp"] / 1e6, member.name, told))
    rows = []
    for run in runs.values():
        begin_s = min(at_s for at_s, _, _ in run)
        rows += [(at_s - begin_s, name, told) for at_s, name, told in run]
    rows.sort(key=lambda row: row[:2])
    with open(target, "w") as out:
        for at_s, name, told in rows:
            output = len(told["output"].encode()) // BYTES_PER_TOKEN
            row = {"t": at_s, "session": name, "tokens": tokens_of(told["input"]), "output_length": output}
            out.write(json.dumps({**row, "service_s": output / DECODE_TOKENS_PER_S}) + "\n")
    return len(rows)


if __name__ == "__main__":
    print(convert(*sys.argv[1:3]), "requests")
