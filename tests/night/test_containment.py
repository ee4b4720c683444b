"""The law `containment` in the real engine, in all dtypes: no request changes the ids that others get."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.config import MultiModalConfig
from vllm.inputs import EmbedsPrompt, TextPrompt, TokensPrompt

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer
from examples.llava_like.offline import engine as start_engine
from mmkit.testing.options import BYTES_OPTIONS
from mmkit.vllm_api.compat import find
from tests.profiles import scaled

NORMALIZES_ON_DEVICE = hasattr(MultiModalConfig, "mm_device_do_normalize")
"""Whether vLLM can leave normalising to the model, as it does from 0.28."""

VLLMValidationError = find("exceptions:VLLMValidationError", default=ValueError)
"""Before 0.16, vLLM has none. In 0.32 it is no ValueError any more."""

PROMPT = "USER: <image> what"
TEXT = {"prompt": "USER: hello"}
GOOD = {"prompt": PROMPT, "multi_modal_data": {"image": draw_picture(0)}}
EXTREME_VALUE = 16384.0
EXTREME_REQUESTS = [
    {"prompt": PROMPT, "multi_modal_data": {"image": torch.full((1, 16, 64), EXTREME_VALUE)}},
    {"prompt": PROMPT, "multi_modal_data": {"image": torch.full((1, 16, 64), -EXTREME_VALUE)}},
]
# few blocks, so that all of them are used again
SIZES = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.3, "max_model_len": 256}


class Engine:
    """An engine, and the ids that it answers to TEXT and GOOD at first."""

    def __init__(self, engines: ExitStack, checkpoint: Path, **options: Any) -> None:
        options |= {"enforce_eager": True, "enable_prefix_caching": False, **SIZES}
        self.llm = engines.enter_context(start_engine(checkpoint, **options))
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.expected = answer(self.llm, [TEXT, GOOD])

    def check_that_answers_are_unchanged(self) -> None:
        """Also check that all that the KV cache holds is finite."""
        for cache in self.worker.model_runner.kv_caches:
            assert bool(torch.isfinite(cache).all())
        assert answer(self.llm, [TEXT, GOOD]) == self.expected

    def clear_caches_of_items(self) -> None:
        """Let the encoder encode each item again."""
        self.llm.llm_engine.reset_encoder_cache()
        self.llm.reset_mm_cache()


@contextmanager
def rows_of_value(model_class: Any, value: float) -> Iterator[None]:
    """Let the encoder return as many rows as before, with the value and its negative in turn."""
    embed_image = model_class.embed_image

    def embed_with_value(self: Any, **fields: Any) -> list[torch.Tensor]:
        rows_of_images = []
        for rows in embed_image(self, **fields):
            extreme_rows = torch.full_like(rows, value)
            extreme_rows[:, ::2] *= -1
            rows_of_images.append(extreme_rows)
        return rows_of_images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_class, "embed_image", embed_with_value)
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_request_changes_the_answers_of_others(dtype: str, tmp_path: Path, engines: ExitStack) -> None:
    """The ids of a request without items and of a good one are the same before and after each extreme one, and beside
    it in a batch."""
    engine = Engine(engines, make_checkpoint(tmp_path), dtype=dtype)

    for extreme in EXTREME_REQUESTS:
        answer(engine.llm, [extreme])
        engine.check_that_answers_are_unchanged()
        ids_of_text, _, ids_of_good = answer(engine.llm, [TEXT, extreme, GOOD])
        assert [ids_of_text, ids_of_good] == engine.expected

    model_class = type(engine.worker.get_model())
    largest = torch.finfo(getattr(torch, dtype)).max
    for value in (torch.nan, torch.inf, EXTREME_VALUE, largest):
        with rows_of_value(model_class, value):
            engine.clear_caches_of_items()
            answer(engine.llm, [GOOD])
        engine.clear_caches_of_items()
        engine.check_that_answers_are_unchanged()


@st.composite
def draw_tensor(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of one value. The hidden size of the model is 64."""
    num_rows = draw(st.sampled_from([1, 40]))
    width = draw(st.sampled_from([64, 64, 64, 65]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]))
    value = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf, 65504.0, 3e38, 1.0]))
    return torch.full((num_rows, width), value).to(dtype)


@st.composite
def draw_items(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an image: its embeddings, or a picture."""
    if draw(st.booleans()):
        rows = draw(draw_tensor())
        return {"image": rows[None]}
    return {"image": draw_picture(draw(st.integers(1, 9)))}


@st.composite
def draw_pixels(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a request whose pixels may be bytes or floats, by the dtype of its image or by its options."""
    picture = draw_picture(draw(st.integers(1, 9)))
    image: Any = picture
    dtype = draw(st.sampled_from([None, "uint8", "float32", "float64", "float16", "int64"]))
    if dtype is not None:
        image = np.asarray(picture.convert("RGB")).astype(dtype)
        if draw(st.booleans()):
            image = image / 255
    switches = {name: st.booleans() for name in BYTES_OPTIONS}
    options = draw(st.just({}) | st.just(BYTES_OPTIONS) | st.fixed_dictionaries({}, optional=switches))
    if options and draw(st.booleans()):
        options = {"images_kwargs": options}
    return {"prompt": PROMPT, "multi_modal_data": {"image": image}, "mm_processor_kwargs": options}


@pytest.mark.parametrize("on_device", [True, False], ids=["bytes", "floats"])
def test_no_dtype_of_pixels_changes_the_answers_of_others(on_device: bool, tmp_path: Path, engines: ExitStack) -> None:
    """vLLM stacks the pixels of all requests that arrive together in the dtype of the first."""
    options = {}
    if NORMALIZES_ON_DEVICE:
        options["mm_device_do_normalize"] = on_device
    engine = Engine(engines, make_checkpoint(tmp_path), **options)
    outcomes = Counter[str]()

    @settings(max_examples=scaled(60))
    @given(draw_pixels(), st.booleans())
    def ask(request: dict[str, Any], is_first: bool) -> None:
        requests = [request, GOOD, TEXT] if is_first else [TEXT, GOOD, request]
        engine.llm.reset_mm_cache()
        engine.llm.llm_engine.reset_encoder_cache()
        try:
            ids = answer(engine.llm, requests)
            outcomes["answered"] += 1
        except ValueError:
            outcomes["refused"] += 1
        else:
            if is_first:
                ids = ids[::-1]
            assert ids[:2] == engine.expected
        engine.check_that_answers_are_unchanged()

    ask()
    assert outcomes["answered"] > 0, outcomes
    assert outcomes["refused"] > 0, outcomes
    print(outcomes)


IDS = st.lists(st.sampled_from([1, 5, 6, 3, 99, 100, -1, 2**31]), min_size=1, max_size=40)
FIELDS = {
    "prompt": st.sampled_from(["USER: hello", PROMPT, "", "<image>" * 3]),
    "prompt_token_ids": IDS,
    "prompt_embeds": draw_tensor(),
    "prompt_is_token_ids": st.lists(st.booleans(), min_size=1, max_size=40),
    "prompt_token_offsets": st.sampled_from([None, [], [(0, 1)]]),
    "token_type_ids": st.sampled_from([[0], [1] * 40, []]),
    "multi_modal_data": st.sampled_from([None, {}, {"other": 1}]) | draw_items(),
    "multi_modal_uuids": st.sampled_from([{}, {"image": [None]}, {"image": [5]}, {"other": ["a"]}]),
    "mm_processor_kwargs": st.sampled_from([None, {}, {"do_resize": "x"}, {"unknown": 1}, {"do_rescale": False}]),
    "media_io_kwargs": st.sampled_from([None, {}, {"image": {"unknown": 1}}]),
    "cache_salt": st.sampled_from(["a", ""]),
}
"""Values of each field of vLLM's prompts."""
PROMPT_CLASSES = (TextPrompt, TokensPrompt, EmbedsPrompt)


@st.composite
def draw_prompt(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a prompt of one of vLLM's types, with all fields that it needs."""
    prompt_class = draw(st.sampled_from(PROMPT_CLASSES))
    needed = {name: FIELDS[name] for name in prompt_class.__required_keys__}
    optional = {name: FIELDS[name] for name in prompt_class.__optional_keys__}
    return draw(st.fixed_dictionaries(needed, optional=optional))


def test_each_field_of_vllms_prompts_is_drawn() -> None:
    for prompt_class in PROMPT_CLASSES:
        assert prompt_class.__annotations__.keys() <= FIELDS.keys()


def test_no_field_of_a_prompt_changes_the_answers_of_others(tmp_path: Path, engines: ExitStack) -> None:
    """Whatever the fields of vLLM's prompts hold, the request is answered or refused, and others get the ids that they
    got before."""
    engine = Engine(engines, make_checkpoint(tmp_path), enable_prompt_embeds=True)
    outcomes = Counter[str]()

    @settings(max_examples=scaled(60))
    @given(draw_prompt())
    @example({"prompt_embeds": torch.full((40, 64), torch.nan)})
    @example({"prompt_embeds": torch.full((40, 64), torch.inf)})
    @example({"prompt_embeds": torch.full((40, 65), 1.0)})
    def ask(prompt: dict[str, Any]) -> None:
        try:
            answer(engine.llm, [prompt], max_tokens=2)
            outcomes["answered"] += 1
        except (VLLMValidationError, ValueError, AttributeError, TypeError) as error:
            # vLLM raises AttributeError and TypeError for values of other types
            outcomes[type(error).__name__] += 1
        engine.check_that_answers_are_unchanged()

    ask()
    assert outcomes["answered"], outcomes
    print(outcomes)
