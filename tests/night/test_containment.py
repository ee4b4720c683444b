"""The law `containment` in the real engine, in all dtypes: whatever one request brings, others get the ids that they
got before."""

from collections import Counter
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.inputs import EmbedsPrompt, TextPrompt, TokensPrompt

from examples.llava_like.cases import draw_picture
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from tests.profiles import scaled

PROMPT = "USER: <image> what"
TEXT, GOOD = {"prompt": "USER: hello"}, {"prompt": PROMPT, "multi_modal_data": {"image": draw_picture(0)}}
EXTREME = [
    {"prompt": PROMPT, "multi_modal_data": {"image": torch.full((1, 16, 64), value)}} for value in (16384.0, -16384.0)
]
# few blocks, so that all of them are used again
SIZES = {"num_gpu_blocks_override": 16, "gpu_memory_utilization": 0.3, "max_model_len": 256}


def of_value(self: Any, inherited: Any, value: float, **fields: Any) -> list[torch.Tensor]:
    """Rows of the right number, of a value and its negative in turn."""
    rows = [torch.full_like(row, value) for row in inherited(self, **fields)]
    for row in rows:
        row[:, ::2] *= -1
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_request_changes_the_answers_of_others(dtype: str, tmp_path: Path, engines: ExitStack) -> None:
    """The ids of a request without items and of a good one are the same before and after each extreme one, as are those
    beside it in a batch; and all that the KV cache holds is finite."""
    options = {"dtype": dtype, "enforce_eager": True, "enable_prefix_caching": False, **SIZES}
    llm = engines.enter_context(engine(make_checkpoint(tmp_path), **options))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    expected = answer(llm, [TEXT, GOOD])

    def compare() -> None:
        assert all(bool(torch.isfinite(cache).all()) for cache in worker.model_runner.kv_caches)
        assert answer(llm, [TEXT, GOOD]) == expected

    def forget() -> None:
        """The encoder is asked again."""
        llm.llm_engine.reset_encoder_cache()
        llm.reset_mm_cache()

    for extreme in EXTREME:
        answer(llm, [extreme])
        compare()
        assert answer(llm, [TEXT, extreme, GOOD])[::2] == expected
    model = type(worker.get_model())
    for value in (torch.nan, torch.inf, 16384.0, torch.finfo(getattr(torch, dtype)).max):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "embed_image", partialmethod(of_value, model.embed_image, value))
            forget()
            answer(llm, [GOOD])
        forget()
        compare()


TENSORS = st.builds(
    lambda rows, width, dtype, value: torch.full((rows, width), value).to(dtype),
    st.sampled_from([1, 40]),
    st.sampled_from([64, 64, 64, 65]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]),
    st.sampled_from([torch.nan, torch.inf, -torch.inf, 65504.0, 3e38, 1.0]),
)
IDS = st.lists(st.sampled_from([1, 5, 6, 3, 99, 100, -1, 2**31]), min_size=1, max_size=40)
FIELDS = {
    "prompt": st.sampled_from(["USER: hello", PROMPT, "", "<image>" * 3]),
    "prompt_token_ids": IDS,
    "prompt_embeds": TENSORS,
    "prompt_is_token_ids": st.lists(st.booleans(), min_size=1, max_size=40),
    "prompt_token_offsets": st.sampled_from([None, [], [(0, 1)]]),
    "token_type_ids": st.sampled_from([[0], [1] * 40, []]),
    "multi_modal_data": st.sampled_from([None, {}, {"other": 1}]) | st.builds(
        lambda image: {"image": image}, TENSORS.map(lambda rows: rows[None]) | st.integers(1, 9).map(draw_picture)
    ),
    "multi_modal_uuids": st.sampled_from([{}, {"image": [None]}, {"image": [5]}, {"other": ["a"]}]),
    "mm_processor_kwargs": st.sampled_from([None, {}, {"do_resize": "x"}, {"unknown": 1}, {"do_rescale": False}]),
    "media_io_kwargs": st.sampled_from([None, {}, {"image": {"unknown": 1}}]),
    "cache_salt": st.sampled_from(["a", ""]),
}  # fmt: skip
"""Values of each field of vLLM's prompts."""
TYPES = (TextPrompt, TokensPrompt, EmbedsPrompt)


def test_no_field_of_a_prompt_changes_the_answers_of_others(tmp_path: Path, engines: ExitStack) -> None:
    """Whatever stands in the fields that vLLM's prompts have, the request is answered or refused, others get the ids
    that they got before, and all that the KV cache holds is finite."""
    names = [{name for kind in TYPES for name in kind.__annotations__}, FIELDS.keys()]
    assert names[0] <= names[1], "a field of vLLM's that is not drawn"
    options = {"enforce_eager": True, "enable_prompt_embeds": True, "enable_prefix_caching": False, **SIZES}
    llm = engines.enter_context(engine(make_checkpoint(tmp_path), **options))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    expected = answer(llm, [TEXT, GOOD])
    outcomes = Counter[str]()

    @settings(max_examples=scaled(60))
    @given(st.sampled_from(TYPES).flatmap(lambda kind: st.fixed_dictionaries(
        {name: FIELDS[name] for name in kind.__required_keys__},
        optional={name: FIELDS[name] for name in kind.__optional_keys__},
    )))  # fmt: skip
    @example({"prompt_embeds": torch.full((40, 64), torch.nan)})
    @example({"prompt_embeds": torch.full((40, 64), torch.inf)})
    @example({"prompt_embeds": torch.full((40, 65), 1.0)})
    def ask(prompt: dict[str, Any]) -> None:
        try:
            answer(llm, [prompt], max_tokens=2)
            outcomes["answered"] += 1
        except (ValueError, AttributeError, TypeError) as error:  # of vLLM, for what has another type
            outcomes[type(error).__name__] += 1
        assert all(bool(torch.isfinite(cache).all()) for cache in worker.model_runner.kv_caches)
        assert answer(llm, [TEXT, GOOD]) == expected

    ask()
    assert outcomes["answered"], outcomes
    print(outcomes)
