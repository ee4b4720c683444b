"""Items as a command line writes them, and as messages name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..items import ItemType
from ..plan import Plan
from .common import UsageError, brief, plural, reason


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
    (a list, or the dict of a record), or a file: .json (a text, too), .npy, .safetensors with one
    tensor, or an image.

    Raises:
        UsageError: another form, an unknown modality, or JSON or a file that cannot be read.
    """
    name, separator, text = form.partition("=")
    where = f"--item {brief(form, 100)}"
    if not separator or name not in plan.modalities:
        expected = f"modality=FORM with a modality among {', '.join(plan.modalities)}"
        raise UsageError(where, expected, repr(name))
    kind = plan.modalities[name].item
    suffix = Path(text).suffix.lower()
    try:
        if text == "zeros":
            return name, (kind.small() or kind.candidates())[0]
        if re.fullmatch(r"\d+(x\d+)*", text):
            return name, _of_sizes(kind, tuple(map(int, text.split("x"))), where)
        if text.lstrip().startswith(("{", "[")):
            return name, json.loads(text)
        if suffix in _READERS:
            return name, _READERS[suffix](Path(text))
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        what = f"a {suffix} file that can be read" if suffix in _READERS else "JSON"
        raise UsageError(where, what, reason(error)) from error
    expected = f"zeros, {kind.form}, or a file ({', '.join(_READERS)})"
    raise UsageError(where, expected, repr(text))


def _of_sizes(kind: ItemType, sizes: tuple[int, ...], where: str) -> Any:
    count = len(kind.dummy_sizes) or kind.rank  # those of vLLM's items leave channels out
    if kind.part_names:
        raise UsageError(where, kind.form, "sizes")
    if len(sizes) != count:
        raise UsageError(where, f"{kind.form}, {count} size(s)", str(len(sizes)))
    if kind.dummy_sizes and 0 in sizes:
        raise UsageError(where, "sizes of at least 1", "x".join(map(str, sizes)))
    return kind.blank(*sizes)


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    (tensor,) = load_file(path).values()
    return tensor


def _read_image(path: Path) -> Any:
    from PIL import Image as PILImage

    return PILImage.open(path).convert("RGB")


_READERS: Mapping[str, Callable[[Path], Any]] = {
    ".npy": np.load,  # which unpickles nothing
    ".safetensors": _read_safetensors,
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), _read_image),
}


def describe(value: Any) -> str:
    """An item in a few words: ``6×3``, ``640×480``, ``8 frames of 64×64``, ``ids 5, name 3
    characters``."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {describe(part)}" for name, part in value.items())
    if isinstance(value, str):
        return plural(len(value), "character")
    media = getattr(value, "media", value)
    if hasattr(media, "getbands"):
        return "{}×{}".format(*media.size)
    if isinstance(media, tuple):  # samples with their rate, or frames with metadata
        return describe(media[0])
    shape = tuple(np.shape(media))
    if len(shape) == 4 and shape[-1] == 3:
        return f"{shape[0]} frames of {shape[2]}×{shape[1]}"
    return "×".join(map(str, shape)) or "a number"
