"""Hypothesis strategies for requests: items, and prompts around them.

Strategies draw items as samples: small frozen objects whose `repr` is the code that makes them
again, so a failure can be copied into a test. `value()` is the item as a caller sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from io import BytesIO
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL.Image import fromarray

from ..errors import write_message
from ..language.items import Between, ItemType
from ..language.items.lists import List
from ..language.items.media import Audio, Image, Video
from ..language.items.optional import OptionalPart
from ..language.items.record import Record
from ..language.items.tensor import Tensor, Text
from ..language.node import dependencies

# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A well-formed request, with the order of its items in the prompt.

    Attributes:
        prompt: token ids, as a caller writes them.
        items: per modality, samples.
        kwargs: `mm_processor_kwargs`.
        order: (modality, index) of the items that stand in the prompt, in prompt order; the other
            items are inserted.
    """

    prompt: list[int]
    items: Mapping[str, Sequence[Sample]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[tuple[str, int], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of items, by modality."""
        counts = {}
        for name, samples in self.items.items():
            if samples:
                counts[name] = len(samples)
        return counts

    def data(self) -> dict[str, list[Any]]:
        """Return the items as a caller writes them into `multi_modal_data`."""
        data = {}
        for name, samples in self.items.items():
            if samples:
                data[name] = [sample.value() for sample in samples]
        return data

    def __repr__(self) -> str:
        options = f", kwargs={dict(self.kwargs)!r}" if self.kwargs else ""
        return f"Request({self.prompt!r}, {dict(self.items)!r}{options})"


def for_each(values: SearchStrategy[Any], check: Callable[[Any], Any], **options: Any) -> None:
    """Call a check with drawn values, for example the requests of a subject.

    The settings come from the current profile, but a check may be slow, and only one error is
    raised.

    Args:
        values: a strategy, for example `Subject.requests()`.
        check: a function that raises where a value fails; the final error is for the smallest
            failing value.
        options: Hypothesis settings, for example `max_examples`.
    """

    @settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # a group of errors has no message of its own; the error of the smallest value has
        report_multiple_bugs=False,
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
        verbosity=Verbosity.quiet,  # the error says what is wrong
        **options,
    )
    @given(values)
    def check_drawn(value: Any) -> None:
        check(value)

    check_drawn()


# -- samples ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One item, as the arguments that make it: a seed, and the arguments of its class."""

    seed: int

    def value(self) -> Any:
        """Return the item as a caller sends it."""
        raise NotImplementedError

    def list_forms(self) -> list[Any]:
        """Return the same item in all containers."""
        return [self.value()]

    def other(self) -> Sample:
        """Return a sample of the same shape with other content."""
        return replace(self, seed=self.seed + 1)

    @property
    def random(self) -> np.random.RandomState:
        """The generator that its content is drawn from."""
        return np.random.RandomState(self.seed)


@dataclass(frozen=True)
class PlainSample(Sample):
    """A value of a user's strategy, sent as it is."""

    item: Any

    def value(self) -> Any:
        return self.item

    def other(self) -> Sample:
        return self


def as_sample(drawn: Any) -> Sample:
    """Return a drawn sample as it is, and any other drawn value as a sample."""
    if isinstance(drawn, Sample):
        return drawn
    return PlainSample(0, drawn)


@dataclass(frozen=True)
class TensorSample(Sample):
    """A tensor of random values.

    Attributes:
        shape: its shape.
        dtype: its dtype. Floats are between -bound and bound (at most 4), integers between `least`
            and bound.
        bound: the largest value.
        container: a key of `_CONTAINERS`.
        least: the smallest integer; None for -bound.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    bound: float = 4.0
    container: str = "torch"
    least: int | None = None

    def tensor(self) -> torch.Tensor:
        """Return the item as a tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        if dtype.is_floating_point:
            # multiples of a power of two survive every floating dtype
            eighths = torch.randint(-8, 9, self.shape, generator=generator)
            return (eighths / 8 * min(self.bound, 4.0)).to(dtype)
        least = 0
        most = 1
        if dtype != torch.bool:
            limits = torch.iinfo(dtype)
            least = -int(self.bound) if self.least is None else self.least
            least = max(limits.min, least)
            most = min(limits.max, int(self.bound))
        return torch.randint(least, most + 1, self.shape, generator=generator).to(dtype)

    def value(self) -> Any:
        return _CONTAINERS[self.container](self.tensor())

    def list_forms(self) -> list[Any]:
        values = []
        for container in containers(self.dtype, self.shape):
            values.append(_CONTAINERS[container](self.tensor()))
        return values


def containers(dtype: str, shape: Sequence[int]) -> list[str]:
    """Return the names of the containers in which callers may send a tensor.

    Numpy lacks bfloat16, an empty list has lost its shape, and bool has no wider dtype.
    """
    names = list(_CONTAINERS)
    if dtype == "bfloat16":
        names.remove("numpy")
    if 0 in shape:
        names.remove("list")
    if dtype == "bool":
        names.remove("wide")
    return names


def _keep_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _make_strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor that is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _make_wide_array(tensor: torch.Tensor) -> Any:
    """Return an array of float64, which items accept in place of their own dtype."""
    return tensor.double().numpy()


_CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": _keep_tensor,
    "strided": _make_strided,
    "numpy": torch.Tensor.numpy,
    "list": torch.Tensor.tolist,
    "wide": _make_wide_array,
}


ALPHABET = "aZ0 \u00e9\u6f22\U0001f600"
"""The letters of drawn texts whose item type states none: characters of one to four bytes."""


@dataclass(frozen=True)
class TextSample(Sample):
    """A text of `length` characters of an alphabet, with the text `spells` somewhere in it."""

    length: int
    alphabet: str = ALPHABET
    spells: str = ""

    def value(self) -> str:
        random = self.random
        text = "".join(random.choice(list(self.alphabet), self.length))
        if not self.spells:
            return text
        start = random.randint(0, self.length - len(self.spells) + 1)
        end = start + len(self.spells)
        return text[:start] + self.spells + text[end:]


@dataclass(frozen=True)
class RecordSample(Sample):
    """A record of samples; the seed chooses the part that `other()` changes."""

    parts: Mapping[str, Sample]

    def value(self) -> dict[str, Any]:
        return {name: part.value() for name, part in self.parts.items()}

    def list_forms(self) -> list[Any]:
        """Return each part in all of its containers, and the parts in another order.

        In that order, the parts that are absent are missing.
        """
        forms = {name: part.list_forms() for name, part in self.parts.items()}
        count = max(len(of_part) for of_part in forms.values())
        values: list[dict[str, Any]] = []
        for index in range(count):
            value = {}
            for name, of_part in forms.items():
                # a part with fewer forms than another repeats them
                value[name] = of_part[index % len(of_part)]
            values.append(value)
        reordered = {}
        for name, part in reversed(values[0].items()):
            if part is not None:
                reordered[name] = part
        return values + [reordered]

    def other(self) -> Sample:
        names: list[str] = []
        for name, part in self.parts.items():
            if part.other() != part:  # there is another one
                names.append(name)
        if not names:
            return self
        name = names[self.seed % len(names)]
        return replace(self, parts={**self.parts, name: self.parts[name].other()})


@dataclass(frozen=True)
class ListSample(Sample):
    """A list of samples; the seed chooses the element that `other()` changes."""

    elements: tuple[Sample, ...]

    def value(self) -> list[Any]:
        return [element.value() for element in self.elements]

    def list_forms(self) -> list[Any]:
        """Return each element in all of its containers, in a list and in a tuple."""
        forms = [element.list_forms() for element in self.elements]
        count = max([len(of_element) for of_element in forms], default=1)
        values: list[Any] = []
        for index in range(count):
            # an element with fewer forms than another repeats them
            values.append([of_element[index % len(of_element)] for of_element in forms])
        return values + [tuple(values[0])]

    def other(self) -> Sample:
        if not self.elements:
            return self
        elements = list(self.elements)
        position = self.seed % len(elements)
        elements[position] = elements[position].other()
        return replace(self, elements=tuple(elements))


@dataclass(frozen=True)
class AbsentSample(Sample):
    """An optional part of a record that is absent."""

    def value(self) -> None:
        return None

    def other(self) -> Sample:
        return self


@dataclass(frozen=True)
class ImageSample(Sample):
    """An image of RGB noise: as PIL's image, as `numpy`, or as a `chw` tensor."""

    width: int
    height: int
    container: str = "pil"

    def pixels(self) -> np.ndarray[Any, Any]:
        """Return the pixels, uint8 (height, width, 3)."""
        return self.random.randint(0, 256, (self.height, self.width, 3), dtype=np.uint8)

    def value(self) -> Any:
        pixels = self.pixels()
        # a `chw` tensor of width 3 would be taken for one with channels last
        if self.container == "chw" and self.width != 3:
            return torch.from_numpy(pixels).permute(2, 0, 1)
        if self.container == "numpy":
            return pixels
        return fromarray(pixels)

    def transparent(self) -> bytes:
        """Return a half transparent PNG file of the pixels: a part of its background shows."""
        file = BytesIO()
        picture = fromarray(self.pixels())
        picture.putalpha(128)
        picture.save(file, "PNG")
        return file.getvalue()

    def list_forms(self) -> list[Any]:
        return [replace(self, container=container).value() for container in ("pil", "numpy")]


@dataclass(frozen=True)
class VideoSample(Sample):
    """A video of RGB noise; with `metadata` if wanted, which says one frame per second."""

    frames: int
    width: int
    height: int
    metadata: bool = False

    def value(self) -> Any:
        shape = (self.frames, self.height, self.width, 3)
        pixels = self.random.randint(0, 256, shape, dtype=np.uint8)
        if not self.metadata:
            return pixels
        metadata = {
            "fps": 1.0,
            "duration": float(self.frames),
            "total_num_frames": self.frames,
            "frames_indices": list(range(self.frames)),
            "do_sample_frames": False,
            "video_backend": "opencv",
        }
        return pixels, metadata


@dataclass(frozen=True)
class AudioSample(Sample):
    """Audio of normal noise, with a sampling rate in Hz where `rate` states one."""

    length: int
    rate: int | None = None

    def value(self) -> Any:
        samples = self.random.randn(self.length).astype(np.float32) / 8
        if self.rate is None:
            return samples
        return samples, self.rate


# -- memory of the caller --------------------------------------------------------------------------


def overwrite(sample: Sample, value: Any) -> None:
    """Put other content into the memory of an item that was sent.

    A caller does the same who uses the memory for the next item. Values of a user's strategy stay
    as they are, since they are sent again.

    Args:
        sample: the sample that made the item.
        value: the item.
    """
    if isinstance(sample, RecordSample):
        for name, part in sample.parts.items():
            overwrite(part, value[name])
    elif isinstance(sample, ListSample):
        for element, value_of_element in zip(sample.elements, value, strict=True):
            overwrite(element, value_of_element)
        value.clear()
    elif not isinstance(sample, PlainSample):
        _fill(value)


def _fill(value: Any) -> None:
    if isinstance(value, tuple):
        for part in value:
            _fill(part)
    elif isinstance(value, dict):
        value.clear()
    elif isinstance(value, list):
        value[:] = value[:1] * len(value)
    elif hasattr(value, "getbands"):  # PIL's image
        value.paste((1, 2, 3), (0, 0, *value.size))
    elif isinstance(value, torch.Tensor):
        value.fill_(1)
    elif isinstance(value, np.ndarray):
        value[...] = 1


# -- strategies for items --------------------------------------------------------------------------

SEEDS = st.integers(0, 3)  # few, so that items repeat

# The magnitude of drawn integers that only their dtype bounds.
_MAX_INTEGER = (1 << 31) - 1


@singledispatch
def items(kind: ItemType) -> SearchStrategy[Sample]:
    """Return a strategy for samples of a bound item type.

    Boundary sizes come often, also extreme aspect ratios, in all containers and dtypes. Shrinks
    towards seed 0, the smallest size, and a torch tensor or a PIL image.

    Args:
        kind: a bound item type. `items.register` adds the strategy of your own type.
    """
    remedy = "Give samples= a strategy for its modality."
    raise TypeError(
        write_message("items()", "one of mmkit's item types", type(kind).__name__, remedy)
    )


@items.register
def _draw_images(kind: Image) -> SearchStrategy[Sample]:
    """Return a strategy for images.

    It shrinks towards seed 0, small sides, and a PIL image.
    """
    names = ["pil", "numpy"]
    if kind.takes_only_pictures:
        names.append("chw")
    return _draw_media(ImageSample, kind, (256, 256), st.sampled_from(names))


@items.register
def _draw_videos(kind: Video) -> SearchStrategy[Sample]:
    """Return a strategy for videos.

    It shrinks towards seed 0, few frames and small sides.
    """
    return _draw_media(VideoSample, kind, (8, 128, 128), st.just(kind.metadata))


@items.register
def _draw_audio(kind: Audio) -> SearchStrategy[Sample]:
    """Return a strategy for sounds.

    It shrinks towards seed 0 and a short length.
    """
    rate = kind.rate and int(kind.rate)
    return _draw_media(AudioSample, kind, (1 << 15,), st.just(rate))


def _draw_media(
    sample_class: Callable[..., Sample],
    kind: Any,
    most: Sequence[int],
    last_argument: SearchStrategy[Any],
) -> SearchStrategy[Sample]:
    """Return a strategy for samples of a seed, sizes and one other argument.

    Shrinks towards seed 0 and the smallest sizes.

    Args:
        sample_class: `ImageSample`, `VideoSample` or `AudioSample`.
        kind: the bound item type.
        most: the largest size to draw in each dimension.
        last_argument: a strategy for the last argument of the sample.
    """
    sizes = []
    for index, bound in enumerate(kind.bounds()):
        largest = [item_sizes[index] for item_sizes in kind.largest]
        sizes.append(sides(largest, bound, most[index]))

    def make_sample(seed: int, size: Sequence[int], argument: Any) -> Sample:
        return sample_class(seed, *size, argument)

    accepted_sizes = st.tuples(*sizes).map(kind.nearest)
    return st.builds(make_sample, SEEDS, accepted_sizes, last_argument)


def sides(largest: Sequence[int], bound: Between, most: int) -> SearchStrategy[int]:
    """Return a strategy for sizes from the least to the size of the largest item.

    Boundary sizes come often. Shrinks towards the least.

    Args:
        largest: the sizes of the largest items.
        bound: the least and the most accepted size.
        most: the largest size that is drawn, since larger items are slow; an upper bound of up to
            four times this number is drawn, too.
    """
    least = bound.least
    limit = max(least, min(max(largest), most))
    if bound.most <= 4 * most:
        limit = max(limit, bound.most)
    candidates = {least, least + 1, least + 2}
    for size in list(largest) + [limit]:
        candidates.update([size - 1, size, size + 1])
    edges = [size for size in sorted(candidates) if least <= size <= limit]
    return st.sampled_from(edges) | st.integers(least, limit)


# The largest number of elements of a list that is drawn, beyond the least.
_MAX_EXTRA_ELEMENTS = 8

# The largest size of a tensor or a text that is drawn, beyond the least; the most comes besides.
_MAX_EXTRA_SIZE = 64


def _draw_size(least: int, most: int) -> SearchStrategy[int]:
    """Return a strategy for sizes.

    It shrinks towards the least size.
    """
    ends = sorted({least, most})
    return st.sampled_from(ends) | st.integers(least, min(most, least + _MAX_EXTRA_SIZE))


@items.register
def _draw_tensors(kind: Tensor) -> SearchStrategy[Sample]:
    """Return a strategy for tensors.

    It shrinks towards seed 0, the smallest shape, and a torch tensor.
    """
    bounds = kind.bounds()
    sizes = [_draw_size(bound.least, bound.most) for bound in bounds]
    names = containers(kind.dtype, [bound.least for bound in bounds])
    least: Any = None
    most: Any = kind.bound
    if isinstance(kind.bound, Between):
        least = kind.bound.least
        most = kind.bound.most
    elif kind.bound is None:
        most = _MAX_INTEGER

    def make_sample(seed: int, shape: tuple[int, ...], container: str) -> Sample:
        return TensorSample(seed, shape, kind.dtype, float(most), container, least)

    return st.builds(make_sample, SEEDS, st.tuples(*sizes), st.sampled_from(names))


@items.register
def _draw_texts(kind: Text) -> SearchStrategy[Sample]:
    """Return a strategy for texts.

    It shrinks towards seed 0 and a short text.
    """
    alphabet = st.just(kind.alphabet or ALPHABET)
    return st.builds(TextSample, SEEDS, _draw_size(kind.least, kind.most), alphabet)


@items.register
def _draw_records(kind: Record) -> SearchStrategy[Sample]:
    """Return a strategy for records.

    It shrinks as the parts do. The bound of a part may depend on the parts before it.
    """

    # made once: to make a strategy takes longer than to draw from it
    strategies: dict[str, SearchStrategy[Sample]] = {}
    for name, part in kind.parts.items():
        if not dependencies(part):
            strategies[name] = items(part)

    @st.composite
    def draw_record(draw: Any) -> Sample:
        parts: dict[str, Sample] = {}
        values: dict[str, Any] = {}
        for name in kind.parts:
            if name in strategies:
                parts[name] = draw(strategies[name])
            else:
                parts[name] = draw(items(kind.part(name, values)))
            if len(strategies) < len(kind.parts):
                part = kind.part(name, values)
                values[name] = part.canonical(parts[name].value(), name)
        return RecordSample(draw(SEEDS), parts)

    return draw_record()


@items.register
def _draw_lists(kind: List) -> SearchStrategy[Sample]:
    """Return a strategy for lists.

    It shrinks towards few elements, and as the elements do.
    """

    most = min(kind.most, kind.least + _MAX_EXTRA_ELEMENTS)
    elements = st.lists(items(kind.element), min_size=kind.least, max_size=most).map(tuple)
    return st.builds(ListSample, SEEDS, elements)


@items.register
def _draw_optional_parts(kind: OptionalPart) -> SearchStrategy[Sample]:
    """Return a strategy for parts that may be absent.

    It shrinks towards an absent one.
    """
    return st.just(AbsentSample(0)) | items(kind.item)


def spelling(
    samples: SearchStrategy[Sample], kind: ItemType, words: Sequence[str]
) -> SearchStrategy[Sample]:
    """Return a strategy for samples of which some spell a word where a text has room.

    Shrinks towards samples that spell none.

    Args:
        samples: a strategy for samples of the type.
        kind: a bound item type.
        words: for example the special tokens of a tokenizer.
    """
    has_text = any(isinstance(leaf, Text) for leaf in kind.leaves())
    if not words or not has_text:
        return samples
    drawn_words = st.just("") | st.sampled_from(sorted(words))
    return st.builds(_spell, samples, drawn_words, st.just(kind))


def _spell(sample: Sample, word: str, kind: Any) -> Sample:
    """Return a sample whose texts spell a word, where they have room for it and its letters."""
    if isinstance(kind, OptionalPart):
        kind = kind.item
    if isinstance(sample, RecordSample):
        parts = {}
        for name, part in sample.parts.items():
            parts[name] = _spell(part, word, kind.parts[name])
        return replace(sample, parts=parts)
    if isinstance(sample, ListSample):
        elements = [_spell(element, word, kind.element) for element in sample.elements]
        return replace(sample, elements=tuple(elements))
    if isinstance(sample, TextSample) and can_spell(kind, word, sample.length):
        return replace(sample, spells=word)
    return sample


def leave_out_parts(sample: Sample, kind: Any) -> list[Sample]:
    """Return samples that lack one optional part that a sample has, one for each such part.

    Args:
        sample: of the type.
        kind: an item type.
    """
    if isinstance(kind, OptionalPart):
        kind = kind.item
    smaller: list[Sample] = []
    if isinstance(sample, RecordSample):
        for name, part in sample.parts.items():
            kind_of_part = kind.parts[name]
            others = leave_out_parts(part, kind_of_part)
            if kind_of_part.is_optional and not isinstance(part, AbsentSample):
                others.append(AbsentSample(0))
            for other in others:
                smaller.append(replace(sample, parts={**sample.parts, name: other}))
    elif isinstance(sample, ListSample):
        for index, element in enumerate(sample.elements):
            for other in leave_out_parts(element, kind.element):
                elements = list(sample.elements)
                elements[index] = other
                smaller.append(replace(sample, elements=tuple(elements)))
    return smaller


def can_spell(kind: Text, word: str, length: int) -> bool:
    """Return whether a text of this length, in the alphabet of its type, can contain a word."""
    if len(word) > length:
        return False
    return kind.alphabet is None or set(word) <= set(kind.alphabet)


def items_of_vllm() -> dict[str, SearchStrategy[Sample]]:
    """Return strategies for small samples of vLLM's own modalities, by name.

    They shrink towards seed 0 and the smallest sizes.
    """
    # of a side of one or three pixels, transformers takes that for the channels
    image_side = sides([96], Between(4, 96), 96)
    video_side = sides([64], Between(4, 64), 64)
    frames = sides([6], Between(1, 6), 6)
    image_containers = st.sampled_from(["pil", "numpy"])
    return {
        "image": st.builds(ImageSample, SEEDS, image_side, image_side, image_containers),
        "video": st.builds(VideoSample, SEEDS, frames, video_side, video_side),
        "audio": items(Audio(largest=((16000,),))),
    }
