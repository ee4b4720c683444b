"""The command `mmkit`: ``mmkit show | check | compare | doctor | new | examples | eject``.

Each subcommand is a function of the module of its name, to be called from Python as well;
`commands` is the command line.
"""

from typing import Any

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    try:
        run = app()
    except ModuleNotFoundError as error:
        from ..errors import DISTRIBUTION, sentence

        remedy = f'Run pip install "{DISTRIBUTION}[cli]".'
        text = sentence("mmkit", "Typer and Rich beside it", str(error), remedy)
        raise SystemExit(text) from None
    run()


def app() -> Any:
    """The command line, a Typer application."""
    from .commands import app

    return app
