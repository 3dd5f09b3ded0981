"""The command line, `llm-runtime`: one file a command. Importing it loads no torch, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

import engine_control
from engine_control.commands import Commands
from llm_runtime.cli import generate, serve

app = typer.Typer(
    cls=Commands, name="llm-runtime", rich_markup_mode="markdown", no_args_is_help=True, add_completion=False
)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(engine_control.__version__)
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Language-model rollouts for RL: tokens, log-probs and weight versions, the same bits in any batch.

    Start with `llm-runtime generate "12+34="`: it needs no model, no GPU and no network.
    """


def main() -> None:
    """The entry point `llm-runtime`."""
    app()
