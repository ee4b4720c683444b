"""The command `mmkit`, whose subcommands are in `commands.SUBCOMMANDS`.

Each subcommand is a function of the module of its name; `commands` is the command line.
"""

import gc

OBJECTS_BEFORE_COLLECTION = 100_000
"""New objects after which Python looks for garbage. After each 700, as by default, takes a fifth of
the time in which vLLM and transformers are imported: all that they make is kept."""


def main() -> None:
    """Run the command line."""
    thresholds = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    try:
        _run_app()
    finally:
        # who calls this function in a longer program, as tests do, keeps its own
        gc.set_threshold(*thresholds)


def _run_app() -> None:
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        from ..errors import DISTRIBUTION, write_message

        remedy = f'Run pip install "{DISTRIBUTION}[cli]".'
        text = write_message("mmkit", "Typer and Rich beside it", str(error), remedy)
        raise SystemExit(text) from None
    app()
