"""The demo's questions with the NVMe tier encoded: what a codec saves on the medium, and what it does to the answers.

    python -m examples.demo.codec [--codec d4] [--questions 5] [--dtype float32] [--json]

vLLM with kvtier keeps the document in an nvme tier twice, as it is and encoded. Then new processes answer
the questions from what lies there. Printed are both answers to every question, how far they agree, and the bytes. In
float32 what differs is the codec's doing; in bfloat16 this model's most likely tokens change with any rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo import encoded, prepare_model
from examples.demo.conversation import QUESTIONS
from kvtier.testing.prepared import cache_root
from kvtier.testing.scenario import run_scenario

CALIBRATION = Path(__file__).resolve().parents[1] / "calibrations" / "smollm2-135m-instruct.json"
_TABLE_WIDTH = 140


def compare(codec: str, questions: list[str], folder: Path, model: Path, dtype: str = "float32") -> dict[str, Any]:
    """Run everything. Returns what `--json` prints."""
    runs: dict[str, dict[str, Any]] = {}
    for name in ("raw", codec):
        kvtier: dict[str, Any] = {
            "dram_bytes": "256MiB",
            "nvme_path": str(folder / name),
            "nvme_bytes": "256MiB",
            "blocks_per_chunk": 2,
            "gate": False,
            "codecs": {"nvme": name},
            "calibration": str(CALIBRATION),
            "lossy_requests": "opt_out",
            "allow_slow_codecs": True,
        }
        same = {"model": str(model), "kvtier": kvtier, "dtype": dtype}
        (folder / name).mkdir()
        kept = run_scenario(encoded.keep, work_folder=folder, arguments=same)
        asked = run_scenario(encoded.answer, work_folder=folder, arguments=same | {"questions": questions})
        runs[name] = kept | asked
    rows = []
    for question, raw, coded in zip(questions, runs["raw"]["answers"], runs[codec]["answers"], strict=True):
        same = [a == b for a, b in zip(raw["tokens"], coded["tokens"], strict=False)]
        agree = len(same) if all(same) else same.index(False)
        rows.append(
            {
                "question": question,
                "raw": raw["text"],
                codec: coded["text"],
                "identical": raw["tokens"] == coded["tokens"],
                "agreeing_tokens": agree,
                "answer_tokens": len(raw["tokens"]),
                "tokens_by_source": coded["tokens_by_source"],
            }
        )
    raw_bytes, coded_bytes = runs["raw"]["bytes"], runs[codec]["bytes"]
    return {
        "model": model.name,
        "codec": codec,
        "raw_bytes": raw_bytes,
        "encoded_bytes": coded_bytes,
        "share": coded_bytes / raw_bytes,
        "share_of_bfloat16": coded_bytes / (raw_bytes / (2 if dtype == "float32" else 1)),
        "identical": sum(row["identical"] for row in rows),
        "answers": rows,
    }


def print_comparison(result: dict[str, Any], console: Console) -> None:
    """The table."""
    codec = result["codec"]
    table = Table("question", "answer from raw bytes", f"answer from {codec}", "first tokens that agree")
    for row in result["answers"]:
        table.add_row(row["question"], row["raw"], row[codec], f"{row['agreeing_tokens']} of {row['answer_tokens']}")
    console.print(table)
    console.print(
        f"{result['identical']} of {len(result['answers'])} answers are identical. Bytes on the nvme tier: "
        f"{result['raw_bytes']:,} raw, {result['encoded_bytes']:,} {codec}: {result['share']:.3f} of raw, "
        f"{result['share_of_bfloat16']:.3f} of raw bfloat16."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="d4", help="codec of the nvme tier (docs/codecs.md)")
    parser.add_argument("--questions", type=int, choices=range(1, len(QUESTIONS) + 1), default=len(QUESTIONS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args()
    root = cache_root() / "demo"
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        model = Path(run_scenario(prepare_model.prepare, work_folder=Path(folder)))
        result = compare(options.codec, list(QUESTIONS[: options.questions]), Path(folder), model, options.dtype)
    if options.json:
        print(json.dumps(result))
    else:
        print_comparison(result, Console(width=_TABLE_WIDTH))
    return 0


if __name__ == "__main__":
    sys.exit(main())
