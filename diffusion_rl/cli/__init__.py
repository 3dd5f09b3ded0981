"""The command line, `diffusion-rl`: one file a command. Importing it loads no torch, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

import diffusion_rl
from diffusion_rl.cli import demo, doctor, rollout, serve, verify
from engine_control.commands import Commands

app = typer.Typer(
    cls=Commands, name="diffusion-rl", rich_markup_mode="markdown", no_args_is_help=True, add_completion=False
)
app.command("serve")(serve.serve)
app.command("rollout")(rollout.rollout)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.add_typer(verify.app, name="verify")


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
