"""What the command lines of the engines share: how an error is shown. The only file of this package that imports
typer."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from engine_control.errors import EngineError

FAILED = 2  # exit code of an error that has a message and a way out
INTERRUPTED = 130  # exit code, as shells have it


class Commands(TyperGroup):
    """The commands. An `EngineError` becomes its message and its way out on stderr, and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            show_error(error)
            raise typer.Exit(FAILED) from None


def show_error(error: EngineError) -> None:
    """Prints what is wrong, where, and what to do about it."""
    console = Console(stderr=True)
    message = Text.assemble(("error: ", "bold red"), error.message)
    if error.field is not None:
        message.append(f" ({error.field} = {error.value!r})", "dim")
    console.print(message, soft_wrap=True)
    if error.hint:
        console.print(Text.assemble(("what to do: ", "bold"), error.hint), soft_wrap=True)
