"""Requests whose items other processes process are those that one process renders: ids, ranges, hashes and fields.
What an end of such a process costs."""

import asyncio
import base64
import contextvars
import io
import os
import pickle
import resource
import signal
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from PIL import Image
from vllm.multimodal.media import MediaConnector

from mmkit import InputError, ModelSpec, SpecError, Tensor, between
from mmkit.errors import MmkitError
from mmkit.language.items.pictures import find_orientation, get_undecoded_file, open_undecoded
from mmkit.plan.hashes import ItemHasher
from mmkit.plan.item import make_items
from mmkit.plan.parsing import ItemBatch
from mmkit.rendering import pool as render_processes
from mmkit.rendering.pool import RenderProcesses
from mmkit.testing import vllm_path
from mmkit.testing.differences import find_difference
from mmkit.vllm_api import offload
from mmkit.vllm_api.server_request import SERVER_REQUEST, ServerRequest
from tests.path.test_gallery import open_subject
from tests.profiles import scaled
from tests.unit.common import CONFIG, expect_refusal, make_modality


def requests_are_the_same(name):
    """With and without a cache, whose items come again."""
    processor = open_subject(name).processor

    async def theirs(prompt: dict[str, Any], cache: Any) -> Any:
        """As vLLM's renderer goes from a tokenized prompt to the engine's input."""
        data, kwargs = prompt["multi_modal_data"], prompt["mm_processor_kwargs"]
        return vllm_path.render(processor, prompt["prompt_token_ids"], data, kwargs, cache)

    @settings(max_examples=scaled(6), deadline=None)
    @given(st.lists(open_subject(name).requests(), min_size=1, max_size=3), st.booleans())
    def same(requests, with_cache):
        here_cache, there_cache = (
            vllm_path.Caches(processor, 1.0, pair=False).sender if with_cache else None for _ in range(2)
        )
        for request in [*requests, requests[0]]:
            note(repr(request))
            arguments = {"prompt_token_ids": list(request.prompt), "multi_modal_data": request.data()}
            arguments["mm_processor_kwargs"] = dict(request.kwargs)
            here, there = asyncio.run(theirs(arguments, here_cache)), asyncio.run(ours(arguments, cache=there_cache))
            assert find_difference(vllm_path.collect_outcome(here), vllm_path.collect_outcome(there)) is None

    processes = RenderProcesses(offload.make_recipe(processor), 1)
    ours = offload.wrap_process_tokens_async(theirs, processes)
    with closing(processes):
        same()


def test_requests_are_the_same():
    """Flat fields of two modalities; tests/night/test_gallery.py has other systems."""
    requests_are_the_same("internvl2")


# -- pictures that other processes decode ------------------------------------------------------------------------------


def write_picture(size, form, mode, orientation, end):
    """Return the bytes of a file with a picture."""
    pixels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form, exif=exif)
    return file.getvalue() + end


def fetch_for_render_processes(url):
    """Return a picture as a server with render processes loads it."""
    SERVER_REQUEST.set(ServerRequest(10**9, AssertionError, has_render_processes=True))
    return MediaConnector().fetch_image(url)


FILES = st.builds(
    write_picture,
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["JPEG", "JPEG", "PNG", "WEBP"]),
    st.sampled_from(["RGB", "RGB", "L"]),
    st.sampled_from([1, 1, 6]),
    st.sampled_from([b"", b"", b"end"]),
)


@settings(max_examples=scaled(40), deadline=None)
@given(FILES)
def test_a_picture_that_is_decoded_later_is_the_same(file):
    """So are its hash and its way to another process."""
    plan = open_subject("internvl2").processor.plan  # makes vLLM's loader check files
    url = f"data:image/any;base64,{base64.b64encode(file).decode()}"
    decoded = MediaConnector().fetch_image(url)
    other = contextvars.copy_context().run(fetch_for_render_processes, url)
    file_to_send = get_undecoded_file(other.media)
    is_plain_jpeg = file[:2] == b"\xff\xd8" and file[-3:] != b"end" and decoded.io_config is None
    assert (file_to_send is not None) == (is_plain_jpeg and find_orientation(Image.open(io.BytesIO(file))) == 1)
    hasher = ItemHasher("blake3", "model")
    keys = set()
    for picture in (decoded, other):
        (item,) = make_items("image", ItemBatch.whole([picture.media]))
        item.content = picture
        keys.update(hasher.hash_items(plan.modalities["image"], [item], {}))
    assert len(keys) == 1
    received = pickle.loads(render_processes._write_message(other.media, os.devnull).pickle)
    assert find_difference(np.asarray(received), np.asarray(decoded.media)) is None


def process(items, scope):
    """Some items have no form, and one ends the process."""
    if items[0][0, 0] == -1:
        raise InputError("spec.m[0]", "a number that is not -1", "-1")
    if items[0][0, 0] == -2:
        os._exit(1)
    if items[0][0, 0] in (-3, -4):  # from now on files are small, or as large as they have to be
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16 if items[0][0, 0] == -3 else most, most))
    return {"x": items}


SPEC = ModelSpec("spec", make_modality(item=Tensor(shape=(between(1, 9999), 2)), process=process))
RECIPE = {"spec": SPEC, "config": CONFIG}


def items(*first):
    return {"m": ItemBatch.whole([torch.full((1 + 4500 * (i % 3), 2), float(value)) for i, value in enumerate(first)])}


@pytest.fixture(scope="module")
def processes():
    processes = RenderProcesses(RECIPE, 2)
    processes.wait()
    yield processes
    processes.close()


def test_a_refusal_is_the_same(processes):
    sentence = "spec.m[0]: expected a number that is not -1, got -1."
    expect_refusal(InputError, sentence, processes.process(items(-1)).result, 60)


def test_a_damaged_picture_is_refused_by_the_process_that_decodes_it(processes):
    """Of most damage, PIL decodes what it can."""
    file = write_picture((40, 40), "JPEG", "RGB", 1, b"")
    beginning_of_pixels = file.index(b"\xff\xda")
    damaged = open_undecoded(file[:beginning_of_pixels] + file[-2:])
    sentence = "spec.m[0]: expected an image that can be read, got OSError: …"
    expect_refusal(InputError, sentence, processes.process({"m": ItemBatch.whole([damaged])}).result, 60)


def test_what_is_held_stays(processes):
    """Large fields lie in files, which are written again."""
    fields = [processes.process(items(*[number] * 3)).result(60)["m"][2]["x"] for number in range(12)]
    del fields[::3]
    fields += [processes.process(items(*[number] * 3)).result(60)["m"][2]["x"] for number in range(12)]
    assert [float(x.mean()) for x in fields] == [*(n for n in range(12) if n % 3), *range(12)]


def test_the_log_says_where_moving_items_costs_more_than_processing_them(processes, monkeypatch, caplog):
    """The function of the spec returns the items, which are large."""
    monkeypatch.setattr(render_processes.MovingCosts, "WINDOW", 1)
    monkeypatch.setattr(processes._costs, "_has_warned", False)
    for _ in range(3):
        processes.process(items(1, 2, 3)).result(60)
    (record,) = caplog.records
    assert record.getMessage().startswith("spec, render processes: of the last ")


def test_the_log_says_where_there_is_one_process_or_one_core(caplog):
    render_processes.warn_without_cores("spec", 1, 8)
    render_processes.warn_without_cores("spec", 4, 1)
    assert [record.getMessage()[:24] for record in caplog.records] == [
        "spec: 1 on 8 core(s) can",
        "spec: 4 on 1 core(s) can",
    ]


def test_the_log_is_silent_where_processing_takes_longer(caplog):
    render_processes.warn_without_cores("spec", 2, 2)
    costs = render_processes.MovingCosts("spec")
    for _ in range(2 * costs.WINDOW):
        costs.add(processing=0.080, moving=0.012)
    assert not caplog.records


def test_a_folder_without_room_costs_a_request():
    """The next one finds what this one had taken."""
    processes = RenderProcesses(RECIPE, 1)
    with closing(processes):
        processes.wait()
        held = processes.process(items(1, 1, 1)).result(60)["m"][2]["x"]
        processes.process(items(-3)).result(60)
        sentence = "spec, render processes: expected room for items in …, got none: File too large. Make it larger…"
        expect_refusal(MmkitError, sentence, processes.process(items(2, 2, 2)).result, 60)
        assert float(processes.process(items(3)).result(60)["m"][0]["x"][0, 0]) == 3
        processes.process(items(-4)).result(60)
        again = processes.process(items(4, 4, 4)).result(60)["m"][2]["x"]
        assert (float(held.mean()), float(again.mean())) == (1, 4)


@pytest.mark.parametrize("how", ["by an item", "from outside", "it hangs"])
def test_an_end_costs_one_request(processes, how, monkeypatch):
    """The others are answered meanwhile, and both processes are there again."""
    processes.wait()  # one that replaces another may still start, which takes longer than any item
    before = set(processes.pids)
    if how == "from outside":
        os.kill(min(before), signal.SIGKILL)
    if how == "it hangs":
        monkeypatch.setattr(render_processes, "PATIENCE", 10)
        os.kill(min(before), signal.SIGSTOP)
    works = [processes.process(items(-2 if how == "by an item" and i == 3 else i)) for i in range(12)]
    failed = [i for i, work in enumerate(works) if isinstance(work.exception(240), MmkitError)]
    assert failed == [3] if how == "by an item" else len(failed) <= 1
    for i, work in enumerate(works):
        assert i in failed or float(work.result()["m"][0]["x"][0, 0]) == i
    until = time.monotonic() + 30
    while time.monotonic() < until and not set(processes.pids) - before:
        processes.process(items(1)).exception(60)
    assert (len(processes.pids), len(set(processes.pids) - before)) == (2, 1)


def test_what_another_process_cannot_import_is_refused():
    local = ModelSpec("mine", *SPEC.modalities)
    sentence = "mine, render processes: expected a spec that another process can import…"
    expect_refusal(SpecError, sentence, RenderProcesses, {"spec": local}, 1)
