"""``mmkit new``: a package for a model with a modality of its own, which is trained, served, and
passes its own tests as it is; ``mmkit examples``: those, 9 MB, to run and to change.

The package has a spec, data, an encoder, the models for transformers and for vLLM, training, a
script that asks a server, an entry point, tests of laws and engine, and a CI file. A pretrained
language model gets low-rank changes in training, and vLLM's own class runs it. Refused
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
from .common import checkpoint, needs_vllm, reason, shipped

KINDS = ("series", "vectors", "image", "audio", "record")
"""The kinds of items: rows of numbers of which several share a position, rows with a position each,
images, audio, and several arrays. Each has templates of its own beside the common ones."""

HERE = Path(".")
Kind = Annotated[str | None, Option(help=f"Of the items: {', '.join(KINDS)}. By default by name.")]
Pretrained = Annotated[Path | None, Option(metavar="DIR", help="A language model; else a Llama.")]

_FRESH = {
    "Language": "Llama",
    "Config": "LlamaConfig",
    "vllm_module": "vllm.model_executor.models.llama",
    "minutes": "a minute on one core",
    "options": "--dtype float32",
    "language_text": "a small Llama of random weights",
}
"""What the templates say of the small language model that comes with them."""


def new_command(
    name: Annotated[str, Argument(help="Of the package, in lower case.")],
    modality: Annotated[list[str], Option(help="What its model reads, as series or actions.")],
    into: Annotated[Path, Option(metavar="DIR", help="Where the package's folder goes.")] = HERE,
    *,
    kind: Kind = None,
    language_model: Pretrained = None,
) -> Path:
    """Write a package for a model with a modality of its own, which is trained, served, and passes
    its own tests as it is."""
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
        kind: one of `KINDS`; by default that of the modality's name, or the first.
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
        **(_FRESH if language_model is None else _pretrained(language_model, folder)),
    }
    rooms = ("common", "fresh" if language_model is None else "pretrained", kind)
    texts = _filled_templates(rooms, values)
    _check_code(texts, modality)
    with _new_folder(folder):
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    print(f"Written: {folder}. Its README.md says how to go on.")
    return folder


def _filled_templates(rooms: Sequence[str], values: Mapping[str, str]) -> dict[Path, str]:
    """Return the files of a package, by their path in its folder."""
    templates = Path(__file__).parent / "templates"
    texts: dict[Path, str] = {}
    for room in rooms:
        # .txt keeps Python, pytest and linters from reading a template as code
        for template in sorted((templates / room).rglob("*.txt")):
            parts = template.relative_to(templates / room).with_suffix("").parts
            path = Path(*[values["package"] if part == "package" else part for part in parts])
            texts[path] = Template(template.read_text(encoding="utf-8")).substitute(values)
    return texts


# -- names -----------------------------------------------------------------------------------------


def _check_identifier(what: str, name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise MmkitError(what, "a Python identifier in lower case", repr(name))


def _check_name(name: str, modality: str) -> None:
    """Refuse the name of a package that would hide a module, or a model of transformers.

    Raises:
        MmkitError: says what has the name.
    """
    _check_identifier("name", name)
    owner = _owner_of_module(name)
    if name in (modality, "tests"):
        owner = "the modality" if name == modality else "the folder of the package's tests"
    if owner is not None:
        raise MmkitError("name", "one that nothing else has", f"{name!r}, {owner}")


def _owner_of_module(name: str) -> str | None:
    if name in sys.stdlib_module_names:
        return "a module of Python"
    found = importlib.util.find_spec(name)
    if found is not None:
        places = [found.origin, *(found.submodule_search_locations or ())]
        return f"an installed module: {next(filter(None, places), 'built in')}"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return "a model of transformers" if name in CONFIG_MAPPING_NAMES else None


def _check_modality(modality: str) -> None:
    """Refuse the name of a modality, and of its field, that a spec would refuse.

    Raises:
        MmkitError: says what has the name.
    """
    _check_identifier("modality", modality)
    owner = find_owner_of_modality_name(modality) or find_owner_of_field_name(
        modality, is_raw=False
    )
    if owner is None and hasattr(type(fields), modality):  # the spec reads `fields.<modality>`
        owner = "a method of fields"
    if owner is not None:
        raise MmkitError("modality", "a name that nothing else has", f"{modality!r}, {owner}")


def _check_code(texts: Mapping[Path, str], modality: str) -> None:
    """Refuse a modality whose name hides an import where a function of the package receives its
    items.

    Raises:
        MmkitError: names the file.
    """
    for path, text in texts.items():
        if path.suffix != ".py":
            continue
        tree = ast.parse(text)
        imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        imported = {alias.asname or alias.name for node in imports for alias in node.names}
        received = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        if modality in imported and modality in received:
            got = f"{modality!r}, which {path} imports"
            raise MmkitError("modality", "a name that nothing else has", got)


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Write a folder, in the block, which is not there yet.

    Raises:
        MmkitError: it is there, or cannot be written.
    """
    if folder.exists():
        remedy = "Choose another place, or remove it."
        raise MmkitError(str(folder), "no such folder yet", "one", remedy)
    try:
        yield
    except OSError as error:
        expected, remedy = "a folder that can be written", "Choose another place."
        raise MmkitError(str(folder), expected, reason(error), remedy) from error


def _pretrained(folder: Path, package: Path) -> dict[str, str]:
    """What the templates say of a pretrained language model.

    Args:
        folder: of the language model.
        package: the folder that will be written, from which the package finds it.

    Raises:
        MmkitError: no such folder, no tokenizer, no weights or quantized ones, or an architecture
            that vLLM or transformers does not have as a causal language model.
    """
    where = f"--language-model {folder}"
    with needs_vllm():
        import transformers

        from ..vllm_api.models import vllm_module
    from ..training.saving import has_tokenizer

    path = checkpoint(folder, "--language-model")
    if not has_tokenizer(path):
        raise MmkitError(where, "a folder with a tokenizer", "one without")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        expected = "a config and a tokenizer that transformers can read"
        raise MmkitError(where, expected, reason(error)) from error
    if tokenizer.eos_token is None:
        raise MmkitError(where, "a tokenizer with an end token", "one without")
    name, own = (config.architectures or ["none"])[0], type(config).__name__
    language, module = name.removesuffix("ForCausalLM"), vllm_module(name)
    if language == name or not {own, name} <= {*dir(transformers)} or module is None:
        expected = "the architecture of a causal language model, as Qwen2ForCausalLM, of which "
        expected += "transformers and vLLM have a class"
        raise MmkitError(where, expected, name)
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        raise MmkitError(where, "a folder with weights, as *.safetensors", "one without")
    if getattr(config, "quantization_config", None):
        raise MmkitError(where, "weights that can be trained", "quantized ones")
    return {
        "Language": language,
        "Config": own,
        "vllm_module": module,
        "minutes": "trains the encoder, and low-rank changes of the language model",
        "options": "--max-model-len 1024",
        "language_text": f"that of {path.resolve().name}, with low-rank changes; its path is there",
        "language_model": Path(os.path.relpath(path.resolve(), package.resolve())).as_posix(),
        "dtype": str(config.dtype or "torch.float32"),
    }


def examples(into: Annotated[Path, Argument(metavar="DIR")] = HERE) -> None:
    """Copy the examples, with their checkpoints, into a folder `examples`."""
    folder = into / "examples"
    with _new_folder(folder):
        copytree(shipped("examples"), folder, ignore=ignore_patterns("__pycache__"))
    first = "python -m examples.terra runs the first."
    print(f"Written: {folder}. pip install -e {folder} tells vLLM of their models; {first}")
