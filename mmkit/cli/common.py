"""Common code of the subcommands: a checkpoint, the spec that is bound to it, and the items of a
request."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from typer import Argument, Option

from ..errors import MmkitError, SpecError
from ..language.items import ItemType
from ..model_spec import ModelSpec
from ..plan.plan import Plan

Spec = Annotated[
    str, Argument(metavar="SPEC", help="A spec, as package.module:SPEC.", show_default=False)
]
FOLDER = Option(metavar="DIR", help="Folder of a checkpoint; it needs no weights.")
Config = Annotated[Path, FOLDER]
Trust = Annotated[bool, Option("--trust-remote-code", help="Run code that the checkpoint brings.")]


def shipped(path: str) -> Path:
    """A file of the repository that the wheel holds as well: see pyproject.toml."""
    cli = Path(__file__).parent
    own = cli / "shipped" / path
    return own if own.exists() else cli.parents[1] / path


def checkpoint(folder: str | Path, option: str = "--config") -> Path:
    """The folder with a config.json that an option names.

    Raises:
        MmkitError: there is no such folder, or it has no config.json.
    """
    path = Path(folder)
    if (path / "config.json").is_file():
        return path
    got = "a file" if path.exists() else "no such folder"
    if path.is_dir():
        got = "a folder without one"
    remedy = "Give the folder of a checkpoint."
    raise MmkitError(f"{option} {folder}", "a folder with a config.json", got, remedy)


def open_checkpoint(spec: ModelSpec, folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """A spec, bound to what vLLM reads of a checkpoint: config, tokenizer and processor files; no
    weights are needed.

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
    path = checkpoint(folder)
    with needs_vllm():
        from ..testing import processors
    embeds = any(modality.embeds for modality in spec.modalities)
    options = {"enable_mm_embeds": embeds, "trust_remote_code": trust_remote_code}
    remedy = "" if trust_remote_code or not _brings_code(path) else _UNTRUSTED
    try:
        config = processors.load_config_for_spec(path, **options)
        return processors.make_processor(spec.classes, config).info  # a processor binds its spec
    except SpecError as error:
        error.args = (f"{error} {remedy}".rstrip(),)
        raise
    except MmkitError:
        raise
    except Exception as error:
        needs_code = remedy and "trust_remote_code" in str(error)
        got = "one that needs its own code" if needs_code else reason(error)
        where = f"--config {folder}"
        raise MmkitError(where, "a checkpoint that vLLM can read", got, remedy) from error


_UNTRUSTED = (
    "The checkpoint's own code was not run: --trust-remote-code runs it. If it is your own "
    'package, "pip install -e ." makes its plugin known to vLLM and transformers.'
)


def _brings_code(folder: Path) -> bool:
    """Whether a file of a checkpoint names Python code beside it."""
    return any(
        '"auto_map"' in file.read_text(errors="replace") for file in folder.glob("*config.json")
    )


# -- items ---------------------------------------------------------------------------------------


def parse_items(forms: Iterable[str], plan: Plan) -> dict[str, list[Any]]:
    """The items of a request, by modality; see `parse_item`."""
    data: dict[str, list[Any]] = {}
    for form in forms:
        name, value = parse_item(form, plan)
        data.setdefault(name, []).append(value)
    return data


def parse_item(form: str, plan: Plan) -> tuple[str, Any]:
    """The modality and the item that ``modality=FORM`` means.

    FORM is ``zeros`` (the smallest item), sizes as ``9x4`` (the shape of a tensor, width x height
    of an image, frames x width x height of a video, samples of audio, characters of a text), JSON
    (a list, or the dict of a record), or a file: .json (a text, too), .npy or an image.

    Raises:
        MmkitError: another form, an unknown modality, or JSON or a file that cannot be read.
    """
    name, separator, text = form.partition("=")
    where = f"--item {brief(form, 100)}"
    if not separator or name not in plan.modalities:
        expected = f"modality=FORM with a modality among {', '.join(plan.modalities)}"
        raise MmkitError(where, expected, repr(name))
    kind = plan.modalities[name].item
    if text == "zeros":
        return name, (kind.small() or kind.candidates())[0]
    if re.fullmatch(r"\d+(x\d+)*", text):
        return name, _of_sizes(kind, tuple(map(int, text.split("x"))), where)
    suffix, is_json = Path(text).suffix.lower(), text.lstrip().startswith(("{", "["))
    if not is_json and suffix not in _READERS:
        expected = f"zeros, {kind.size_hint}, or a file ({', '.join(_READERS)})"
        raise MmkitError(where, expected, repr(text))
    try:
        return name, json.loads(text) if is_json else _READERS[suffix](Path(text))
    except (OSError, ValueError, TypeError) as error:
        what = "JSON" if is_json else f"a {suffix} file that can be read"
        raise MmkitError(where, what, reason(error)) from error


def _of_sizes(kind: ItemType, sizes: tuple[int, ...], where: str) -> Any:
    count = len(kind.dummy_sizes) or kind.ndim  # those of vLLM's items leave channels out
    if kind.parts:
        raise MmkitError(where, kind.size_hint, "sizes")
    if len(sizes) != count:
        raise MmkitError(where, f"{kind.size_hint}, {count} size(s)", str(len(sizes)))
    if kind.dummy_sizes and 0 in sizes:
        raise MmkitError(where, "sizes of at least 1", "x".join(map(str, sizes)))
    return kind.blank(*sizes)


def _read_image(path: Path) -> Any:
    from PIL import Image as PILImage

    return PILImage.open(path).convert("RGB")


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".npy": np.load,  # which unpickles nothing
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), _read_image),
}


# -- what is said ----------------------------------------------------------------------------------


@contextmanager
def needs_vllm() -> Iterator[None]:
    """Say in one sentence that vLLM cannot be imported."""
    try:
        yield
    except ImportError as error:
        got, remedy = brief(str(error), 300).rstrip("."), '"mmkit doctor" tells what is wrong.'
        raise MmkitError("mmkit", "a vLLM that can be imported", got, remedy) from error


def quiet() -> None:
    """Keep the logs of others out of a command's output, and the hub out of reading a folder;
    unless asked for."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    # else Python prints warnings for which nobody has a handler
    logging.getLogger().addHandler(logging.NullHandler())


def reason(error: Exception) -> str:
    """The text of an exception for the end of a sentence."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return brief(f"{type(error).__name__}: {error}", 300).rstrip(".")


def brief(text: str, width: int) -> str:
    """One line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def plural(count: int, what: str) -> str:
    """A count with its noun: ``1 row``, ``3 rows``."""
    return f"{count} {what}{'s' * (count != 1)}"
