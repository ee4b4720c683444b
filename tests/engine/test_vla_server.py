"""Actions and tables over HTTP: every chunk of a session begins a new output."""

import json

import numpy as np
import pytest

from examples.llava_like.cases import draw_picture
from examples.vla.checkpoint import STATISTICS, make_checkpoint
from mmkit.serve import Client, RequestError
from mmkit.serve.process import Server

from . import vla

pytestmark = pytest.mark.timeout(600)

OPTIONS = ("--dtype", "float32", "--block-size", "32", "--enforce-eager", "--hf-overrides", json.dumps(vla.OVERRIDES))
PROMPT, ITEMS = "<image>pick up the can", {"image": [draw_picture(0)]}
WILD = {"temperature": 2.0, "seed": 1}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("vla"))
    log = tmp_path_factory.mktemp("server") / "log"
    # the process learns of the class as any does that is spawned from here
    with Server(folder, *OPTIONS, log=log) as server, Client(server.url, timeout=240) as client:
        yield client


def test_the_model_tells_its_outputs(client):
    action, table = client.modalities().outputs
    assert (action.tokens, action.shape, action.dtype, action.png) == (7, [7], "float64", False)
    assert (table.tokens, table.shape, table.dtype) == (29, [4, 3, 2], "int64")


def test_an_action_is_an_array_in_the_units_of_the_robot(client):
    choices = client.generate(PROMPT, ITEMS, output="action", n=3, **WILD).choices
    for choice in choices:
        assert (choice.output.shape, choice.output.dtype, choice.text) == ((7,), np.float64, choice.text)
        assert (np.array(STATISTICS["q01"]) <= choice.output).all()
        assert (choice.output <= np.array(STATISTICS["q99"])).all()
    assert len({str(choice.output) for choice in choices}) > 1
    with pytest.raises(RequestError, match=r'output_format: expected "tensor", as action is no image, got "png"'):
        client.generate(PROMPT, ITEMS, output="action", output_format="png")


def test_every_chunk_begins_a_new_output(client):
    with client.session(PROMPT, ITEMS, output="table", stream=True, **WILD) as session:
        chunks = [session.first, *(session.next(prompt="and now") for _ in range(3))]
    for chunk in chunks:
        assert (chunk.output == np.array(chunk.token_ids[:-1]).reshape(4, 7)[:, :6].reshape(4, 3, 2)).all()
        assert set(chunk.output[..., 0].flat) <= set(range(40, 44))
    assert len({str(chunk.token_ids) for chunk in chunks}) > 1


def test_requests_of_both_outputs_and_none_at_once(client):
    wanted = {"table": 29, "action": 7}
    for name, tokens in wanted.items():
        *_, last = (c for event in client.stream(PROMPT, ITEMS, output=name, **WILD) for c in event.choices)
        assert (last.finish_reason, last.output.size) == ("length", 24 if name == "table" else tokens)
    free = client.generate(PROMPT, ITEMS, max_tokens=7, temperature=0.0, ignore_eos=True)
    assert free.choices[0].output is None
