"""The command line: its subcommands, and how they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from ..errors import MmkitError


class Subcommand(NamedTuple):
    """A subcommand, whose module is imported when it runs: most modules import PyTorch.

    Attributes:
        function: its function, as module:name.
        summary: the first sentence of the docstring of the function, for the list of subcommands.
        passes_options: whether the function gets options that it does not declare.
    """

    function: str
    summary: str
    passes_options: bool = False


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "show": Subcommand(
        "show:show", "Show a spec, its values for a checkpoint, and what becomes of a prompt."
    ),
    "check": Subcommand(
        "check:check",
        "Bind a spec to a checkpoint and check the laws, each as a test.",
        passes_options=True,
    ),
    "outline": Subcommand(
        "outline:outline",
        "Show what follows of a request from the sizes of its items: ids, ranges, rows and hashes.",
    ),
    "compare": Subcommand(
        "compare:compare",
        "Compare a spec with the processor of a model class.",
    ),
    "diff": Subcommand(
        "diff:diff", "Compare two specs or documents of specs. Exit status 1 if they differ."
    ),
    "doctor": Subcommand(
        "doctor:doctor",
        "Examine this environment and say what to mend. Exit status 1 if there is something.",
    ),
    "new": Subcommand("new:new_command", "Write a package for a model with modalities of its own."),
    "examples": Subcommand(
        "new:examples", "Copy the examples, with their checkpoints, into a folder `examples`."
    ),
    "eject": Subcommand("eject:eject", "Copy mmkit into a package, so that it needs no mmkit."),
}


class LazyGroup(TyperGroup):
    """Imports the module of a subcommand when it runs.

    A subcommand prints nothing of other libraries, and refuses in one sentence, with status 2.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all subcommands."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand as the list of them shows it: its module is not imported."""
        if cmd_name not in SUBCOMMANDS:
            return None
        return TyperCommand(cmd_name, help=SUBCOMMANDS[cmd_name].summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Return the name and the subcommand that runs, and its arguments."""
        name, command, arguments = super().resolve_command(ctx, args)
        if name is not None and name in SUBCOMMANDS:
            command = load_subcommand(name)
        return name, command, arguments

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand."""
        from .common import silence_logs

        silence_logs()
        try:
            return super().invoke(ctx)
        except MmkitError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


def load_subcommand(name: str) -> Any:
    """Return a subcommand that can run."""
    subcommand = SUBCOMMANDS[name]
    module, _, function = subcommand.function.partition(":")
    settings = {}
    if subcommand.passes_options:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    register = single.command(name, context_settings=settings)
    register(getattr(import_module(f".{module}", __package__), function))
    return typer.main.get_command(single)


app = typer.Typer(
    name="mmkit",
    cls=LazyGroup,
    help="Declare a modality once; look at it, check it, and see what it runs in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(is_asked: bool) -> None:
    """Print the version of mmkit and end, if it is asked for."""
    if is_asked:
        typer.echo(f"mmkit {__version__}")
        raise typer.Exit


@app.callback()
def handle_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """Read the options that stand before a subcommand."""
