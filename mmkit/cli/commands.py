"""The command line: its subcommands, and how they refuse."""

from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import MmkitError
from .check import check
from .common import silence_logs
from .compare import compare
from .diff import diff
from .doctor import doctor
from .eject import eject
from .new import examples, new_command
from .outline import outline
from .show import show


class OneSentence(TyperGroup):
    """Subcommands that print nothing of other libraries; a refusal is one sentence and status 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand."""
        silence_logs()
        try:
            return super().invoke(ctx)
        except MmkitError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="mmkit",
    cls=OneSentence,
    help="Declare a modality once; look at it, check it, and see what it runs in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(show)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(check)
app.command()(outline)
app.command()(compare)
app.command()(diff)
app.command()(doctor)
app.command("new")(new_command)
app.command()(examples)
app.command()(eject)
