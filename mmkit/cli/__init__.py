"""The command `mmkit`, whose subcommands are in `commands.SUBCOMMANDS`.

Each subcommand is a function of the module of its name; `commands` is the command line.
"""


def main() -> None:
    """Run the command line."""
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        from ..errors import DISTRIBUTION, write_message

        remedy = f'Run pip install "{DISTRIBUTION}[cli]".'
        text = write_message("mmkit", "Typer and Rich beside it", str(error), remedy)
        raise SystemExit(text) from None
    app()
