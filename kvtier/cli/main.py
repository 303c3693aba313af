"""Entry point of the `kvtier` command. Each subcommand lives in its own file and is imported only when run."""

from __future__ import annotations

import sys

import typer

from kvtier import __version__
from kvtier.cli import bench, config
from kvtier.cli.analyze import analyze
from kvtier.cli.calibrate import calibrate
from kvtier.cli.clear import clear
from kvtier.cli.doctor import doctor
from kvtier.cli.eval_codec import eval_app
from kvtier.cli.hint import hint
from kvtier.cli.replay import replay
from kvtier.cli.size import size
from kvtier.errors import KVTierError

app = typer.Typer(
    name="kvtier",
    help="Predictive, multi-tier KV cache for LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print kvtier's version."""
    typer.echo(__version__)


app.command()(replay)
app.command()(analyze)
app.command()(size)
app.command()(calibrate)
app.command()(doctor)
app.command()(clear)
app.command()(hint)
app.add_typer(eval_app, name="eval")
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")


# What typer raises for options and arguments; it has had more than one home, this is its public descendant's parent.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line; every wrong input becomes one line on stderr and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except KVTierError as error:
        said = str(error)
    except _UsageError as error:
        said = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        if not said:  # a command without arguments has shown its help
            sys.exit(2)
        said += f" See `{getattr(getattr(error, 'ctx', None), 'command_path', 'kvtier')} --help`."
    except typer.Abort:
        typer.echo("kvtier: aborted", err=True)
        sys.exit(1)
    typer.echo(f"kvtier: {said}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
