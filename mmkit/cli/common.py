"""Common code of the subcommands.

A checkpoint, the spec that is bound to it, and the items of a request.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument, Option

from ..errors import MmkitError, SpecError
from ..importing import import_named
from ..language.items import ItemType
from ..model_spec import ModelSpec
from ..plan.pieces import compare_pieces
from ..plan.plan import Plan

SPEC_HELP = "A spec, as package.module:SPEC."
Spec = Annotated[str, Argument(metavar="SPEC", help=SPEC_HELP, show_default=False)]
DOCUMENT_HELP = "A spec, as package.module:SPEC, or the file of a document."
SpecOrDocument = Annotated[str, Argument(metavar="SPEC", help=DOCUMENT_HELP, show_default=False)]
FOLDER = Option(metavar="DIR", help="Folder of a checkpoint; it needs no weights.")
Config = Annotated[Path, FOLDER]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run code that the checkpoint brings.")]


_UNTRUSTED = (
    "The checkpoint's own code was not run: --trust-remote-code runs it. If it is your own "
    'package, "pip install -e ." makes its plugin known to vLLM and transformers.'
)


def find_shipped(path: str) -> Path:
    """Return a file of the repository that the wheel holds as well: see pyproject.toml."""
    cli = Path(__file__).parent
    in_wheel = cli / "shipped" / path
    if in_wheel.exists():
        return in_wheel
    return cli.parents[1] / path


def load_spec(target: str, *, import_functions: bool = False) -> ModelSpec:
    """Return the spec that ``package.module:SPEC`` names, or the spec of a document.

    Functions that a document names cannot be called, unless they are imported.

    Args:
        target: a name, or the file of a document, which ends in ``.json``.
        import_functions: import the functions of a document.

    Raises:
        MmkitError: there is no such spec, or no such file.
        SpecError: the document is malformed.
    """
    if not target.endswith(".json"):
        spec: ModelSpec = import_named(target, ModelSpec)
        return spec
    from ..document import FunctionStubs, from_document

    try:
        text = Path(target).read_bytes()
    except OSError as error:
        raise MmkitError(target, "the file of a document", describe_error(error)) from error
    functions = None if import_functions else FunctionStubs()
    return from_document(
        text, ModelSpec, functions=functions, import_functions=import_functions, where=target
    )


def find_checkpoint(folder: str | Path, option: str = "--config") -> Path:
    """Return the folder with a config.json that an option names.

    Raises:
        MmkitError: there is no such folder, or it has no config.json.
    """
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        got = "a folder without one"
    elif path.exists():
        got = "a file"
    else:
        got = "no such folder"
    remedy = "Give the folder of a checkpoint."
    raise MmkitError(f"{option} {folder}", "a folder with a config.json", got, remedy)


def open_checkpoint(spec: ModelSpec, folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Bind a spec to what vLLM reads of a checkpoint.

    It reads config, tokenizer and processor files; no weights are needed.

    Args:
        spec: the declaration.
        folder: of the checkpoint.
        trust_remote_code: run code that the checkpoint brings.

    Returns:
        vLLM's processing info, whose `plan` is the bound spec.

    Raises:
        MmkitError: vLLM, or what is wanted beside it, cannot be imported, or cannot read the
            checkpoint.
        SpecError: the spec does not fit.
    """
    path = find_checkpoint(folder)
    with require_vllm():
        from ..vllm_api import checkpoint_processors
    takes_embeds = any(modality.embeds for modality in spec.modalities)
    remedy = ""
    if _brings_code(path) and not trust_remote_code:
        remedy = _UNTRUSTED
    try:
        config = checkpoint_processors.load_config_for_spec(
            path, enable_mm_embeds=takes_embeds, trust_remote_code=trust_remote_code
        )
        # a processor binds its spec
        processor = checkpoint_processors.make_processor(spec.classes, config)
        return processor.info
    except SpecError as error:
        error.args = (f"{error} {remedy}".rstrip(),)
        raise
    except MmkitError:
        raise
    except Exception as error:
        got = describe_error(error)
        if remedy and "trust_remote_code" in str(error):
            got = "one that needs its own code"
        where = f"--config {folder}"
        raise MmkitError(where, "a checkpoint that vLLM can read", got, remedy) from error


def _brings_code(folder: Path) -> bool:
    """Return whether a file of a checkpoint names Python code beside it."""
    for file in folder.glob("*config.json"):
        if '"auto_map"' in file.read_text(errors="replace"):
            return True
    return False


# -- items ---------------------------------------------------------------------------------------


def parse_items(forms: Iterable[str], plan: Plan) -> dict[str, list[Any]]:
    """Return the items of a request, by modality; see `parse_item`."""
    data: dict[str, list[Any]] = {}
    for form in forms:
        name, value = parse_item(form, plan)
        data.setdefault(name, []).append(value)
    return data


def parse_item(form: str, plan: Plan) -> tuple[str, Any]:
    """Return the modality and the item that ``modality=FORM`` means.

    FORM is ``zeros`` (the smallest item), sizes as ``9x4`` (the shape of a tensor, width x height
    of an image, frames x width x height of a video, samples of audio, characters of a text), JSON
    (a list, or the dict of a record), or a file: .json (a text, too), .npy or an image.

    Raises:
        MmkitError: another form, an unknown modality, or JSON or a file that cannot be read.
    """
    name, separator, text = form.partition("=")
    where = f"--item {shorten(form, 100)}"
    if not separator or name not in plan.modalities:
        expected = f"modality=FORM with a modality among {', '.join(plan.modalities)}"
        raise MmkitError(where, expected, repr(name))
    kind = plan.modalities[name].item
    if text == "zeros":
        smallest = kind.small() or kind.candidates()
        return name, smallest[0]
    if re.fullmatch(r"\d+(x\d+)*", text):
        sizes = [int(size) for size in text.split("x")]
        return name, _make_blank(kind, sizes, where)
    if text.lstrip().startswith(("{", "[")):
        try:
            return name, json.loads(text)
        except ValueError as error:
            raise MmkitError(where, "JSON", describe_error(error)) from error
    suffix = Path(text).suffix.lower()
    if suffix not in _READERS:
        expected = f"zeros, {kind.size_hint}, or a file ({', '.join(_READERS)})"
        raise MmkitError(where, expected, repr(text))
    try:
        return name, _READERS[suffix](Path(text))
    except (OSError, ValueError, TypeError) as error:
        expected = f"a {suffix} file that can be read"
        raise MmkitError(where, expected, describe_error(error)) from error


def _make_blank(kind: ItemType, sizes: Sequence[int], where: str) -> Any:
    """Return a blank item of sizes; where vLLM states sizes, they leave channels out."""
    count = len(kind.dummy_sizes) or kind.ndim
    if kind.is_nested:
        raise MmkitError(where, kind.size_hint, "sizes")
    if len(sizes) != count:
        raise MmkitError(where, f"{kind.size_hint}, {count} size(s)", str(len(sizes)))
    if kind.dummy_sizes and 0 in sizes:
        raise MmkitError(where, "sizes of at least 1", "x".join(map(str, sizes)))
    return kind.blank(*sizes)


def _load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _load_image(path: Path) -> Any:
    from PIL import Image as PILImage

    return PILImage.open(path).convert("RGB")


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".npy": np.load,  # which unpickles nothing
    ".json": _load_json,
    ".png": _load_image,
    ".jpg": _load_image,
    ".jpeg": _load_image,
    ".webp": _load_image,
}


# -- what is printed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One finding: its topic, a sentence, and the remedy, empty where nothing is wrong."""

    topic: str
    text: str
    remedy: str = ""


@contextmanager
def require_vllm() -> Iterator[None]:
    """Refuse in one sentence where an import in the context fails for want of vLLM."""
    try:
        yield
    except ImportError as error:
        got = shorten(str(error), 300).rstrip(".")
        remedy = '"mmkit doctor" tells what is wrong.'
        raise MmkitError("mmkit", "a vLLM that can be imported", got, remedy) from error


def silence_logs() -> None:
    """Leave the logs of other libraries out of a command's output, and the hub out of reading.

    Environment variables that are set already stay.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    # else Python prints warnings for which nobody has a handler
    logging.getLogger().addHandler(logging.NullHandler())


def describe_error(error: Exception) -> str:
    """Return the text of an exception for the end of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return shorten(f"{type(error).__name__}: {error}", 300).rstrip(".")


def shorten(text: str, width: int) -> str:
    """Return a text as one line of at most so many characters."""
    line = " ".join(text.split())
    if len(line) > width:
        line = line[: width - 1] + "…"
    return line


def count_noun(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``3 rows``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def describe_pieces(plan: Plan) -> str:
    """Return whether text tokenized around items has other ids, with an example.

    It is empty where no caller writes a target into a text.
    """
    comparison = compare_pieces(plan)
    if comparison is None:
        return ""
    tried = f"{comparison.num_prompts} prompts"
    if not comparison.differences:
        return f"Text before and after an item has the same ids tokenized apart, in {tried}."
    difference = comparison.differences[0]
    whole = spell_ids(plan, difference.whole)
    pieces = spell_ids(plan, difference.pieces)
    return (
        f"Text before and after an item has other ids tokenized apart, in "
        f"{len(comparison.differences)} of {tried}: {difference.prompt!r} is {whole} here, and "
        f"{pieces} apart."
    )


def spell_ids(plan: Plan, ids: Sequence[int]) -> str:
    """Return the tokens of ids, separated by spaces."""
    assert plan.vocabulary is not None
    tokens = plan.vocabulary.tokenizer.convert_ids_to_tokens(list(ids))
    return " ".join([str(token).translate(VISIBLE) for token in tokens])


VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "▁": "␣", "Ġ": "␣", "Ċ": "⏎", " ": "␣"})
"""Makes white space visible, also as tokenizers write it."""
