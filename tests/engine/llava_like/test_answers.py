"""The model in the engine: parity with transformers, caches, embeddings, chat, placeholders.
tests/night/test_llava_like.py compares it with vLLM's own class."""

from random import Random
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
from mmkit.vllm_api.patches import TRUST
from tests.profiles import scaled

IMAGE = 3
"""The placeholder id of the checkpoint."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def test_the_cases_cover_all_kinds_of_requests(cases: list[Case]) -> None:
    """No to three images, as text and as ids, with images that come again, of many sizes."""
    sizes = set()
    has_repeated_image = False
    for case in cases:
        sizes.update(image.size for image in case.images)
        identities = {id(image) for image in case.images}
        has_repeated_image |= len(identities) < len(case.images)
    assert len({case.kind for case in cases}) == 8
    assert len(sizes) >= 8
    assert has_repeated_image


def test_greedy_ids_are_those_of_transformers(
    reference: Reference, tokenizer: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    for case, ids in zip(cases, answers, strict=True):
        text = case.prompt
        if not isinstance(text, str):
            text = tokenizer.decode(case.prompt[1:])
        assert reference.answer(text, case.images) == ids


# -- rendered requests -------------------------------------------------------------------------------------------------


@pytest.fixture
def image_indices(cases: list[Case]) -> list[int]:
    """The indices of four cases with images."""
    return [index for index, case in enumerate(cases) if case.images][:4]


@pytest.fixture
def engine_inputs(llava: Any, cases: list[Case], image_indices: list[int]) -> list[Any]:
    """The cases at these indices as vLLM's renderer makes them for an engine."""
    requests = [cases[index].request() for index in image_indices]
    return list(llava.llm_engine.renderer.render_cmpl(requests, skip_mm_cache=True))


def test_rendered_requests_keep_their_items(
    llava: Any, answers: list[list[int]], image_indices: list[int], engine_inputs: list[Any]
) -> None:
    """Without mmkit, vLLM would answer their ids without the items."""
    assert answer(llava, engine_inputs) == [answers[index] for index in image_indices]


def test_requests_that_another_host_has_rendered_are_refused_unless_they_are_trusted(
    llava: Any, answers: list[list[int]], image_indices: list[int], engine_inputs: list[Any]
) -> None:
    """They have lost the mark of this host."""
    foreign = []
    for request in engine_inputs:
        foreign.append({**request, "mm_kwargs": MultiModalKwargsItems(dict(request["mm_kwargs"]))})
    with pytest.raises(InputError, match=r"^llava_like\.mm_kwargs: expected raw items, got processed fields\."):
        answer(llava, foreign)
    with mock.patch.object(llava.llm_engine.vllm_config, "additional_config", {TRUST: True}):
        assert answer(llava, foreign) == [answers[index] for index in image_indices]


# -- caches and embeddings ---------------------------------------------------------------------------------------------


def test_caches_change_nothing(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """One by one, after all of them were answered: prompts come from the prefix cache, images from the processor's."""
    num_with_cached_tokens = 0
    for case, ids in zip(cases, answers, strict=True):
        (result,) = llava.generate([case.request()], GREEDY, use_tqdm=False)
        assert list(result.outputs[0].token_ids) == ids
        if result.num_cached_tokens:
            num_with_cached_tokens += 1
    assert num_with_cached_tokens >= len(cases) // 2


@pytest.fixture(scope="module")
def cases_with_images(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.images]


@pytest.fixture(scope="module")
def ids_of_images(cases: list[Case], answers: list[list[int]]) -> list[list[int]]:
    """The answers of the cases with images."""
    return [ids for case, ids in zip(cases, answers, strict=True) if case.images]


def put_under_its_name(rows: Any) -> dict[str, Any]:
    return {"image_embeds": rows}


@pytest.mark.parametrize("convert", [torch.stack, list, put_under_its_name])
def test_embeddings_of_transformers_stand_for_their_images(
    llava: Any, reference: Reference, cases_with_images: list[Case], ids_of_images: list[list[int]], convert: Any
) -> None:
    requests = [case.request(convert(reference.embed(case.images))) for case in cases_with_images]
    assert answer(llava, requests) == ids_of_images


def test_noise_in_place_of_embeddings_gives_other_ids(
    llava: Any, cases_with_images: list[Case], ids_of_images: list[list[int]]
) -> None:
    torch.manual_seed(0)
    requests = [case.request(torch.randn(len(case.images), 16, 64)) for case in cases_with_images]
    for ids, expected in zip(answer(llava, requests), ids_of_images, strict=True):
        assert ids != expected


# -- dtypes ------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "bytes": {"do_rescale": False, "do_normalize": False},
    "bytes in the scope of images": {"images_kwargs": {"do_rescale": False, "do_normalize": False}},
    "arrays": {"return_tensors": "np"},
    "lists": {"return_tensors": None},
    "another mean": {"image_mean": [0.1, 0.2, 0.3]},
    "none": {},
}


def make_images(number: int, reference: Reference) -> list[tuple[Any, dict[str, Any]]]:
    """Return forms of one picture, each with options."""
    picture = draw_picture(number)
    pixels = np.asarray(picture)
    images: list[tuple[Any, dict[str, Any]]] = []
    for options in OPTIONS.values():
        images.append(([picture], options))
        images.append(([pixels.astype("float32")], options))
    for dtype in ("float16", "float32", "float64", "int64"):
        images.append(([pixels.astype(dtype)], {}))
    (rows,) = reference.embed([picture])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        images.append(({"image_embeds": [rows.to(dtype)]}, {}))
    return images


def is_accepted(llava: Any, request: dict[str, Any]) -> bool:
    try:
        llava.llm_engine.renderer.render_cmpl([request], skip_mm_cache=True)
    except InputError:
        return False
    return True


def test_items_of_any_dtype_share_a_batch(llava: Any, reference: Reference, tokenizer: Any) -> None:
    """Each is refused, or has the answer that it has alone: vLLM stacks a batch in the dtype of its first item, which
    ends the engine where another one does not fit."""
    prompt = tokenizer.encode("USER: <image> what?")
    requests = []
    for number in range(scaled(60) // 20):
        for image, options in make_images(number, reference):
            request = {"prompt_token_ids": prompt, "multi_modal_data": {"image": image}}
            if options:
                request["mm_processor_kwargs"] = options
            requests.append(request)
    Random(0).shuffle(requests)
    accepted = [request for request in requests if is_accepted(llava, request)]
    num_refused = len(requests) - len(accepted)
    assert num_refused > len(requests) // 10
    assert len(accepted) > len(requests) // 10
    single_answers = []
    for request in accepted:
        single_answers.extend(answer(llava, [request], 4))
    assert answer(llava, accepted, 4) == single_answers


# -- chat and placeholders ---------------------------------------------------------------------------------------------


def test_chat_is_the_prompt_that_the_template_makes(llava: Any) -> None:
    """The placeholder's text comes from the model class."""
    picture = draw_picture(0)
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_pil", "image_pil": picture}]
    (chat,) = llava.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    case = Case("USER: <image>\nWhat is this?\nASSISTANT:", (picture,))
    assert [list(chat.outputs[0].token_ids)] == answer(llava, [case.request()])


@pytest.mark.parametrize("options", [{"logit_bias": {IMAGE: 100.0}}, {"allowed_token_ids": [IMAGE, 40]}])
def test_a_placeholder_is_never_sampled(llava: Any, options: dict[str, Any]) -> None:
    """Not even when a caller pushes it as far as vLLM lets them."""
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=0, **options)
    (result,) = llava.generate(["USER: hello"], sampling, use_tqdm=False)
    ids = result.outputs[0].token_ids
    assert len(ids) == 64
    assert IMAGE not in ids


def test_a_request_that_allows_only_placeholders_is_refused(llava: Any) -> None:
    expected = r"expected an id that is not a placeholder, got \[3\]\. Placeholder ids are never sampled\."
    with pytest.raises(InputError, match=rf"^llava_like\.allowed_token_ids: {expected}$"):
        llava.generate(["USER: hello"], SamplingParams(allowed_token_ids=[IMAGE]), use_tqdm=False)
