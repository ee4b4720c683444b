"""``mmkit new``: a package for a model with modalities of its own; ``mmkit examples``.

The package is trained, served, and passes its own tests as it is. The examples are 7 MB, to run and
to change.

The package has a spec, data, an encoder, a model of transformers, training, a script that asks a
server, an entry point, and tests of laws and engine. With several modalities, each has data and an
encoder of its own. vLLM serves the class that was trained, by its Transformers backend. A
pretrained language model gets low-rank changes in training. Refused (`MmkitError`) are a name that
is no identifier or is taken, an unknown kind, several modalities of one kind, a folder that exists
already or cannot be written, and a language model that cannot be used.
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
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from .. import __version__
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
Kind = Annotated[list[str] | None, Option(help=f"{KIND_HELP} Stated, it is for each modality.")]
PRETRAINED_HELP = "Folder of a pretrained language model. The default is a small random Llama."
Pretrained = Annotated[Path | None, Option(metavar="DIR", help=PRETRAINED_HELP)]

_FRESH = {
    "Language": "Llama",
    "Config": "LlamaConfig",
    "minutes": "about a minute on one core",
    "options": "--dtype float32",
    "language_text": "a small Llama of random weights",
}
"""What the templates say of the small language model that comes with them."""


class _Modality(NamedTuple):
    """A modality of a package.

    Attributes:
        name: its name.
        kind: of its items, one of `KINDS`.
    """

    name: str
    kind: str


def new_command(
    name: Annotated[str, Argument(help="The name of the package, in lower case.")],
    modality: Annotated[
        list[str],
        Option(help="What its model reads, for example series or actions; several times for more."),
    ],
    into: Annotated[
        Path, Option(metavar="DIR", help="Folder in which the package's folder is made.")
    ] = HERE,
    *,
    kind: Kind = None,
    language_model: Pretrained = None,
) -> Path:
    """Write a package for a model with modalities of its own.

    It is trained, served, and passes its own tests as it is.

    Example: mmkit new pulse --modality series
    """
    return new(name, modality, into, kinds=kind or (), language_model=language_model)


def new(
    name: str,
    modalities: Sequence[str],
    into: Path = HERE,
    *,
    kinds: Sequence[str] = (),
    language_model: Path | None = None,
) -> Path:
    """Write a package, and return its folder.

    Args:
        name: of the package, in lower case.
        modalities: what its model reads.
        into: where the package's folder goes.
        kinds: of `KINDS`, one for each modality; by default the one of the modality's name, or the
            first.
        language_model: the folder of a pretrained language model; else a small Llama.

    Raises:
        MmkitError: see above.
    """
    _check_name(name, modalities)
    tokens = _list_tokens(modalities)
    typed_modalities = _choose_kinds(modalities, kinds)
    folder = into / name
    values = {
        "package": name,
        "Prefix": class_prefix(name),
        "SPEC": name.upper(),
        "tokens": ", ".join(f'"{token}"' for token in tokens),
        "targets": " or ".join(f"``<{modality}>``" for modality in modalities),
        "extras": "cli,client",
        "versions": _write_version_bounds(__version__),
    }
    if any(modality.kind == "audio" for modality in typed_modalities):
        values["extras"] = "audio,cli,client"
    if language_model is None:
        values.update(_FRESH)
        language = "fresh"
    else:
        values.update(_describe_language_model(language_model, folder))
        language = "pretrained"
    if len(typed_modalities) == 1:
        texts = _fill_for_one(typed_modalities[0], language, values)
    else:
        texts = _fill_for_several(typed_modalities, language, values)
    for modality in modalities:
        _check_code(texts, modality)
    with _new_folder(folder):
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    print(f"Written: {folder}. Its README.md says how to go on.")
    return folder


def _write_version_bounds(version: str) -> str:
    """Return the versions of mmkit with which a package works: one minor release.

    The next minor release may rename what the package imports.
    """
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _list_tokens(modalities: Sequence[str]) -> list[str]:
    """Return the tokens that a package adds: the target and the placeholder of each modality.

    Raises:
        MmkitError: a modality has no valid name, or two share a token.
    """
    tokens: list[str] = []
    for modality in modalities:
        _check_modality(modality)
        tokens += [f"<{modality}>", f"<{modality}_part>"]
    if len(set(tokens)) < len(tokens):
        raise MmkitError("modality", "names that make different tokens", ", ".join(tokens))
    return tokens


def _choose_kinds(modalities: Sequence[str], kinds: Sequence[str]) -> list[_Modality]:
    """Return modalities with the kinds of their items.

    Raises:
        MmkitError: an unknown kind, another number of them, or several modalities of one.
    """
    if not kinds:
        kinds = [name if name in KINDS else KINDS[0] for name in modalities]
    for kind in kinds:
        if kind not in KINDS:
            raise MmkitError("kind", f"one of {', '.join(KINDS)}", repr(kind))
    if len(kinds) != len(modalities):
        expected = f"one for each of {', '.join(modalities)}, or none"
        raise MmkitError("kind", expected, ", ".join(kinds))
    if len(set(kinds)) < len(kinds):
        remedy = "Write the package for one of them, and add the others to it."
        raise MmkitError("kind", "another one for each modality", ", ".join(kinds), remedy)
    return [_Modality(name, kind) for name, kind in zip(modalities, kinds, strict=True)]


# -- templates -------------------------------------------------------------------------------------


def _fill_for_one(modality: _Modality, language: str, values: Mapping[str, str]) -> dict[Path, str]:
    """Return the texts of a package with one modality, by their path in its folder.

    Args:
        modality: the modality.
        language: the group of templates for the language model.
        values: by the names that templates have for them.
    """
    name = modality.name
    all_values = {
        "modality": name,
        "modalities": f"the modality `{name}`",
        "plain_modalities": f"the modality {name}",
        "seed": "seed",
        **values,
    }
    return _fill_templates(("common", "single", language, modality.kind), all_values)


_ENCODER = "        self.encoder_{0} = encoder_{0}.Encoder(config)"
_EMBED_METHOD = '''
    def embed_{0}(self, **fields: Any) -> torch.Tensor | list[torch.Tensor]:
        """Items to rows (tokens, hidden_size), as many as the spec's layout has positions."""
        return self.encoder_{0}(**fields)
'''
"""What the model of a package with several modalities has for each."""


def _fill_for_several(
    modalities: Sequence[_Modality], language: str, values: Mapping[str, str]
) -> dict[Path, str]:
    """Return the texts of a package with several modalities, by their path in its folder.

    Each modality has a module of data and one of its encoder. The spec and the configuration are
    those of packages with one modality each, put together.

    Raises:
        SpecError: the names of fields are the same.
    """
    names = [modality.name for modality in modalities]
    package = values["package"]
    all_values = {
        "modalities": "the modalities " + " and ".join(f"`{name}`" for name in names),
        "plain_modalities": "the modalities " + " and ".join(names),
        "data": ", ".join(f'"{name}": data_{name}' for name in names),
        "data_modules": ", ".join(f"data_{name}" for name in sorted(names)),
        "data_files": ", ".join(f"`data_{name}.py`" for name in names),
        "first_data": f"data_{names[0]}",
        "encoder_modules": ", ".join(f"encoder_{name}" for name in sorted(names)),
        "encoder_files": ", ".join(f"`encoder_{name}.py`" for name in names),
        "encoders": "\n".join(_ENCODER.format(name) for name in names),
        "embed_methods": "".join(_EMBED_METHOD.format(name) for name in names),
        **values,
    }
    texts = _fill_templates(("common", "several", language), all_values)
    folder = Path(package)
    specs: list[str] = []
    configurations: list[str] = []
    for number, (name, kind) in enumerate(modalities):
        values_of_modality = {**all_values, "modality": name, "seed": f"({number}, seed)"}
        files = _fill_templates((kind,), values_of_modality)
        texts[folder / f"data_{name}.py"] = files[folder / "data.py"]
        texts[folder / f"encoder_{name}.py"] = files[folder / "encoder.py"]
        specs.append(files[folder / "spec.py"])
        configurations.append(files[folder / "configuration.py"])
    spec = _join_specs(specs, values["SPEC"], package)
    exec(spec, {"__name__": f"{package}.spec"})  # a spec refuses names that are the same
    texts[folder / "spec.py"] = spec
    texts[folder / "configuration.py"] = _join_configurations(configurations)
    return texts


def _join_specs(specs: Sequence[str], variable: str, name: str) -> str:
    """Return the source of a spec with the modalities of several specs.

    Args:
        specs: sources, each with imports, functions, and a spec with one modality.
        variable: of the spec.
        name: of the spec.
    """
    imports: set[str] = set()
    names_of_mmkit: set[str] = set()
    functions: list[str] = []
    modalities: list[str] = []
    for source in specs:
        for statement in ast.parse(source).body:
            text = ast.get_source_segment(source, statement) or ""
            if isinstance(statement, ast.ImportFrom) and statement.module == "mmkit":
                names_of_mmkit.update(alias.name for alias in statement.names)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                imports.add(text)
            elif isinstance(statement, ast.FunctionDef):
                functions.append(text)
            elif isinstance(statement, ast.Assign):
                call: Any = statement.value  # ModelSpec(name, modality)
                modalities.append(ast.get_source_segment(source, call.args[1]) or "")
    # the templates import names only from the standard library and from mmkit
    standard = sorted(line for line in imports if line.startswith("from "))
    installed = sorted(imports.difference(standard), key=str.lower)
    head = ['"""The multimodal side of the model, all of it."""']
    for lines in (standard, installed):
        if lines:
            head.append("\n".join(lines))
    lines_of_names = [f"    {imported},\n" for imported in sorted(names_of_mmkit)]
    head.append("from mmkit import (\n" + "".join(lines_of_names) + ")")
    declaration = f'{variable} = ModelSpec(\n    "{name}",\n'
    for modality_text in modalities:
        declaration += f"    {modality_text},\n"
    declaration += ")\n"
    if not functions:
        return "\n\n".join([*head, declaration])
    return "\n\n\n".join(["\n\n".join(head), *functions, declaration])


def _join_configurations(configurations: Sequence[str]) -> str:
    """Return the source of a configuration with the sizes of several."""
    joined = configurations[0]
    for source in configurations[1:]:
        _, _, sizes = source.partition("    model_type = ")
        _, _, sizes = sizes.partition("\n\n")
        joined += sizes
    return joined


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


def _check_name(name: str, modalities: Sequence[str]) -> None:
    """Refuse the name of a package that would hide a module, or a model of transformers.

    Raises:
        MmkitError: says what has the name.
    """
    _check_identifier("name", name)
    owner = _find_owner_of_module_name(name)
    if name == "tests":
        owner = "the folder of the package's tests"
    if name in modalities:
        owner = "the modality"
    if owner is not None:
        raise MmkitError("name", "one that nothing else has", f"{name!r}, {owner}")


def _find_owner_of_module_name(name: str) -> str | None:
    """Return what has the name of a module already, in words; None where the name is free."""
    if name in sys.stdlib_module_names:
        return "a module of Python"
    spec = importlib.util.find_spec(name)
    if spec is not None:
        path = spec.origin
        if not path and spec.submodule_search_locations:  # a namespace package
            path = list(spec.submodule_search_locations)[0]
        return f"an installed module: {path or 'built in'}"
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
