"""Requests whose items other processes process are those that one process renders: ids, ranges, hashes and fields."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from mmkit.testing.laws import differences
from mmkit.vllm_api import elsewhere, harness, kit
from tests.path.test_project_specs import subject
from tests.profiles import scaled


class Renderer(SimpleNamespace):
    """What takes a tokenized prompt, as vLLM's renderer does."""

    @elsewhere.with_processes
    def render(self, prompt: dict[str, Any], cache: Any) -> Any:
        data, kwargs = prompt["multi_modal_data"], prompt["mm_processor_kwargs"]
        return kit.render(self.mm_processor, prompt["prompt_token_ids"], data, kwargs, cache)


def requests_are_the_same(name):
    """With and without a cache, whose items come again."""
    processor = subject(name).processor
    renderer = Renderer(mm_processor=processor, config=None)

    @settings(max_examples=scaled(6), deadline=None)
    @given(st.lists(subject(name).requests(), min_size=1, max_size=3), st.booleans())
    def same(requests, with_cache):
        here_cache, there_cache = (
            harness.Caches(processor, 1.0, pair=False).sender if with_cache else None for _ in range(2)
        )
        for request in [*requests, requests[0]]:
            note(repr(request))
            sent = {"prompt_token_ids": list(request.prompt), "multi_modal_data": request.data()}
            here = kit.render(processor, *sent.values(), dict(request.kwargs), here_cache)
            there = renderer.render({**sent, "mm_processor_kwargs": dict(request.kwargs)}, there_cache)
            assert differences(harness.outcome(here), harness.outcome(there)) is None

    with elsewhere.lent(renderer, 1):
        same()


def test_requests_are_the_same():
    """Flat fields of two modalities; tests/night/test_gallery.py has other systems."""
    requests_are_the_same("internvl2")
