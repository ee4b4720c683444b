"""The command `mmkit`, whose subcommands are in `commands.SUBCOMMANDS`.

Each subcommand is a function of the module of its name; `commands` is the command line.
"""

import gc


def main() -> None:
    """Run the command line.

    Python looks for no garbage while vLLM and transformers are imported, which keep all that they
    make: looking takes a tenth of that time. `collect_garbage` ends this.
    """
    gc.disable()
    try:
        _run_app()
    finally:
        # who calls this function in a longer program, as tests do, has garbage of its own
        gc.unfreeze()
        gc.enable()


def collect_garbage() -> None:
    """Let Python look for garbage from now on, but not among what is there already.

    A subcommand calls this when it has imported what it needs, before it runs requests.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _run_app() -> None:
    try:
        from .commands import app
    except ModuleNotFoundError as error:
        from ..errors import DISTRIBUTION, write_message

        remedy = f'Run pip install "{DISTRIBUTION}[cli]".'
        text = write_message("mmkit", "Typer and Rich beside it", str(error), remedy)
        raise SystemExit(text) from None
    app()
