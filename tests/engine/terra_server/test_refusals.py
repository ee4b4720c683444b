"""What a real server refuses: each in one sentence with its path, in the form of OpenAI's errors."""

from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from examples.server import Server
from tests.night.malformed import ACTIONS, GENERATE, GREEDY, LIMITS, PAD, asking, prompt_of, raw, wrong_error

from . import clients

pytestmark = pytest.mark.timeout(600)

KINDS = {400: "BadRequestError", 413: "RequestEntityTooLargeError"}
NO_ITEM = (
    f"terra.actions: expected one item per placeholder, got 6 placeholders [{PAD}] and no item. "
    'Send items of "actions", or leave the placeholders out.'
)
BIG = f"terra.prompt[1]: expected a token id from 0 to {PAD}, got 2147483648. Check the tokenizer."
PARAMS = "sampling_params"
NO_TOKENIZER = "since the server has no tokenizer, got"
ACTION, ZEROS = [PAD] * 6, [[0.0] * 3] * 6
CHAT = [{"role": "user", "content": "drive"}]
LONG = [token for _ in range(9) for token in prompt_of(0, 3) if token != PAD]


class Refusal(NamedTuple):
    """What the server says to a body; the path of what is wrong is the start of the sentence unless it is given."""

    sentence: str
    body: Any
    param: str | None = ""
    code: int = 400
    path: str = GENERATE


def of(sentence: str, param: str = "", code: int = 400, **body: Any) -> Refusal:
    """A refusal of our own route, of a prompt with one thing wrong."""
    return Refusal(sentence, asking(**{"prompt": [1], **body}), param, code)


def of_frame(sentence: str, **body: Any) -> Refusal:
    return of(sentence, output="frame", **body)


def actions(items: Any) -> dict[str, Any]:
    return {"actions": items}


FIVE = "terra.actions[0]: expected a (6, 3) float32 tensor, got shape (5, 3)."
FEW = f"terra.actions: expected 1 layout [{PAD}] * 6 in the prompt for 1 item, got 2. Write one layout per"
COSTLY = (
    "mm_processor_kwargs: expected none, got some. They can make a request costly: --trust-request-mm-kwargs allows"
)
CHATTED = f"messages: expected a prompt at /v1/mm/generate, {NO_TOKENIZER} messages."
TAKEN = f"{PARAMS}: expected parameters that vLLM takes, got min_tokens must be less than"
COLD = f"{PARAMS}.temperature: expected parameters that vLLM takes, got temperature must be non-negative, got -1.0."
PNG = {"image_url": {"url": "data:image/png;base64,AAAA"}}
REFUSALS = [
    of(TAKEN, min_tokens=5, max_tokens=1),
    of(COLD, temperature=-1),
    of(f"{PARAMS}.n: expected int, got str.", n="1"),
    of(f"{PARAMS}.output_kind: expected one of n, presence_penalty, frequency_penalty, ", output_kind=1),
    of(f"{PARAMS}.logit_bias: expected int, got str.", logit_bias={"x": 1}),
    of(f"{PARAMS}.logit_bias: expected int >= 0, got another.", logit_bias={"-1": 1}),
    of(f"{PARAMS}.seed: expected int <= 9223372036854775807, got another.", seed=2**63),
    of(f"{PARAMS}.allowed_token_ids[1]: expected int <= {PAD}, got another.", allowed_token_ids=[PAD, PAD + 1]),
    of("items.actions[0]: expected a (6, 3) float32 tensor, got a part of kind image.", items=actions([PNG])),
    of(FIVE, "items.actions[0]", prompt=ACTION, items=actions([ZEROS[:5]])),
    of(FEW, "items.actions", prompt=ACTION * 2, items=actions([ZEROS])),
    of(NO_ITEM, "items.actions", prompt=ACTION),
    of("items.image: expected one of actions, got another one.", items={"image": []}),
    of(BIG, "prompt[1]", prompt=[1, 2**31]),
    of(f"prompt: expected token ids, {NO_TOKENIZER} a text.", prompt="hello"),
    of("prompt: expected a prompt, got none.", prompt=None),
    of("model: expected one of terra, got 'gpt'.", model="gpt"),
    of(f"{PARAMS}.stop: expected stop_token_ids, {NO_TOKENIZER} texts.", stop=["x"]),
    of("Structured outputs requires a tokenizer so it can't be used", None, structured_outputs={"regex": "x"}),
    of(COSTLY, mm_processor_kwargs={"a": 1}),
    of("uuids.actions: expected a field", uuids=actions(["a"])),
    of("output: expected one of frame, got 'film'.", output="film"),
    of_frame("max_tokens: expected 64 or none beside output 'frame', got 63. It follows from the", max_tokens=63),
    of_frame("ignore_eos: expected True or none beside output 'frame', got False. It follows from", ignore_eos=False),
    of_frame("stop_token_ids: expected none beside output 'frame', got some.", stop_token_ids=[3]),
    of_frame("allowed_token_ids: expected none beside output 'frame', got some.", allowed_token_ids=[3]),
    of_frame("prompt: expected at most 1686 tokens before the 64 that follow, got 1728.", prompt=LONG),
    of("items.actions[0]: expected at most 100000", code=413, items=actions([[0] * (LIMITS["ELEMENTS"] + 1)])),
    of("items.actions: expected at most 256", code=413, items=actions([[0]] * (LIMITS["ITEMS"] + 1))),
    Refusal("body: expected at most 1000000 bytes, got", b" " * (LIMITS["BODY_BYTES"] + 1), code=413),
    Refusal(BIG, {"model": "terra", "prompt": [1, 2**31]}, "prompt[1]", path="/v1/completions"),
    Refusal(NO_ITEM, {"model": "terra", "prompt": ACTION}, "items.actions", path="/v1/completions"),
    Refusal(CHATTED, {"model": "terra", "messages": CHAT}, path="/v1/chat/completions"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.path} {refusal.sentence[:50]}")
def test_a_refusal_is_one_sentence_with_its_path(server: Server, refusal: Refusal) -> None:
    """Also where the answer would be a stream."""
    sentence, body, param, code, path = refusal
    forms = [body, {**body, "stream": True}] if path == GENERATE and code == 400 else [body]
    for form in forms:
        answer = clients.ask(server, form, path)
        assert not wrong_error(answer.json())
        error = answer.json()["error"]
        assert error["message"].startswith(sentence)
        expected = (sentence.partition(":")[0] if param == "" else param, KINDS[code], code)
        assert (error["param"], error["type"], answer.status_code) == expected


# -- sessions ----------------------------------------------------------------------------------------------------------

FRAMES = {"prompt": prompt_of(0, 3), "items": actions(raw(ACTIONS[0, :3]))}
START = asking(**FRAMES, max_tokens=64, **GREEDY)
FOURTH = raw(ACTIONS[0, 3:4])


def start(**more: Any) -> dict[str, Any]:
    return {"type": "start", **START, **more}


def following(items: Any = FOURTH, **more: Any) -> dict[str, Any]:
    return {"type": "next", "items": actions(items), "sampling_params": more}


def zeros(count: int) -> Any:
    return raw(np.zeros((count, 6, 3), np.float32))


MALFORMED = [
    (b"x", "body: expected JSON, got invalid JSON at byte 0: invalid character."),
    (
        "x" * (LIMITS["BODY_BYTES"] + 1),
        "message: expected at most 1000000 bytes, got more. Send less at once, or raise",
    ),
    ({"type": "x"}, "type: expected a valid value, got invalid value 'x'."),
    (following(), 'type: expected "start" at first, got "next".'),
    ({"type": "start"}, f"{PARAMS}.max_tokens: expected a value, got none."),
    (
        {"type": "start", "sampling_params": {"max_tokens": 1}},
        "prompt: expected at least one token in the first",
    ),
    (start(sampling_params={"n": 2}), f"{PARAMS}.n: expected 1 in a session, got 2."),
    (start(window=3), "window: expected object | null, got int."),
    (start(window={"keep": 0}), "window.keep: expected int >= 1, got another."),
    (start(window={"keep": 3, "size": 4}), "window.size: expected one of keep, got another one."),
]
WHOLE = [
    *MALFORMED,
    (start(), "chunk"),
    (start(), 'type: expected "next" or "close" after the start, got "start".'),
    (following([ZEROS[:5]]), FIVE),
    (following(zeros(22), max_tokens=1), "terra.actions: expected fewer items, got 25. At most 24 actions(s) may be"),
    (
        {"type": "next", "prompt": [1] * 1500},
        f"{PARAMS}.max_tokens: expected at most 1476 more tokens, got 1500",
    ),
    ({"type": "next", "prompt": [999]}, f"terra.prompt[0]: expected a token id from 0 to {PAD}, got 999"),
    (following(), "chunk"),
    ({"type": "close"}, "closed"),
]
SLIDING = [
    (start(output="frame", window={"keep": 2}), "chunk"),
    (following(max_tokens=10), "max_tokens: expected 64 or none beside output 'frame', got 10"),
    (following(zeros(25)), "terra.actions: expected fewer items, got 25. At most 24"),
    # the last frame is what is left at least
    (
        {"type": "next", "prompt": [1] * 1700},
        f"{PARAMS}.max_tokens: expected at most 1686 more tokens, got 1700",
    ),
    (following([ZEROS[:5]]), FIVE),
    (following(), "chunk"),
]


@pytest.mark.parametrize("turns", [WHOLE, SLIDING], ids=["without a window", "with a window and an output"])
def test_a_session_refuses_and_goes_on(server: Server, frames: np.ndarray, turns: list[tuple[Any, str]]) -> None:
    """What is refused begins nothing, adds nothing and drops nothing."""
    chunks = []
    with clients.opened(server) as session:
        assert clients.hear(session)["type"] == "ready"
        for message, expected in turns:
            clients.say(session, message)
            answer = clients.hear(session)
            assert (answer["error"]["message"] if answer["type"] == "error" else answer["type"]).startswith(expected)
            chunks += [answer] if answer["type"] == "chunk" else []
    assert [(chunk["token_ids"], chunk.get("slid")) for chunk in chunks] == [(ids, None) for ids in frames[:2].tolist()]


def test_refusals_are_counted(server: Server) -> None:
    name = 'mmkit:refused_requests_total{modality="actions",reason="item",route="generate"}'

    def refusals() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=clients.WAIT).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    before = refusals()
    clients.ask(server, {"prompt": ACTION})
    assert refusals() == before + 1
