"""The command line: a function per subcommand, which imports what it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from ..errors import MmkitError
from ..model_spec import ModelSpec
from ..plugin import named
from .common import quiet
from .new import KINDS


class OneSentence(TyperGroup):
    """Subcommands whose output is mmkit's alone; a refusal is one sentence and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        quiet()
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

Spec = Annotated[
    str, Argument(metavar="SPEC", help="A spec, as package.module:SPEC.", show_default=False)
]
Config = Annotated[Path, Option(metavar="DIR", help="Folder of a checkpoint; it needs no weights.")]
Svg = Annotated[str | None, Option(metavar="FILE", help="Write a picture.")]
Items = Annotated[list[str] | None, Option(metavar="MODALITY=FORM", help="As image=640x480.")]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run code that the checkpoint brings.")]
Known = Annotated[list[str] | None, Option(metavar="REGEX", help="Pass over what says this.")]
Requests = Annotated[Path | None, Option(metavar="FILE", help="Further ones, JSON, one per line.")]
Into = Annotated[Path, Option(metavar="DIR", help="Where the package's folder goes.")]
Kind = Annotated[str | None, Option(help=f"Of the items: {', '.join(KINDS)}. By default by name.")]
Samples = Annotated[str | None, Option(metavar="FUNCTION", help="Gives strategies for items.")]
Violations = Annotated[Path | None, Option(metavar="FILE", help="Known ones, as TOML.")]
Pretrained = Annotated[Path | None, Option(metavar="DIR", help="A language model; else a Llama.")]


@app.command()
def show(
    spec: Spec,
    config: Config | None = None,
    prompt: Annotated[str | None, Option(help='A text, or token ids as "1,2,3".')] = None,
    item: Items = None,
    svg: Svg = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show a spec, its values for a checkpoint, and what becomes of a prompt. An item is zeros,
    sizes, JSON or a file."""
    from .show import run

    request: dict[str, Any] = {"prompt": prompt, "items": item or (), "svg": svg}
    run(named(spec, ModelSpec), config, trust_remote_code=trust_remote_code, **request)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    rest: typer.Context,
    spec: Spec,
    config: Config,
    examples: Annotated[int | None, Option(min=1, help="Hypothesis examples per law.")] = None,
    samples: Samples = None,
    expected: Violations = None,
    trust_remote_code: Trust = False,
) -> None:
    """Bind a spec to a checkpoint and check the laws that need no engine, each as a test. The spec
    may be `registered`: what vLLM has. Further options are pytest's: -k cache, -n 4, --lf."""
    from .check import run

    given: dict[str, Any] = {"examples": examples, "samples": samples, "expected": expected}
    given["trust_remote_code"] = trust_remote_code
    raise typer.Exit(run(spec, config, rest.args, **given))


@app.command()
def compare(
    spec: Spec,
    config: Config,
    model_class: Annotated[str, Option("--class", help="A model class, as package.module:Class.")],
    requests: Requests = None,
    examples: Annotated[int, Option(min=0, help="Drawn requests, each as ids and text.")] = 100,
    known: Known = None,
    trust_remote_code: Trust = False,
) -> None:
    """Compare a spec with the processor of a model class. Exit status 1 if they differ."""
    from .compare import run

    options: dict[str, Any] = {"requests": requests, "examples": examples, "known": known or ()}
    options["trust_remote_code"] = trust_remote_code
    raise typer.Exit(run(named(spec, ModelSpec), config, model_class, **options))


@app.command()
def doctor() -> None:
    """Examine this environment and say what to mend. Exit status 1 if there is something."""
    from .doctor import run

    raise typer.Exit(run())


@app.command()
def new(
    name: Annotated[str, Argument(help="Of the package, in lower case.")],
    modality: Annotated[str, Option(help="What its model reads, as series or actions.")],
    kind: Kind = None,
    language_model: Pretrained = None,
    into: Into = Path("."),
) -> None:
    """Write a package for a model with a modality of its own, which is trained, served, and passes
    its own tests as it is."""
    from .new import new as write

    folder = write(name, modality, into, kind=kind, language_model=language_model)
    typer.echo(f"Written: {folder}. Its README.md says how to go on.")


@app.command()
def examples(into: Annotated[Path, Argument(metavar="DIR")] = Path(".")) -> None:
    """Copy the examples, with their checkpoints, into a folder `examples`."""
    from .new import examples as write

    folder = write(into)
    first = "python -m examples.terra runs the first."
    typer.echo(f"Written: {folder}. pip install -e {folder} tells vLLM of their models; {first}")


@app.command()
def eject(package: Annotated[str, Argument(help="Of yours, as my_package.")]) -> None:
    """Copy mmkit into a package, so that it needs no mmkit."""
    from .eject import command

    command(package)
