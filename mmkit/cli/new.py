"""``mmkit new``: a package for a model with a modality of its own, which is trained, served, and
passes its own tests as it is; ``mmkit examples``: those, 9 MB, to run and to change.

The package has a spec, data, an encoder, the models for transformers and for vLLM, training, a
script that asks a server, an entry point, tests of laws and engine, and a CI file. A pretrained
language model gets low-rank changes in training, and vLLM's own class runs it. Refused
(`MmkitError`) are a name that is no identifier or is taken, an unknown kind, a folder that exists
already or cannot be written, and a language model that cannot be used.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns
from string import Template
from typing import Annotated

from typer import Argument, Option

from ..errors import MmkitError
from ..generate import class_prefix
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


def new(
    name: Annotated[str, Argument(help="Of the package, in lower case.")],
    modality: Annotated[str, Option(help="What its model reads, as series or actions.")],
    into: Annotated[Path, Option(metavar="DIR", help="Where the package's folder goes.")] = HERE,
    *,
    kind: Kind = None,
    language_model: Pretrained = None,
) -> Path:
    """Write a package for a model with a modality of its own, which is trained, served, and passes
    its own tests as it is."""
    for what, value in (("name", name), ("modality", modality)):
        if not value.isidentifier() or keyword.iskeyword(value) or value != value.lower():
            raise MmkitError(what, "a Python identifier in lower case", repr(value))
    if name in (modality, "mmkit", "vllm", "tests"):
        raise MmkitError("name", "one that nothing else has", repr(name))
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
        **(_FRESH if language_model is None else _pretrained(language_model)),
    }
    templates = Path(__file__).parent / "templates"
    with _new_folder(folder):
        for part in ("common", "fresh" if language_model is None else "pretrained", kind):
            # .txt keeps Python, pytest and linters from reading a template as code
            for template in sorted((templates / part).rglob("*.txt")):
                path = template.relative_to(templates / part).with_suffix("")
                target = folder.joinpath(*[name if p == "package" else p for p in path.parts])
                target.parent.mkdir(parents=True, exist_ok=True)
                text = Template(template.read_text(encoding="utf-8")).substitute(values)
                target.write_text(text, encoding="utf-8")
    print(f"Written: {folder}. Its README.md says how to go on.")
    return folder


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


def _pretrained(folder: Path) -> dict[str, str]:
    """What the templates say of a pretrained language model.

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
        "language_text": f"that of {folder}, with low-rank changes; its path is there",
        "language_model": str(path.resolve()),
        "dtype": str(config.dtype or "torch.float32"),
    }


def examples(into: Annotated[Path, Argument(metavar="DIR")] = HERE) -> None:
    """Copy the examples, with their checkpoints, into a folder `examples`."""
    folder = into / "examples"
    with _new_folder(folder):
        copytree(shipped("examples"), folder, ignore=ignore_patterns("__pycache__"))
    first = "python -m examples.terra runs the first."
    print(f"Written: {folder}. pip install -e {folder} tells vLLM of their models; {first}")
