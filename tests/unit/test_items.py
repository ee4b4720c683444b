"""Items: one canonical form per value, complete validation, facts and candidates."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage

from mmkit import Audio, Image, InputError, Tensor, Video, between, cfg, where
from mmkit.expr import Scope

CONFIG = Scope(cfg=SimpleNamespace(n=2, d=3, big=100, size=[8, 4], text="x", minus=-1, half=0.5))
AT = "spec.modality[3]"


def bound(**options):
    return Tensor(**{"shape": (2, 3), **options}).bind(CONFIG)


def canonical(value, **options):
    return bound(**options).canonical(value, AT)


def same(one, other) -> bool:
    """Bit for bit, and in everything that vLLM's hash sees."""
    return (
        (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)
        and one.is_contiguous()
        and not one.requires_grad
        and one.double().numpy().tobytes() == other.double().numpy().tobytes()
    )


def shortly(value) -> str:
    """A stable test id."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype}{tuple(shape)}"


sizes = st.tuples(st.integers(0, 3), st.integers(0, 3)) | st.tuples(st.integers(0, 4)) | st.just(())
# every value is exact in all floating dtypes, so containers of different precision hold the same value
exact = st.integers(-128, 128).map(lambda n: n / 4)


@st.composite
def arrays(draw):
    shape = draw(sizes)
    values = draw(st.lists(exact, min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(values, dtype=np.float32).reshape(shape)


def containers(array):
    """Every accepted way of writing the value of a float32 array."""
    made = {
        "float32": array,
        "float64": array.astype(np.float64),
        "float16": array.astype(np.float16),
        "fortran": array.copy(order="F"),
        # of one element: see test_reversed_dimensions_of_one_element
        "reversed twice": array[..., ::-1].copy()[..., ::-1] if array.ndim and array.shape[-1] > 1 else array,
        "strided": np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
        "torch": torch.from_numpy(array.copy()),
        "half": torch.from_numpy(array.copy()).half(),
        "bfloat16": torch.from_numpy(array.copy()).bfloat16(),
        "double": torch.from_numpy(array.copy()).double(),
        "transposed": torch.from_numpy(np.ascontiguousarray(array.T)).T if array.ndim == 2 else torch.from_numpy(array),
        "parameter": torch.nn.Parameter(torch.from_numpy(array.copy())),
        "result": torch.from_numpy(array.copy()).requires_grad_() * 1,
    }
    made["read-only"] = array.copy()
    made["read-only"].flags.writeable = False
    if array.ndim and array.size:
        made |= {"list": array.tolist(), "tuple": tuple(array.tolist())}
        if np.array_equal(array, np.trunc(array)):
            made["integers"] = array.astype(int).tolist()
    return made


@given(arrays(), st.sampled_from(["float32", "float16", "bfloat16", "float64"]))
def test_equal_values_have_one_form(array, dtype):
    kind = Tensor(shape=array.shape, dtype=dtype).bind(CONFIG)
    wanted = torch.from_numpy(array.copy()).to(kind.torch_dtype)
    for name, value in containers(array).items():
        made = kind.canonical(value, AT)
        assert type(made) is torch.Tensor, name
        assert made.is_contiguous(), name
        assert not made.requires_grad, name
        assert (made.dtype, made.shape) == (kind.torch_dtype, array.shape), name
        assert torch.equal(made, wanted), name
        assert same(kind.canonical(made, AT), made), f"{name}: canonicalising again changes it"


def test_reversed_dimensions_of_one_element():
    assert Tensor(shape=(1,)).bind(CONFIG).canonical(np.ones(1)[::-1], AT).tolist() == [1.0]


@given(arrays())
def test_different_values_have_different_forms(array):
    if array.size:
        kind = Tensor(shape=array.shape).bind(CONFIG)
        other = array.copy()
        other.flat[0] += 0.25
        assert not torch.equal(kind.canonical(array, AT), kind.canonical(other, AT))


@given(st.floats(-60000, 60000))
def test_float64_is_rounded_to_nearest(value):
    made = canonical(np.full((2, 3), value))
    assert (made.numpy() == np.float32(value)).all()
    assert torch.equal(made, canonical([[value] * 3] * 2))
    assert torch.equal(made, canonical(torch.full((2, 3), value, dtype=torch.float64)))


def test_the_callers_data_is_not_changed():
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    canonical(array)[0, 0] = 99
    assert array[0, 0] == 0


def test_no_warning_for_a_tensor_that_requires_grad():
    """torch warns once per process, so a process of its own is not needed, but the warning has to be armed again."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            canonical(torch.ones(2, 3, requires_grad=True))
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_a_bound_is_rounded_as_values_are(dtype):
    """Who clips to a bound in float32 is within it, as is the canonical form of what is within it."""
    kind = bound(dtype=dtype, bound=0.1)
    made = kind.canonical([[0.1] * 3] * 2, AT)
    assert torch.equal(kind.canonical(made, AT), made)
    assert kind.bind(CONFIG) == kind


@pytest.mark.parametrize(("dtype", "value", "limit"), [("float16", 7e4, 1e6), ("float32", 1e200, 1e300)])
def test_the_canonical_form_is_finite(dtype, value, limit):
    try:
        made = canonical(np.full((2, 3), value), dtype=dtype, bound=limit)
    except InputError:
        return
    assert torch.isfinite(made).all()


def test_not_finite_where_allowed():
    value = [[math.nan, math.inf, -math.inf]] * 2
    made = canonical(value, finite=False)
    assert made.isnan()[:, 0].all()
    assert made.isinf()[:, 1:].all()
    assert canonical([[0.0, 1e30, 0.0]] * 2, finite=False, bound=math.inf)[0, 1] == 1e30


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([1.0, 1000.0, 65504.0]))
def test_bounds(value, limit):
    rows = np.full((2, 3), value)
    if abs(value) <= limit:
        assert canonical(rows, bound=limit).dtype == torch.float32
        assert canonical(rows, bound=cfg.big * (limit / 100)).dtype == torch.float32
    else:
        with pytest.raises(InputError, match=r"expected finite values of magnitude <= .*, got .* at \[0, 0\]"):
            canonical(rows, bound=limit)


json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)
odd_arrays = st.builds(
    lambda shape, dtype: np.ones(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.sampled_from(["f2", "f4", "f8", ">f4", "i4", "u2", "bool", "c8", "U3", "O", "g"]),
)


@given(json_like | odd_arrays | odd_arrays.map(lambda a: [a, a]))
def test_whatever_is_sent_is_canonical_or_refused(data):
    kind = bound(shape=(between(1, 3), 2))
    try:
        items = [kind.canonical(value, AT) for value in kind.split(data, AT)]
    except InputError:
        return
    for made in items:
        assert made.dtype == torch.float32
        assert made.shape[1:] == (2,)
        assert 1 <= len(made) <= 3
        assert torch.isfinite(made).all()


# -- integers and bools ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_integers_that_fit_have_one_form(dtype):
    wanted = torch.tensor([0, 5, 100], dtype=getattr(torch, dtype))
    kind = Tensor(shape=(3,), dtype=dtype).bind(CONFIG)
    for name in ("u1", "u2", "u4", "i1", "i2", "i4", "i8"):
        assert same(kind.canonical(np.array([0, 5, 100], name), AT), wanted), name
    for other in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert same(kind.canonical(wanted.to(other), AT), wanted)
    assert same(kind.canonical([0, 5, 100], AT), wanted)
    limits = torch.iinfo(wanted.dtype)
    for odd in (limits.min - 1, limits.max + 1, -(10**30)):
        with pytest.raises(InputError):
            kind.canonical([0, odd, 1], AT)
    edge = kind.canonical(torch.tensor([limits.min, limits.max, 0], dtype=wanted.dtype), AT)
    assert edge.tolist() == [limits.min, limits.max, 0]


def test_bound_of_integers():
    kind = Tensor(shape=(2,), dtype="int64", bound=cfg.big).bind(CONFIG)
    assert kind.canonical([100, -100], AT).tolist() == [100, -100]
    for odd in (101, -102):
        with pytest.raises(InputError):
            kind.canonical([odd, 0], AT)


def test_no_bound_for_integers():
    assert Tensor(shape=(1,), dtype="int64", bound=math.inf).bind(CONFIG).canonical([7], AT).tolist() == [7]


def test_uint64_for_integers():
    assert Tensor(shape=(1,), dtype="int64").bind(CONFIG).canonical(np.array([7], np.uint64), AT).tolist() == [7]


def test_bools():
    kind = Tensor(shape=(2,), dtype="bool").bind(CONFIG)
    wanted = torch.tensor([True, False])
    assert same(kind.canonical(np.array([True, False]), AT), wanted)
    assert same(kind.canonical(wanted, AT), wanted)
    assert same(kind.canonical([True, False], AT), wanted)


# -- one item, several, a batch --------------------------------------------------------------------------------------

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (ROWS, 1),
        (tuple(map(tuple, ROWS)), 1),
        ([ROWS], 1),
        ([ROWS, ROWS], 2),
        ((ROWS, ROWS, ROWS), 3),
        (np.array(ROWS), 1),
        (np.array([ROWS] * 4), 4),
        (torch.tensor([ROWS] * 4), 4),
        (torch.tensor(ROWS), 1),
        ([np.array(ROWS), torch.tensor(ROWS), ROWS], 3),
        ([ROWS, np.array(ROWS)], 2),
        ((np.array(ROWS),), 1),
        (torch.zeros(0, 2, 3), 0),
        ([], 0),
        ((), 0),
    ],
)
def test_splitting(data, count):
    kind = bound()
    made = [kind.canonical(value, AT) for value in kind.split(data, AT)]
    assert len(made) == count
    assert all(same(one, made[0]) for one in made)


def test_splitting_keeps_none_for_items_that_a_uuid_names():
    kind = bound()
    array = np.array(ROWS)
    assert kind.split([None], AT) == [None]
    assert [value is None for value in kind.split([array, None, array], AT)] == [False, True, False]


@given(st.integers(0, 3), st.integers(1, 4))
def test_rank_decides_what_is_one_item(rank, count):
    shape = (2,) * rank
    kind = Tensor(shape=shape).bind(CONFIG)
    batch = np.arange(count * 2**rank, dtype=np.float32).reshape(count, *shape)
    ways = [
        batch,
        torch.from_numpy(batch),
        list(batch),
        tuple(torch.from_numpy(batch)),
        *([batch.tolist()] if rank else []),
    ]
    for way in ways:
        made = [kind.canonical(value, AT) for value in kind.split(way, AT)]
        assert [m.tolist() for m in made] == batch.tolist()
    if rank:
        for way in (batch[0], torch.from_numpy(batch[0]), batch[0].tolist()):
            assert [kind.canonical(v, AT).tolist() for v in kind.split(way, AT)] == [batch[0].tolist()]


@pytest.mark.parametrize("data", [3.0, [3.0], np.float64(3)], ids=repr)
def test_scalars(data):
    kind = Tensor(shape=()).bind(CONFIG)
    assert [kind.canonical(v, AT).item() for v in kind.split(data, AT)] == [3.0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lists_of_numpy_numbers(dtype):
    kind = Tensor(shape=(2,)).bind(CONFIG)
    assert [kind.canonical(v, AT).tolist() for v in kind.split(list(np.ones(2, dtype)), AT)] == [[1.0, 1.0]]


# -- dimensions ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6))
def test_between_includes_both_ends(least, more, length):
    kind = Tensor(shape=(between(least, least + more), cfg.d)).bind(CONFIG)
    value = torch.zeros(length, 3)
    if least <= length <= least + more:
        assert kind.canonical(value, AT).shape == (length, 3)
    else:
        with pytest.raises(InputError, match=f"got shape \\({length}, 3\\)"):
            kind.canonical(value, AT)
    (largest,) = kind.candidates()
    assert largest.shape == (least + more, 3)
    assert kind.canonical(largest, AT) is not None


def test_expressions_in_shapes():
    kind = Tensor(shape=(cfg.n, between(1, cfg.d * 2))).bind(CONFIG)
    assert kind.expected == "a (2, 1..6) float32 tensor"
    assert Tensor(shape=(cfg.n,)).bind(CONFIG).expected == "a (2,) float32 tensor"
    assert kind.facts(torch.zeros(2, 5), 4) == SimpleNamespace(index=4, shape=(2, 5), length=2)
    assert Tensor(shape=()).facts(torch.zeros(()), 0) == SimpleNamespace(index=0, shape=(), length=1)
    assert kind.bind(CONFIG) == kind, "binding again changes nothing"
    assert hash(Tensor(shape=[cfg.n, 3])) == hash(Tensor(shape=(cfg.n, 3)))


def test_largest_shapes():
    kind = Tensor(shape=(between(1, 4), cfg.d), largest=[(1, cfg.d), (cfg.n, 3)]).bind(CONFIG)
    assert [tuple(c.shape) for c in kind.candidates()] == [(1, 3), (2, 3)]
    assert kind.bind(CONFIG) == kind
    assert [tuple(c.shape) for c in Tensor(shape=(between(1, 4),), largest=(1,)).bind(CONFIG).candidates()] == [(1,)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Tensor(shape=(lambda s: 2,)).bind(CONFIG).shape == (2,), id="function in Tensor.shape"),
        pytest.param(lambda: Tensor(shape=(2,), bound=lambda s: 5).bind(CONFIG).bound == 5, id="function as bound"),
        pytest.param(lambda: Audio(largest=4, rate=lambda s: 16).bind(CONFIG).rate == 16, id="function as Audio.rate"),
    ],
)
def test_functions_where_expressions_are_accepted(make):
    assert make()


# -- images ----------------------------------------------------------------------------------------------------------

IMAGE = Image(largest=(cfg.size[0], cfg.size[1])).bind(CONFIG)
PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_equal_rgb_pixels_have_one_form():
    wanted = PILImage.fromarray(PIXELS)
    strided = np.repeat(PIXELS, 2, axis=1)[:, ::2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (PIXELS, torch.from_numpy(PIXELS), np.asfortranarray(PIXELS), strided, wanted):
            made = IMAGE.canonical(value, AT)
            assert isinstance(made, PILImage.Image)
            assert (made.mode, made.size, made.tobytes()) == ("RGB", (5, 4), wanted.tobytes())


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (PILImage.new("RGB", (5, 4)), (5, 4)),
        (PILImage.new("L", (5, 4)), (5, 4)),
        (PIXELS, (5, 4)),
        (torch.zeros(3, 4, 5), (5, 4)),
        (np.zeros((1, 4, 5)), (5, 4)),
        (np.zeros((4, 5, 1), np.float32), (5, 4)),
        (torch.zeros(3, 4, 5, dtype=torch.bfloat16), (5, 4)),
        (SimpleNamespace(media=PILImage.new("RGB", (5, 4))), (5, 4)),
    ],
)
def test_image_facts(value, size):
    made = IMAGE.canonical(value, AT)
    facts = IMAGE.facts(made, 2)
    assert (facts.width, facts.height, facts.index) == (*size, 2)


@pytest.mark.parametrize("value", [torch.zeros(4, 5, 3).bfloat16(), torch.zeros(4, 5, 3, requires_grad=True)])
def test_torch_images_with_channels_last(value):
    made = IMAGE.canonical(value, AT)
    assert IMAGE.facts(made, 0).width == 5


def test_splitting_images():
    image = PILImage.new("RGB", (5, 4))
    assert IMAGE.split(image, AT) == [image]
    assert IMAGE.split([image, image], AT) == [image, image]
    assert IMAGE.split((image,), AT) == [image]
    assert IMAGE.split([image, None], AT) == [image, None]
    assert len(IMAGE.split(PIXELS, AT)) == 1
    assert len(IMAGE.split(np.stack([PIXELS] * 3), AT)) == 3
    assert len(IMAGE.split(torch.zeros(2, 3, 4, 5), AT)) == 2


def test_image_candidates():
    assert [c.size for c in IMAGE.candidates()] == [(8, 4)]
    several = Image(largest=[(cfg.n, 4), (1, cfg.d)]).bind(CONFIG)
    assert [c.size for c in several.candidates()] == [(2, 4), (1, 3)]
    assert [c.size for c in Image(largest=cfg.size).bind(CONFIG).candidates()] == [(8, 4)]
    assert [c.size for c in Image(largest=lambda s: [(1, 2), (3, 4)]).bind(CONFIG).candidates()] == [(1, 2), (3, 4)]
    assert IMAGE.bind(CONFIG) == IMAGE
    for candidate in IMAGE.candidates():
        assert IMAGE.canonical(candidate, AT) is candidate


@pytest.mark.parametrize("make", [lambda: Image(largest=[(1, 2)]), lambda: Video(largest=[(1, 2, 3)])])
def test_item_types_can_be_hashed(make):
    assert hash(make()) == hash(make())


# -- videos ----------------------------------------------------------------------------------------------------------

VIDEO = Video(largest=(2, 5, 4)).bind(CONFIG)
FRAMES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
META = {"fps": 2.0, "total_num_frames": 2}


def test_equal_frames_have_one_form():
    ways = [
        FRAMES,
        list(FRAMES),
        tuple(FRAMES),
        [PILImage.fromarray(f) for f in FRAMES],
        [torch.tensor(f) for f in FRAMES],
    ]
    for way in ways:
        (video,) = VIDEO.split(way, AT)
        made = VIDEO.canonical(video, AT)
        assert made.dtype == FRAMES.dtype
        assert np.array_equal(made, FRAMES)


def test_video_facts():
    facts = VIDEO.facts(VIDEO.canonical(FRAMES, AT), 1)
    assert facts == SimpleNamespace(index=1, frames=2, width=5, height=4, metadata=None)
    facts = VIDEO.facts(VIDEO.canonical((FRAMES, META), AT), 0)
    assert facts == SimpleNamespace(index=0, frames=2, width=5, height=4, metadata=META)
    facts = VIDEO.facts(VIDEO.canonical(torch.zeros(3, 3, 4, 5), AT), 0)
    assert (facts.frames, facts.width, facts.height) == (3, 5, 4)


def test_splitting_videos():
    assert len(VIDEO.split(FRAMES, AT)) == 1
    assert len(VIDEO.split(np.stack([FRAMES] * 3), AT)) == 3
    assert len(VIDEO.split((FRAMES, META), AT)) == 1
    assert len(VIDEO.split([(FRAMES, META), (FRAMES, META)], AT)) == 2
    assert len(VIDEO.split([list(FRAMES), list(FRAMES)], AT)) == 2
    assert len(VIDEO.split([FRAMES, None], AT)) == 2
    assert VIDEO.split([], AT) == []


def test_metadata_where_it_is_required():
    kind = Video(largest=(2, 5, 4), metadata=True).bind(CONFIG)
    frames, metadata = kind.canonical((FRAMES, META), AT)
    assert metadata == META
    assert np.array_equal(frames, FRAMES)
    (candidate,) = kind.candidates()
    assert kind.canonical(candidate, AT)[1]["total_num_frames"] == 2


def test_a_video_without_metadata_in_a_pair():
    assert len(VIDEO.split((FRAMES, None), AT)) == 1


def test_video_candidates():
    (candidate,) = VIDEO.candidates()
    assert candidate.shape == (2, 4, 5, 3)
    assert np.array_equal(VIDEO.canonical(candidate, AT), candidate)
    several = Video(largest=[(1, 2, 3), (4, 5, 6)]).bind(CONFIG)
    assert [c.shape for c in several.candidates()] == [(1, 3, 2, 3), (4, 6, 5, 3)]


# -- audio -----------------------------------------------------------------------------------------------------------

AUDIO = Audio(largest=cfg.big, rate=16000).bind(CONFIG)


@given(st.lists(exact, min_size=1, max_size=8))
def test_equal_samples_have_one_form(values):
    wanted = np.array(values, np.float32)
    ways = [wanted, wanted.astype(np.float64), wanted.astype(">f4"), np.repeat(wanted, 2)[::2], values]
    ways += [wanted.astype(np.float16), torch.tensor(values), torch.tensor(values).half()]
    for way in ways:
        (audio,) = AUDIO.split(way, AT)
        made = AUDIO.canonical(audio, AT)
        assert type(made) is np.ndarray
        assert (made.dtype, made.flags.c_contiguous, made.tolist()) == (np.float32, True, values)
        (pair,) = AUDIO.split((way, 8000), AT)
        made, rate = AUDIO.canonical(pair, AT)
        assert (made.dtype, made.tolist(), rate) == (np.float32, values, 8000)
        assert AUDIO.facts((made, rate), 1) == SimpleNamespace(index=1, length=len(values))


@pytest.mark.parametrize("data", [torch.zeros(3).bfloat16(), (np.zeros(3), np.int64(16000))], ids=["bfloat16", "rate"])
def test_more_audio_that_is_well_formed(data):
    (audio,) = AUDIO.split(data, AT)
    AUDIO.canonical(audio, AT)


def test_splitting_audio():
    sound = np.zeros(3, np.float32)
    assert len(AUDIO.split(sound, AT)) == 1
    assert len(AUDIO.split(np.zeros((4, 3)), AT)) == 4
    assert len(AUDIO.split((sound, 8000), AT)) == 1
    assert len(AUDIO.split([(sound, 8000), sound], AT)) == 2
    assert len(AUDIO.split([0.0, 0.5], AT)) == 1
    assert len(AUDIO.split([sound, None], AT)) == 2


def test_audio_candidates():
    (candidate,) = AUDIO.candidates()
    assert candidate.shape == (100,)
    assert np.array_equal(AUDIO.canonical(candidate, AT), candidate)
    assert Audio(largest=5, rate=cfg.big).bind(CONFIG).rate == 100


def test_conditional_largest():
    assert Image(largest=(where(cfg.n > 1, 7, 1), 3)).bind(CONFIG).largest == ((7, 3),)
