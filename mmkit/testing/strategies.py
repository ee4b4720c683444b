"""Hypothesis strategies for requests: items, and prompts around them.

Strategies draw items as samples: small frozen objects whose `repr` is the code that makes them
again, so a failure can be copied into a test. `value()` is the item as a caller sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from io import BytesIO
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL.Image import fromarray

from ..errors import write_message
from ..language.items import Between, ItemType
from ..language.items.media import Audio, Image, Video
from ..language.items.record import Record
from ..language.items.tensor import Tensor, Text


@dataclass(frozen=True)
class Sample:
    """One item, as the arguments that make it: a seed, and those of its class."""

    seed: int

    def value(self) -> Any:
        """The item as a caller sends it."""
        raise NotImplementedError

    def same(self) -> list[Any]:
        """The same item in other containers."""
        return [self.value()]

    def other(self) -> Sample:
        """A sample of the same shape with other content."""
        return replace(self, seed=self.seed + 1)

    @property
    def random(self) -> np.random.RandomState:
        """What its content is drawn from."""
        return np.random.RandomState(self.seed)


@dataclass(frozen=True)
class PlainSample(Sample):
    """A value of a user's strategy, sent as it is."""

    given: Any

    def value(self) -> Any:
        return self.given

    def other(self) -> Sample:
        return self


def overwrite(sample: Sample, value: Any) -> None:
    """Put other content into the memory of an item that was sent, as a caller does who uses it for
    the next one; values of a user's strategy stay, which are sent again.

    Args:
        sample: the sample that made the item.
        value: the item.
    """
    if isinstance(sample, RecordSample):
        for name, part in sample.parts.items():
            overwrite(part, value[name])
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
    elif hasattr(value, "getbands"):
        value.paste((1, 2, 3), (0, 0, *value.size))
    elif isinstance(value, torch.Tensor):
        value.fill_(1)
    elif isinstance(value, np.ndarray):
        value[...] = 1


def as_sample(drawn: Any) -> Sample:
    """A sample for a drawn value; samples stay as they are."""
    return drawn if isinstance(drawn, Sample) else PlainSample(0, drawn)


_CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    "strided": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "numpy": torch.Tensor.numpy,
    "list": torch.Tensor.tolist,
    "wide": lambda tensor: tensor.double().numpy(),
}


def containers(dtype: str, shape: Sequence[int]) -> list[str]:
    """The containers in which callers may send a tensor, for `TensorSample`. Numpy lacks bfloat16;
    an empty list has lost its shape."""
    refused = {"numpy": dtype == "bfloat16", "list": 0 in shape, "wide": dtype == "bool"}
    return [name for name in _CONTAINERS if not refused.get(name)]


@dataclass(frozen=True)
class TensorSample(Sample):
    """A tensor with values between -bound and bound; integers for an integer dtype, which are
    those from `least` on, if that is known."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    bound: float = 4.0
    container: str = "torch"
    least: int | None = None

    def tensor(self) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        random = torch.Generator().manual_seed(self.seed)
        if dtype.is_floating_point:
            # multiples of a power of two survive every floating dtype
            eighths = torch.randint(-8, 9, self.shape, generator=random)
            return (eighths / 8 * min(self.bound, 4.0)).to(dtype)
        least, most = 0, 1
        if dtype != torch.bool:
            limits = torch.iinfo(dtype)
            stated = -int(self.bound) if self.least is None else self.least
            least, most = max(limits.min, stated), min(limits.max, int(self.bound))
        return torch.randint(least, most + 1, self.shape, generator=random).to(dtype)

    def value(self) -> Any:
        return _CONTAINERS[self.container](self.tensor())

    def same(self) -> list[Any]:
        return [_CONTAINERS[form](self.tensor()) for form in containers(self.dtype, self.shape)]


ALPHABET = "aZ0 \u00e9\u6f22\U0001f600"
"""Of drawn texts, where the spec states none: characters of one to four bytes."""


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
        return text[:start] + self.spells + text[start + len(self.spells) :]


@dataclass(frozen=True)
class RecordSample(Sample):
    """A record of samples; the seed chooses the part that `other()` changes."""

    parts: Mapping[str, Sample]

    def value(self) -> dict[str, Any]:
        return {name: part.value() for name, part in self.parts.items()}

    def same(self) -> list[Any]:
        """Each part in all of its containers, and the parts in another order."""
        forms = [part.same() for part in self.parts.values()]
        rows = islice(zip(*map(cycle, forms), strict=False), max(map(len, forms)))
        values = [dict(zip(self.parts, row, strict=True)) for row in rows]
        return [*values, dict(reversed(values[0].items()))]

    def other(self) -> Sample:
        name = list(self.parts)[self.seed % len(self.parts)]
        return replace(self, parts={**self.parts, name: self.parts[name].other()})


@dataclass(frozen=True)
class ImageSample(Sample):
    """An image of RGB noise: as PIL's image, as `numpy`, or as a `chw` tensor."""

    width: int
    height: int
    container: str = "pil"

    def pixels(self) -> np.ndarray[Any, Any]:
        return self.random.randint(0, 256, (self.height, self.width, 3), dtype=np.uint8)

    def value(self) -> Any:
        pixels = self.pixels()
        if self.container == "chw" and self.width != 3:  # else it would be taken for channels last
            return torch.from_numpy(pixels).permute(2, 0, 1)
        return pixels if self.container == "numpy" else fromarray(pixels)

    def transparent(self) -> bytes:
        """A PNG file of the pixels, half transparent: what it shows depends on the background."""
        file, picture = BytesIO(), fromarray(self.pixels())
        picture.putalpha(128)
        picture.save(file, "PNG")
        return file.getvalue()

    def same(self) -> list[Any]:
        return [replace(self, container=form).value() for form in ("pil", "numpy")]


@dataclass(frozen=True)
class VideoSample(Sample):
    """A video of RGB noise; with `metadata`, that of one frame per second."""

    frames: int
    width: int
    height: int
    metadata: bool = False

    def value(self) -> Any:
        shape = (self.frames, self.height, self.width, 3)
        pixels = self.random.randint(0, 256, shape, dtype=np.uint8)
        facts = {"fps": 1.0, "duration": float(self.frames), "total_num_frames": self.frames}
        indices = {"frames_indices": list(range(self.frames))}
        how = {"do_sample_frames": False, "video_backend": "opencv"}
        return (pixels, {**facts, **indices, **how}) if self.metadata else pixels


@dataclass(frozen=True)
class AudioSample(Sample):
    """Audio of normal noise, with a sampling rate in Hz where `rate` states one."""

    length: int
    rate: int | None = None

    def value(self) -> Any:
        samples = self.random.randn(self.length).astype(np.float32) / 8
        return samples if self.rate is None else (samples, self.rate)


_INTEGERS = (1 << 31) - 1  # magnitude of drawn ones, where only their dtype bounds them

SEEDS = st.integers(0, 3)  # few, so that items repeat


@singledispatch
def items(kind: ItemType) -> SearchStrategy[Sample]:
    """A strategy for samples of a bound item type: boundary sizes first, extreme aspect ratios, all
    containers and dtypes.

    Shrinks towards seed 0, the smallest size, and a torch tensor or a PIL image.
    """
    remedy = "Give samples= a strategy for its modality."
    raise TypeError(
        write_message("items()", "one of mmkit's item types", type(kind).__name__, remedy)
    )


@items.register
def _images(kind: Image) -> SearchStrategy[Sample]:
    forms = ["pil", "numpy"] + ["chw"] * kind.only_pictures
    return _media(ImageSample, kind, (256, 256), st.sampled_from(forms))


@items.register
def _videos(kind: Video) -> SearchStrategy[Sample]:
    return _media(VideoSample, kind, (8, 128, 128), st.just(kind.metadata))


@items.register
def _audio(kind: Audio) -> SearchStrategy[Sample]:
    return _media(AudioSample, kind, (1 << 15,), st.just(kind.rate and int(kind.rate)))


def _media(
    sample: Callable[..., Sample], kind: Any, most: Sequence[int], more: SearchStrategy[Any]
) -> SearchStrategy[Sample]:
    """Samples of a seed, sizes and one other argument."""
    ends = zip(zip(*kind.largest, strict=True), kind.bounds(), most, strict=True)
    sizes = st.tuples(*[sides(*end) for end in ends]).map(kind.nearest)
    return st.builds(lambda seed, size, other: sample(seed, *size, other), SEEDS, sizes, more)


def sides(largest: Sequence[int], bound: Between, most: int) -> SearchStrategy[int]:
    """Sizes from the least to that of the largest item, boundary sizes often. Shrinks towards the
    least.

    Args:
        largest: the sizes of the largest items.
        bound: the least and the most accepted size.
        most: the largest size that is drawn, since larger items are slow; an upper bound of up to
            four times this number is drawn, too.
    """
    least = bound.least
    limit = max(least, min(max(largest), most), bound.most if bound.most <= 4 * most else 0)
    near = [least + 1, *(s + d for s in (*largest, limit) for d in (-1, 0, 1))]
    edges = sorted({least, *(size for size in (*near, least + 2) if least <= size <= limit)})
    return st.sampled_from(edges) | st.integers(least, limit)


def _size(least: int, most: int) -> SearchStrategy[int]:
    return st.sampled_from(sorted({least, most})) | st.integers(least, min(most, least + 64))


@items.register
def _tensors(kind: Tensor) -> SearchStrategy[Sample]:
    ends = [(size.least, size.most) for size in kind.bounds()]
    bound = _INTEGERS if kind.bound is None else kind.bound
    least, most = (bound.least, bound.most) if isinstance(bound, Between) else (None, bound)
    forms = st.sampled_from(containers(kind.dtype, [side for side, _ in ends]))

    def sample(seed: int, shape: tuple[int, ...], form: str) -> Sample:
        return TensorSample(seed, shape, kind.dtype, float(most), form, least)

    return st.builds(sample, SEEDS, st.tuples(*[_size(*end) for end in ends]), forms)


@items.register
def _texts(kind: Text) -> SearchStrategy[Sample]:
    alphabet = st.just(kind.alphabet or ALPHABET)
    return st.builds(TextSample, SEEDS, _size(kind.least, kind.most), alphabet)


def spelling(
    samples: SearchStrategy[Sample], kind: ItemType, words: Sequence[str]
) -> SearchStrategy[Sample]:
    """Samples of an item type, of which some spell one of some words where a text has room.

    Args:
        samples: a strategy for samples of the type.
        kind: a bound item type.
        words: for example the special tokens of a tokenizer.
    """
    kinds = kind.parts.values() if kind.parts else [kind]
    if not words or not any(isinstance(one, Text) for one in kinds):
        return samples
    drawn_words = st.just("") | st.sampled_from(sorted(words))
    return st.builds(_spelled, samples, drawn_words, st.just(kind))


def _spelled(sample: Sample, word: str, kind: Any) -> Sample:
    """A sample whose texts spell a word, where they have room for it and its letters."""
    if isinstance(sample, RecordSample):
        parts = sample.parts.items()
        return replace(sample, parts={n: _spelled(own, word, kind.parts[n]) for n, own in parts})
    if isinstance(sample, TextSample) and can_spell(kind, word, sample.length):
        return replace(sample, spells=word)
    return sample


def can_spell(kind: Text, word: str, length: int) -> bool:
    """Whether a text of this length, and of the alphabet of its type, can have a word in it."""
    letters = kind.alphabet
    return len(word) <= length and (letters is None or {*word} <= {*letters})


@items.register
def _records(kind: Record) -> SearchStrategy[Sample]:
    @st.composite
    def drawn(draw: Any) -> Sample:
        parts: dict[str, Sample] = {}
        values: dict[str, Any] = {}
        for name in kind.parts:
            part = kind.part(name, values)
            parts[name] = draw(items(part))
            values[name] = part.canonical(parts[name].value(), name)
        return RecordSample(draw(SEEDS), parts)

    return drawn()


def items_of_vllm() -> dict[str, SearchStrategy[Sample]]:
    """Small samples for vLLM's own modalities, by name."""
    # of a side of one or three pixels, transformers takes that for the channels
    side, large = (sides([most], Between(4, most), most) for most in (64, 96))
    return {
        "image": st.builds(ImageSample, SEEDS, large, large, st.sampled_from(["pil", "numpy"])),
        "video": st.builds(VideoSample, SEEDS, sides([6], Between(1, 6), 6), side, side),
        "audio": items(Audio(largest=((16000,),))),
    }


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
        """The numbers of items."""
        return {name: len(own) for name, own in self.items.items() if own}

    def data(self) -> dict[str, list[Any]]:
        """The items as a caller writes them into ``multi_modal_data``."""
        return {name: [one.value() for one in own] for name, own in self.items.items() if own}

    def __repr__(self) -> str:
        options = f", kwargs={dict(self.kwargs)!r}" if self.kwargs else ""
        return f"Request({self.prompt!r}, {dict(self.items)!r}{options})"


def for_each(values: SearchStrategy[Any], check: Callable[[Any], Any], **options: Any) -> None:
    """Call a check with drawn values, for example the requests of a subject.

    The settings are those of the current profile, but that a check may be slow, and raises one
    error.

    Args:
        values: a strategy, for example `Subject.requests()`.
        check: a function that raises where a value fails; the final error is that of the smallest
            failing value.
        options: Hypothesis settings, for example `max_examples`.
    """

    @settings(
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,  # a group of them has no message; the smallest is one
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
        verbosity=Verbosity.quiet,  # what is wrong is said by the error
        **options,
    )
    @given(values)
    def holds(value: Any) -> None:
        check(value)

    holds()
