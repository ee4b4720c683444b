"""The model in the engine: parity with vLLM's own class and with transformers, embeddings, chat, malformed requests."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.llava_like.cases import Case, draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from examples.llava_like.reference import Reference
from examples.llava_like.spec import LLAVA_LIKE
from mmkit import InputError
from mmkit.offline import render_processes

IMAGE = 3
"""The placeholder id of the checkpoint."""
PICTURE = draw_picture(0)


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def text_of(case: Case, tokenizer: Any) -> str:
    return case.prompt if isinstance(case.prompt, str) else tokenizer.decode(case.prompt[1:])


def test_cases_cover_what_they_should(cases: list[Case]) -> None:
    """No to three images, as text and as ids, with images that come again, of many sizes."""
    kinds = [(len(case.images), isinstance(case.prompt, str)) for case in cases]
    assert {kinds.count((n, text)) >= 5 for n in range(4) for text in (True, False)} == {True}
    sizes = {image.size for case in cases for image in case.images}
    assert len(sizes) >= 8
    assert sum(len(case.images) for case in cases) >= 5 * len(sizes)
    assert any(len(set(map(id, case.images))) < len(case.images) for case in cases)


def test_greedy_ids_are_those_of_vllms_own_class(
    checkpoint: Path, engines: ExitStack, llava: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    own = engines.enter_context(engine(checkpoint, own=True, seed=0, enforce_eager=True))
    assert type(model_of(own)).__module__ == "vllm.model_executor.models.llava"
    assert type(model_of(llava)).__module__ == "examples.llava_like.model"
    assert answer(own, [case.request() for case in cases]) == answers
    # compiled code rounds in another way
    eager = engines.enter_context(engine(checkpoint, seed=0, enforce_eager=True))
    assert reported(eager, cases[:12]) == reported(own, cases[:12])


def reported(llm: Any, cases: list[Case]) -> list[Any]:
    """What vLLM says of ids, sampled and of the prompt, bit for bit: placeholders are among them in both."""
    from vllm import SamplingParams

    options = {"max_tokens": 4, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 2}
    sampling = [SamplingParams(temperature=0.0, **options)]
    sampling += [SamplingParams(temperature=0.0, allowed_token_ids=[40, 50], **options)]
    sampling += [SamplingParams(temperature=1.0, seed=0, top_k=20, **options)]
    requests = [case.request() for case in cases for _ in sampling]
    results = llm.generate(requests, sampling * len(cases), use_tqdm=False)
    return [(r.outputs[0].token_ids, _numbers(r.outputs[0].logprobs), _numbers(r.prompt_logprobs)) for r in results]


def _numbers(logprobs: Any) -> list[Any]:
    return [one and {token: (known.logprob, known.rank) for token, known in one.items()} for one in logprobs]


def test_rendered_requests_keep_their_items(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """vLLM alone would answer their ids without the items. Those from another host have lost the mark of this one."""
    from vllm.multimodal.inputs import MultiModalKwargsItems

    chosen = [i for i, case in enumerate(cases) if case.images][:4]
    renderer = llava.llm_engine.renderer
    rendered = renderer.render_cmpl([cases[i].request() for i in chosen], skip_mm_cache=True)
    foreign = [{**one, "mm_kwargs": MultiModalKwargsItems(dict(one["mm_kwargs"]))} for one in rendered]
    for requests in (rendered, foreign):
        assert answer(llava, requests) == [answers[i] for i in chosen]
    with pytest.raises(InputError, match=r"^llava_like\.image\[0\]: expected the fields \['pixel_values'\], got \[\]"):
        answer(llava, [{**foreign[0], "mm_kwargs": {"image": [{}] * len(cases[chosen[0]].images)}}])
    assert answer(llava, [cases[chosen[0]].request()]) == [answers[chosen[0]]]


def test_the_spec_on_vllms_own_class(
    checkpoint: Path, engines: ExitStack, cases: list[Case], answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered on it, the spec takes the place of the hand-written classes, with the same answers."""
    from vllm.model_executor.models.llava import LlavaForConditionalGeneration as Llava

    # what registering changes, so that the class is vLLM's again for the tests that follow
    monkeypatch.setattr(Llava, "_processor_factory", Llava._processor_factory)
    monkeypatch.setattr(Llava, "mm_spec", None, raising=False)
    monkeypatch.setenv("MMKIT_MODULES", "")
    LLAVA_LIKE.register(Llava)
    llm = engines.enter_context(engine(checkpoint, own=True, seed=0, enforce_eager=True))
    assert type(model_of(llm)) is Llava
    assert type(llm.llm_engine.renderer.mm_processor) is LLAVA_LIKE.classes.processor
    assert answer(llm, [case.request() for case in cases]) == answers


def test_greedy_ids_are_those_of_transformers(
    reference: Reference, tokenizer: Any, cases: list[Case], answers: list[list[int]]
) -> None:
    assert [reference.answer(text_of(case, tokenizer), case.images) for case in cases] == answers


def test_caches_change_nothing(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """One by one, after all of them were answered: prompts come from the prefix cache, images from the processor's."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    cached = 0
    for case, ids in zip(cases, answers, strict=True):
        (result,) = llava.generate([case.request()], sampling, use_tqdm=False)
        assert list(result.outputs[0].token_ids) == ids
        cached += bool(result.num_cached_tokens)
    assert cached >= len(cases) // 2
    assert llava.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_embeddings_stand_for_their_images(
    llava: Any, reference: Reference, cases: list[Case], answers: list[list[int]]
) -> None:
    """Computed by transformers; as one tensor, as a list, and under mmkit's own key. Noise gives other ids."""
    expected = [ids for case, ids in zip(cases, answers, strict=True) if case.images]
    with_images = [case for case in cases if case.images]
    rows = [reference.embed(case.images) for case in with_images]
    assert {tuple(row.shape) for one in rows for row in one} == {(16, 64)}
    for form in (torch.stack, list, lambda one: {"image_embeds": one}):
        requests = [case.request(form(one)) for case, one in zip(with_images, rows, strict=True)]
        assert answer(llava, requests) == expected
    torch.manual_seed(0)
    noise = [case.request(torch.randn(len(case.images), 16, 64)) for case in with_images]
    assert not any(a == b for a, b in zip(answer(llava, noise), expected, strict=True))


def test_full_strategy(tmp_path: Path, engines: ExitStack, tokenizer: Any) -> None:
    """With the class token an image has one row more."""
    folder = make_checkpoint(tmp_path, strategy="full")
    llava, reference = engines.enter_context(engine(folder, seed=0, enforce_eager=True)), Reference(folder)
    cases = make_cases(tokenizer, 12)
    answers = answer(llava, [case.request() for case in cases])
    assert [reference.answer(text_of(case, tokenizer), case.images) for case in cases] == answers
    case = next(case for case in cases if case.images)
    (row, *_) = rows = reference.embed(case.images)
    assert row.shape == (17, 64)
    assert answer(llava, [case.request(rows)]) == [answers[cases.index(case)]]


def test_placeholder_is_never_sampled(llava: Any) -> None:
    """Not even when a caller pushes it as far as vLLM lets them."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=0, logit_bias={IMAGE: 100.0})
    (result,) = llava.generate(["USER: hello"], sampling, use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 64
    assert IMAGE not in result.outputs[0].token_ids
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=0, allowed_token_ids=[IMAGE, 40])
    (result,) = llava.generate(["USER: hello"], sampling, use_tqdm=False)
    assert set(result.outputs[0].token_ids) == {40}


def test_chat_is_the_prompt_that_the_template_makes(llava: Any) -> None:
    """The placeholder's text comes from the model class; the offline chat route."""
    from vllm import SamplingParams

    content = [{"type": "text", "text": "What is this?"}, {"type": "image_pil", "image_pil": PICTURE}]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (chat,) = llava.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    expected = answer(llava, [Case("USER: <image>\nWhat is this?\nASSISTANT:", (PICTURE,)).request()])
    assert [list(chat.outputs[0].token_ids)] == expected


def test_what_leaves_only_placeholders_is_refused(llava: Any) -> None:
    from vllm import SamplingParams

    with pytest.raises(InputError) as refusal:
        llava.generate(["USER: hello"], SamplingParams(allowed_token_ids=[IMAGE]), use_tqdm=False)
    assert str(refusal.value) == (
        "llava_like.allowed_token_ids: expected an id that is not a placeholder, got [3]. Placeholder ids are never "
        "sampled."
    )
    assert not llava.llm_engine.has_unfinished_requests()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image too many": (
        Case("see <image>", (PICTURE, PICTURE)).request(),
        "llava_like.image: expected 2 placeholder(s) [3] in the prompt for 2 items, got 1. "
        "Write one placeholder per item, and nothing else with its id.",
    ),
    "not an image": (
        Case("see <image>", (PICTURE,)).request([b"picture"]),
        "llava_like.image[0]: expected a PIL image or an array, got bytes b'picture'.",
    ),
    "embeddings of too few rows": (
        Case("see <image>", (PICTURE,)).request(torch.zeros(1, 15, 64)),
        "llava_like.image[0]: expected 16 embedding row(s), got 15.",
    ),
    "embeddings of another width": (
        Case("see <image>", (PICTURE,)).request(torch.zeros(1, 16, 32)),
        "llava_like.image[0]: expected a finite floating (rows, 64) tensor, got shape (16, 32). Send embeddings as "
        '{"image_embeds": ...}, and pixels as uint8, or as an array or tensor in a list.',
    ),
    "embeddings that are not finite": (
        Case("see <image>", (PICTURE,)).request(torch.full((1, 16, 64), torch.nan)),
        "llava_like.image[0]: expected finite values of magnitude <= 65504, got NaN or an infinity.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_requests_are_refused(llava: Any, cases: list[Case], answers: list[list[int]], name: str) -> None:
    """By one sentence, before the engine; the next good request gives the same ids as before."""
    bad, sentence = REFUSED[name]
    with pytest.raises(InputError) as refusal:
        answer(llava, [bad])
    assert str(refusal.value) == sentence
    assert not llava.llm_engine.has_unfinished_requests()
    assert answer(llava, [cases[3].request()]) == [answers[3]]


def test_answers_with_render_processes(llava: Any, cases: list[Case], answers: list[list[int]]) -> None:
    """Requests are rendered ahead, some of their images are cached; one that is refused costs none of the others."""
    with render_processes(llava, 1):
        llava.llm_engine.reset_mm_cache()
        assert answer(llava, [case.request() for case in cases]) == answers
        bad = {"prompt": "<image><image>", "multi_modal_data": {"image": [PICTURE]}}
        with pytest.raises(InputError, match=r"expected 1 placeholder\(s\) \[3\] in the prompt for 1 item, got 2"):
            answer(llava, [cases[0].request(), bad, cases[1].request()])
        assert answer(llava, [case.request() for case in reversed(cases)]) == answers[::-1]
    assert answer(llava, [cases[0].request()]) == answers[:1]
