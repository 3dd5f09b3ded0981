"""The command line, `diffusion-rl`: one file a command. Importing it loads no torch, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import diffusion_rl
from diffusion_rl.cli import demo, doctor, rollout, serve, verify
from engine_control.errors import EngineError

FAILED = 2  # exit code of an error that has a message and a way out


class Commands(TyperGroup):
    """The commands. An `EngineError` becomes its message and its way out on stderr, and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            show_error(error)
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=Commands, name="diffusion-rl", rich_markup_mode="markdown", no_args_is_help=True, add_completion=False
)
app.command("serve")(serve.serve)
app.command("rollout")(rollout.rollout)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(verify.app, name="verify")


def show_error(error: EngineError) -> None:
    """Prints what is wrong, where, and what to do about it."""
    console = Console(stderr=True)
    message = Text.assemble(("error: ", "bold red"), error.message)
    if error.field is not None:
        message.append(f" ({error.field} = {error.value!r})", "dim")
    console.print(message, soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("what to do: ", "bold"), error.hint), soft_wrap=True)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(diffusion_rl.__version__)
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Diffusion rollouts for RL post-training: images, per-step log-probs and trajectories, the same bits in any batch.

    Start with `diffusion-rl demo`: it needs no model, no GPU and no network.
    """


def main() -> None:
    """The entry point `diffusion-rl`."""
    app()
