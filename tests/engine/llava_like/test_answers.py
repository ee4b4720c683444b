"""The model in the engine: parity with transformers, caches, embeddings, chat, placeholders.
tests/night/test_llava_like.py compares it with vLLM's own class."""

from random import Random
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalKwargsItems

from examples.llava_like.cases import Case, draw_picture
from examples.llava_like.offline import answer
from examples.llava_like.reference import Reference
from mmkit import InputError
from mmkit.vllm_api.admission import TRUST
from tests.profiles import scaled

IMAGE = 3
"""The placeholder id of the checkpoint."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_greedy_ids_are_those_of_transformers(
    reference: Reference, tokenizer: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    """No to three images, as text and as ids, with images that come again, of many sizes."""
    assert len({case.kind for case in cases}) == 8
    assert len({image.size for case in cases for image in case.images}) >= 8
    assert any(len(set(map(id, case.images))) < len(case.images) for case in cases)
    for case, ids in zip(cases, answers, strict=True):
        text = case.prompt if isinstance(case.prompt, str) else tokenizer.decode(case.prompt[1:])
        assert reference.answer(text, case.images) == ids


def test_rendered_requests_keep_their_items(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """vLLM alone would answer their ids without the items. Those from another host have lost the mark of this one, and
    are taken where they are trusted."""
    chosen = [i for i, case in enumerate(cases) if case.images][:4]
    rendered = llava.llm_engine.renderer.render_cmpl([cases[i].request() for i in chosen], skip_mm_cache=True)
    foreign = [{**one, "mm_kwargs": MultiModalKwargsItems(dict(one["mm_kwargs"]))} for one in rendered]
    assert answer(llava, rendered) == [answers[i] for i in chosen]
    with pytest.raises(InputError, match=r"^llava_like\.mm_kwargs: expected raw items, got processed fields\."):
        answer(llava, foreign)
    with mock.patch.object(llava.llm_engine.vllm_config, "additional_config", {TRUST: True}):
        assert answer(llava, foreign) == [answers[i] for i in chosen]


def test_caches_change_nothing(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """One by one, after all of them were answered: prompts come from the prefix cache, images from the processor's."""
    results = [llava.generate([case.request()], GREEDY, use_tqdm=False)[0] for case in cases]
    assert [list(result.outputs[0].token_ids) for result in results] == answers
    assert sum(bool(result.num_cached_tokens) for result in results) >= len(cases) // 2


def test_embeddings_stand_for_their_images(
    llava: Any, reference: Reference, cases: list[Case], answers: list[list[int]]
) -> None:
    """Computed by transformers; as one tensor, as a list, and under mmkit's own key. Noise gives other ids."""
    expected = [ids for case, ids in zip(cases, answers, strict=True) if case.images]
    with_images = [case for case in cases if case.images]
    rows = [reference.embed(case.images) for case in with_images]
    for form in (torch.stack, list, lambda one: {"image_embeds": one}):
        assert answer(llava, [case.request(form(one)) for case, one in zip(with_images, rows, strict=True)]) == expected
    torch.manual_seed(0)
    noise = [case.request(torch.randn(len(case.images), 16, 64)) for case in with_images]
    assert not any(a == b for a, b in zip(answer(llava, noise), expected, strict=True))


OPTIONS = {
    "bytes": {"do_rescale": False, "do_normalize": False},
    "bytes in the scope of images": {"images_kwargs": {"do_rescale": False, "do_normalize": False}},
    "arrays": {"return_tensors": "np"},
    "lists": {"return_tensors": None},
    "another mean": {"image_mean": [0.1, 0.2, 0.3]},
    "none": {},
}
FLOATS = ("float16", "bfloat16", "float32", "float64")


def test_items_of_any_dtype_share_a_batch(llava: Any, reference: Reference, tokenizer: Any) -> None:
    """Each is refused, or has the answer that it has alone: vLLM stacks a batch in the dtype of its first item, which
    ends the engine where another one does not fit."""
    render = llava.llm_engine.renderer.render_cmpl
    prompt = tokenizer.encode("USER: <image> what?")

    def request(data: Any, options: Any = MappingProxyType({})) -> dict[str, Any]:
        more = {"mm_processor_kwargs": dict(options)} if options else {}
        return {"prompt_token_ids": prompt, "multi_modal_data": {"image": data}, **more}

    requests: list[dict[str, Any]] = []
    for number in range(scaled(60) // 20):
        picture = draw_picture(number)
        pixels = np.asarray(picture)
        requests += [request([picture], options) for options in OPTIONS.values()]
        requests += [request([pixels.astype(dtype)]) for dtype in ("float16", "float32", "float64", "int64")]
        requests += [request([pixels.astype("float32")], options) for options in OPTIONS.values()]
        rows = reference.embed([picture])
        requests += [request({"image_embeds": [own.to(getattr(torch, kind)) for own in rows]}) for kind in FLOATS]
    Random(0).shuffle(requests)
    known: list[dict[str, Any]] = []
    refused = 0
    for one in requests:
        try:
            render([one], skip_mm_cache=True)
        except InputError:
            refused += 1
        else:
            known.append(one)
    assert min(refused, len(known)) > len(requests) // 10
    alone = [answer(llava, [one], 4)[0] for one in known]
    assert answer(llava, known, 4) == alone


def test_chat_is_the_prompt_that_the_template_makes(llava: Any) -> None:
    """The placeholder's text comes from the model class."""
    picture = draw_picture(0)
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_pil", "image_pil": picture}]
    (chat,) = llava.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    expected = answer(llava, [Case("USER: <image>\nWhat is this?\nASSISTANT:", (picture,)).request()])
    assert [list(chat.outputs[0].token_ids)] == expected


def test_placeholder_is_never_sampled(llava: Any) -> None:
    """Not even when a caller pushes it as far as vLLM lets them."""
    for pushed in ({"logit_bias": {IMAGE: 100.0}}, {"allowed_token_ids": [IMAGE, 40]}):
        sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=0, **pushed)
        (result,) = llava.generate(["USER: hello"], sampling, use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 64
        assert IMAGE not in result.outputs[0].token_ids
    expected = r"expected an id that is not a placeholder, got \[3\]\. Placeholder ids are never sampled\."
    with pytest.raises(InputError, match=rf"^llava_like\.allowed_token_ids: {expected}$"):
        llava.generate(["USER: hello"], SamplingParams(allowed_token_ids=[IMAGE]), use_tqdm=False)
