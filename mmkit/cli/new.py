"""``mmkit new``: a package for a model with a modality of its own; ``mmkit examples``.

The package is trained, served, and passes its own tests as it is. The examples are 7 MB, to run and
to change.

The package has a spec, data, an encoder, a model of transformers, training, a script that asks a
server, an entry point, and tests of laws and engine. vLLM serves the class that was trained, by its
Transformers backend. A pretrained language model gets low-rank changes in training. Refused
(`MmkitError`) are a name that is no identifier or is taken, several modalities, an unknown kind, a
folder that exists already or cannot be written, and a language model that cannot be used.
"""

from __future__ import annotations

import ast
import importlib.util
import keyword
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns
from string import Template
from typing import Annotated

from typer import Argument, Option

from ..errors import MmkitError
from ..generate import class_prefix
from ..language.expr import fields
from ..language.names import find_owner_of_field_name, find_owner_of_modality_name
from .common import describe_error, find_checkpoint, find_shipped

KINDS = ("series", "vectors", "image", "audio", "record")
"""The kinds of items: rows of numbers of which several share a position, rows with a position each,
images, audio, and several arrays. Each has templates of its own beside the common ones."""

HERE = Path(".")
KIND_HELP = f"What an item is: {', '.join(KINDS)}. The name of the modality chooses by default."
Kind = Annotated[str | None, Option(help=KIND_HELP)]
PRETRAINED_HELP = "Folder of a pretrained language model. The default is a small random Llama."
Pretrained = Annotated[Path | None, Option(metavar="DIR", help=PRETRAINED_HELP)]

_FRESH = {
    "Language": "Llama",
    "Config": "LlamaConfig",
    "minutes": "a minute on one core",
    "options": "--dtype float32",
    "language_text": "a small Llama of random weights",
}
"""What the templates say of the small language model that comes with them."""


def new_command(
    name: Annotated[str, Argument(help="The name of the package, in lower case.")],
    modality: Annotated[
        list[str], Option(help="What its model reads, for example series or actions.")
    ],
    into: Annotated[
        Path, Option(metavar="DIR", help="Folder in which the package's folder is made.")
    ] = HERE,
    *,
    kind: Kind = None,
    language_model: Pretrained = None,
) -> Path:
    """Write a package for a model with a modality of its own.

    It is trained, served, and passes its own tests as it is.

    Example: mmkit new pulse --modality series
    """
    if len(modality) > 1:
        remedy = "Write the package for one of them, and add the others to its spec."
        raise MmkitError("--modality", "one modality", ", ".join(modality), remedy)
    return new(name, modality[0], into, kind=kind, language_model=language_model)


def new(
    name: str,
    modality: str,
    into: Path = HERE,
    *,
    kind: str | None = None,
    language_model: Path | None = None,
) -> Path:
    """Write a package, and return its folder.

    Args:
        name: of the package, in lower case.
        modality: what its model reads.
        into: where the package's folder goes.
        kind: one of `KINDS`; by default the one of the modality's name, or the first.
        language_model: the folder of a pretrained language model; else a small Llama.

    Raises:
        MmkitError: see above.
    """
    _check_name(name, modality)
    _check_modality(modality)
    if kind is None:
        kind = modality if modality in KINDS else KINDS[0]
    if kind not in KINDS:
        raise MmkitError("kind", f"one of {', '.join(KINDS)}", repr(kind))
    folder = into / name
    values = {
        "package": name,
        "Prefix": class_prefix(name),
        "SPEC": name.upper(),
        "modality": modality,
        "extras": "audio,cli,client" if kind == "audio" else "cli,client",
    }
    if language_model is None:
        values.update(_FRESH)
        groups = ("common", "fresh", kind)
    else:
        values.update(_describe_language_model(language_model, folder))
        groups = ("common", "pretrained", kind)
    texts = _fill_templates(groups, values)
    _check_code(texts, modality)
    with _new_folder(folder):
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    print(f"Written: {folder}. Its README.md says how to go on.")
    return folder


def _fill_templates(groups: Sequence[str], values: Mapping[str, str]) -> dict[Path, str]:
    """Return the texts of a package, by their path in its folder."""
    texts: dict[Path, str] = {}
    for group in groups:
        folder = Path(__file__).parent / "templates" / group
        # .txt keeps Python, pytest and linters from reading a template as code
        for file in sorted(folder.rglob("*.txt")):
            path = Path()
            for part in file.relative_to(folder).with_suffix("").parts:
                path /= values["package"] if part == "package" else part
            template = Template(file.read_text(encoding="utf-8"))
            texts[path] = template.substitute(values)
    return texts


# -- names -----------------------------------------------------------------------------------------


def _check_identifier(what: str, name: str) -> None:
    """Refuse a name that is no Python identifier in lower case."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise MmkitError(what, "a Python identifier in lower case", repr(name))


def _check_name(name: str, modality: str) -> None:
    """Refuse the name of a package that would hide a module, or a model of transformers.

    Raises:
        MmkitError: says what has the name.
    """
    _check_identifier("name", name)
    owner = _find_owner_of_module_name(name)
    if name == "tests":
        owner = "the folder of the package's tests"
    if name == modality:
        owner = "the modality"
    if owner is not None:
        raise MmkitError("name", "one that nothing else has", f"{name!r}, {owner}")


def _find_owner_of_module_name(name: str) -> str | None:
    """Return what has the name of a module already, in words; None where the name is free."""
    if name in sys.stdlib_module_names:
        return "a module of Python"
    spec = importlib.util.find_spec(name)
    if spec is not None:
        place = spec.origin
        if not place and spec.submodule_search_locations:  # a namespace package
            place = list(spec.submodule_search_locations)[0]
        return f"an installed module: {place or 'built in'}"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if name in CONFIG_MAPPING_NAMES:
        return "a model of transformers"
    return None


def _check_modality(modality: str) -> None:
    """Refuse the name of a modality, and of its field, that a spec would refuse.

    Raises:
        MmkitError: says what has the name.
    """
    _check_identifier("modality", modality)
    owner = find_owner_of_modality_name(modality)
    if owner is None:
        owner = find_owner_of_field_name(modality, is_raw=False)
    if owner is None and hasattr(type(fields), modality):  # the spec reads `fields.<modality>`
        owner = "a method of fields"
    if owner is not None:
        raise MmkitError("modality", "a name that nothing else has", f"{modality!r}, {owner}")


def _check_code(texts: Mapping[Path, str], modality: str) -> None:
    """Refuse a modality whose name hides an import of a module that has it as a parameter.

    Raises:
        MmkitError: names the file.
    """
    for path, text in texts.items():
        if path.suffix != ".py":
            continue
        tree = ast.parse(text)
        imports: set[str] = set()
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                imports.update(alias.asname or alias.name for alias in statement.names)
        parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        if modality in imports and modality in parameters:
            got = f"{modality!r}, which {path} imports"
            raise MmkitError("modality", "a name that nothing else has", got)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Write a new folder in the context.

    Raises:
        MmkitError: it is there, or cannot be written.
    """
    if folder.exists():
        remedy = "Choose another place, or remove it."
        raise MmkitError(str(folder), "no such folder yet", "one", remedy)
    try:
        yield
    except OSError as error:
        got = describe_error(error)
        remedy = "Choose another place."
        raise MmkitError(str(folder), "a folder that can be written", got, remedy) from error


def _describe_language_model(folder: Path, package: Path) -> dict[str, str]:
    """Return what the templates say of a pretrained language model.

    Args:
        folder: of the language model.
        package: the folder that will be written, from which the package finds it.

    Raises:
        MmkitError: no such folder, no tokenizer, no weights or quantized ones, or an architecture
            that transformers does not have as a causal language model, or whose attention vLLM
            cannot replace.
    """
    where = f"--language-model {folder}"
    import transformers

    from ..training.saving import has_tokenizer

    path = find_checkpoint(folder, "--language-model")
    if not has_tokenizer(path):
        raise MmkitError(where, "a folder with a tokenizer", "one without")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        expected = "a config and a tokenizer that transformers can read"
        raise MmkitError(where, expected, describe_error(error)) from error
    if tokenizer.eos_token is None:
        raise MmkitError(where, "a tokenizer with an end token", "one without")
    architecture = (config.architectures or ["none"])[0]
    config_class = type(config).__name__
    names = dir(transformers)
    is_known = architecture in names and config_class in names
    if not architecture.endswith("ForCausalLM") or not is_known:
        expected = "the architecture of a causal language model, as Qwen2ForCausalLM, of which "
        expected += "transformers has a class"
        raise MmkitError(where, expected, architecture)
    modeling = sys.modules[getattr(transformers, architecture).__module__]
    # the table by which vLLM puts its attention into a model of transformers
    if not hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        expected = "a language model whose attention vLLM can replace"
        raise MmkitError(where, expected, f"{architecture}, whose attention is its code's")
    weights = list(path.glob("*.safetensors"))
    weights += path.glob("pytorch_model*.bin")
    if not weights:
        raise MmkitError(where, "a folder with weights, as *.safetensors", "one without")
    if getattr(config, "quantization_config", None):
        raise MmkitError(where, "weights that can be trained", "quantized ones")
    return {
        "Language": architecture.removesuffix("ForCausalLM"),
        "Config": config_class,
        "minutes": "trains the encoder, and low-rank changes of the language model",
        "options": "--max-model-len 1024",
        "language_text": f"that of {path.resolve().name}, with low-rank changes; its path is there",
        "language_model": Path(os.path.relpath(path.resolve(), package.resolve())).as_posix(),
        "dtype": str(config.dtype or "torch.float32"),
    }


EXAMPLES_HELP = "Folder in which the folder `examples` is made."


def examples(into: Annotated[Path, Argument(metavar="DIR", help=EXAMPLES_HELP)] = HERE) -> None:
    """Copy the examples, with their checkpoints, into a folder `examples`.

    The operator's files come with them, as `examples/deploy`.
    """
    folder = into / "examples"
    with _new_folder(folder):
        copytree(find_shipped("examples"), folder, ignore=ignore_patterns("__pycache__"))
        copytree(find_shipped("deploy"), folder / "deploy")
    first = "python -m examples.terra runs the first."
    print(f"Written: {folder}. pip install -e {folder} tells vLLM of their models; {first}")
