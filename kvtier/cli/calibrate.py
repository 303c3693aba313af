"""`kvtier calibrate MODEL`: measure what the lossy codecs need to know about a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face model (config.json, *.safetensors).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default in kvtier's cache, by fingerprint.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text to measure on; may be repeated. By default three that are at hand.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(help="Sources of the bits map, comma-separated: loo (leave-one-out KL), local (one pass), ema."),
    ] = "loo,local",
) -> None:
    """Measure sensitivities, mean keys, symbol frequencies and the cost of every preset; store them for this model.

    A preset whose cost exceeds its budget is refused later, with the number; it is printed here as well.
    """
    from kvtier.cli.progress import StepProgress
    from kvtier.codec.calibration import calibration_path
    from kvtier.codec.registry import MAX_CALIBRATION_KL
    from kvtier.errors import ConfigError
    from kvtier.reference.calibrate import calibrate as measure
    from kvtier.reference.calibrate import default_texts
    from kvtier.reference.prefix_model import PrefixModel
    from kvtier.reference.texts import read_texts

    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file in it")
    loaded = PrefixModel(model)
    texts = [content for _, content in read_texts(text)] if text else default_texts()
    with StepProgress() as progress:
        found = measure(loaded, texts, [part.strip() for part in method.split(",") if part.strip()], progress)
    path = output if output is not None else calibration_path(found.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    typer.echo(f"{'preset':12s} {'bits':>6s} {'KL':>10s}  budget")
    for name, gate in found.gates.items():
        bound = MAX_CALIBRATION_KL.get(name.split("-")[0])
        verdict = "" if bound is None else f"{bound:.0e}  {'ok' if gate.kl_mean <= bound else 'REFUSED'}"
        typer.echo(f"{name:12s} {gate.bits_per_element:6.3f} {gate.kl_mean:10.2e}  {verdict}")
    typer.echo(f"written: {path}")
