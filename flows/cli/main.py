"""`grpo`: the command line. Heavy packages are imported by the command that needs them, never for `--help`."""

import os
import sys
from typing import Annotated

import typer

from flows.cli.cluster import down, head, join, up, worker
from flows.cli.compare import compare
from flows.cli.deploy import deploy, serve
from flows.cli.doctor import doctor
from flows.cli.housekeeping import gc, verify
from flows.cli.inspect import rollouts, show
from flows.cli.rerun import debug, rerun
from flows.cli.rescore import rescore
from flows.cli.retrain import models, retrain, rollback, watch
from flows.cli.score import score
from flows.cli.status import status
from flows.cli.sweep import sweep
from flows.cli.training import evaluate, export, resume, run, warm_start
from grpo_lib.errors import GrpoError
from grpo_lib.progress import Notes, show_progress_on

INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="RL post-training of language models (GRPO and its family) as a durable, rerunnable workflow.\n\n"
    "Start with `grpo run deployments/configs/demo.yaml`; every stage of every iteration is kept.",
    epilog="A wrong setting, missing file, damaged data or unreachable service ends with code 2; a failed run with 1.",
)


def version(value: bool) -> None:
    if value:
        from importlib.metadata import version as installed

        typer.echo(f"grpo-pipeline {installed('grpo-pipeline')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


app.command()(run)
app.command()(resume)
app.command()(show)
app.command()(rollouts)
app.command()(compare)
app.command()(evaluate)
app.command("warm-start")(warm_start)
app.command()(export)
app.command()(sweep)
app.command()(rerun)
app.command()(rescore)
app.command()(score)
app.command()(debug)
app.command()(deploy)
app.command()(retrain)
app.command()(rollback)
app.command()(models)
app.command()(watch)
app.command()(serve)
app.command()(up)
app.command()(down)
app.command()(worker)
app.command()(head)
app.command()(join)
app.command()(status)
app.command()(verify)
app.command()(gc)
app.command()(doctor)


def main() -> None:
    """Entry point: errors of this package become one message and an exit code, never a traceback."""
    show_progress_on(Notes())
    try:
        code = app(standalone_mode=False)
    except GrpoError as error:
        _fail(str(error), error.exit_code)
    except typer.Abort:
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # a wrong argument; the base class differs between versions of typer
            raise
        _fail(f"{error.format_message().rstrip('.')}; see --help", 2)
    if code == INTERRUPTED:
        _fail("interrupted; what was committed is kept: `grpo resume` goes on from there", INTERRUPTED)
    sys.exit(code)


def _fail(message: str, code: int) -> None:
    from rich.console import Console

    sys.stdout.flush()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/]", end=" ")
    console.print(message, markup=False)
    sys.stderr.flush()
    # Threads of an interrupted run may still wait for their futures.
    os._exit(code)


if __name__ == "__main__":
    main()
