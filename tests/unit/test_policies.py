"""Policies of robots without vLLM: what a spec may say, and what becomes of an observation."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pictures

from mmkit import (
    Image,
    InputError,
    Modality,
    ModelSpec,
    Output,
    Policy,
    Record,
    SpecError,
    Tensor,
    Text,
    any_id,
    batched,
    cfg,
    concat,
    embed,
    fields,
    insert,
    replace,
    tok,
)
from mmkit.plan.policy import BoundPolicy

from .common import NAMES, Tokenizer, expect_refusal, make_modality

CONFIG = SimpleNamespace(vocab_size=200, n=2, cameras=["images/top", "images/wrist"], prompt="<image>{prompt}.")
STEPS = 2


def decode_pairs(ids: Any, scope: Any) -> Any:
    """Return two steps of two values."""
    return ids.reshape(STEPS, 2) - 100.0


def decode_step(ids: Any, scope: Any) -> Any:
    return ids[:2] - 100.0


def read_pixels(pictures: Any, scope: Any) -> Any:
    return {"pixels": torch.zeros(len(pictures), 3)}


def count_letters(texts: Any, scope: Any) -> Any:
    return {"note": torch.tensor([[float(len(text))] for text in texts])}


CAMERA = Modality(
    "image",
    item=Image(largest=(8, 8)),
    placeholder=181,
    tokens=4,
    update=replace(tok["<image>"]),
    fields={"pixels": batched()},
    process=read_pixels,
    limit=2,
)
STATE = Modality(
    "state",
    item=Tensor((3,)),
    placeholder=182,
    tokens=1,
    update=insert(at="start"),
    fields={"state": batched()},
    limit=1,
)
NOTE = make_modality("note", item=Text(8), process=count_letters, fields={"note": batched()}, layout=embed(180))
OUTPUTS = [
    Output("chunk", any_id(100, 150) * 4, decode_pairs),
    Output("step", any_id(100, 150) * 2, decode_step),
]
POLICY = Policy(
    "chunk",
    {"image": ["scene/image", "scene/wrist"], "state": concat("joints", "gripper")},
    prompt="<image><image>{prompt}",
    ignored=["camera_info"],
)


def make_spec(policy: Any = POLICY, modalities: Any = (CAMERA, STATE)) -> ModelSpec:
    return ModelSpec("robot", *modalities, outputs=OUTPUTS, policy=policy)


def bind(policy: Any = POLICY, modalities: Any = (CAMERA, STATE)) -> BoundPolicy:
    bound = make_spec(policy, modalities).bind(CONFIG, Tokenizer()).policy
    assert bound is not None
    return bound


def make_observation(**changes: Any) -> dict[str, Any]:
    """Return a good observation with some values in place of others; without those that are None."""
    observation: dict[str, Any] = {
        "scene/image": np.full((4, 6, 3), 7, np.uint8),
        "scene/wrist": np.full((5, 5, 3), 9, np.uint8),
        "joints": np.array([0.5, -0.5]),
        "gripper": np.array([1.0]),
        "prompt": "pick {it} up",
    }
    for key, value in changes.items():
        key = key.replace("scene_", "scene/")
        observation.pop(key, None)
        if value is not None:
            observation[key] = value
    return observation


# -- the declaration ---------------------------------------------------------------------------------------------------

POLICIES = [
    POLICY,
    Policy("chunk", {"state": "state"}),
    Policy("chunk", {"image": cfg.cameras}, cfg.prompt, instruction="go", metadata={"pose": [1, cfg.n]}),
    Policy("chunk", {"state": concat(cfg.joints, "gripper")}, ignored=cfg.ignored, sampling={"temperature": cfg.heat}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_prints_as_its_source(policy: Policy) -> None:
    copy = eval(repr(policy), dict(NAMES))
    assert copy == policy
    assert hash(copy) == hash(policy)
    spec = make_spec(policy)
    assert spec == make_spec(copy)
    assert repr(policy) in repr(spec)
    assert spec != make_spec(None)


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("a b", {"m": "x"}), {}, "policy, output: expected a name that is a Python identifier, got 'a b'."),
        (("chunk", {}), {}, "policy, items: expected at least one modality, got none."),
        (("chunk", ["x"]), {}, "policy, items: expected a dict of keys of the observation by modality, got ['x']."),
        (("chunk", {"m": 5}), {}, "policy, items['m']: expected a key, or a list with one for each item, got 5."),
        (("chunk", {"m": [5]}), {}, 'policy: expected keys of the observation, as "observation/image", got 5.'),
        (("chunk", {"m": "/x"}), {}, "policy: expected keys of the observation, as \"observation/image\", got '/x'."),
        (("chunk", {"m": concat()}), {}, "policy, items: expected at least one key in concat(), got none."),
        (("chunk", {"m": ["x", "x"]}), {}, "policy: expected the key 'x' in one place, got several."),
        (("chunk", {"m": "prompt"}), {}, "policy: expected the key 'prompt' in one place, got several."),
        (("chunk", {"m": "x"}), {"ignored": ["x"]}, "policy: expected the key 'x' in one place, got several."),
        (("chunk", {"m": "x"}), {"ignored": "y"}, "policy, ignored: expected a list of keys, got 'y'."),
        (("chunk", {"m": "x"}), {"prompt": 5}, "policy, prompt: expected a text, got 5."),
        (("chunk", {"m": "x"}), {"prompt": None}, "policy, prompt: expected a text, got None."),
        (("chunk", {"m": "x"}), {"instruction": 5}, "policy, instruction: expected a text, got 5."),
        (
            ("chunk", {"m": "x"}),
            {"instruction": "go", "prompt": "move"},
            "policy, prompt: expected a prompt with {prompt} beside an instruction, got 'move'.",
        ),
        (("chunk", {"m": "x"}), {"sampling": 5}, "policy, sampling: expected a dict, got 5."),
        (
            ("chunk", {"m": "x"}),
            {"metadata": {"a": [b"x"]}},
            "policy, metadata['a']: expected texts, numbers, lists and dicts, got b'x'.",
        ),
        (("chunk", {"m": "x"}), {"metadata": {5: 1}}, "policy, metadata: expected names that are texts, got 5."),
        (("chunk", {"m": "x"}), {"prompt": fields.x}, "policy: expected values of cfg and tok, got fields.x."),
    ],
)
def test_a_policy_that_cannot_be_is_refused_when_it_is_made(arguments: Any, options: Any, sentence: str) -> None:
    expect_refusal(SpecError, sentence, lambda: Policy(*arguments, **options))


RECORD = make_modality("pair", item=Record(a=Tensor((1,)), b=Tensor((1,))), fields={"a": batched(), "b": batched()})


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (5, "spec 'robot', policy: expected a Policy, got 5."),
        (
            Policy("chunks", {"state": "x"}),
            "spec 'robot', policy, output: expected an output among ['chunk', 'step'], got 'chunks'.",
        ),
        (
            Policy("chunk", {"sound": "x"}),
            "spec 'robot', policy, items: expected modalities among ['image', 'state', 'pair'], got 'sound'.",
        ),
        (
            Policy("chunk", {"image": concat("x", "y")}),
            "spec 'robot', policy, items: expected concat() for a Tensor of one dimension, got 'image' of …",
        ),
        (
            Policy("chunk", {"pair": "x"}),
            "spec 'robot', policy, items: expected a modality whose item is one value, got 'pair' of …",
        ),
    ],
)
def test_a_spec_refuses_a_policy_of_parts_that_it_does_not_have(policy: Any, sentence: str) -> None:
    expect_refusal(SpecError, sentence, make_spec, policy, (CAMERA, STATE, RECORD))


# -- binding -----------------------------------------------------------------------------------------------------------


def test_expressions_of_the_config_name_keys_and_prompt() -> None:
    policy = bind(Policy("step", {"image": cfg.cameras}, cfg.prompt))
    assert list(policy.expected) == ["images/top", "images/wrist", "prompt"]
    assert policy.spec.prompt == "<image>{prompt}."


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (Policy("chunk", {"image": cfg.views}), "robot: policy, items: …views…"),
        (
            Policy("chunk", {"state": ["a", "b"]}),
            "robot: items: expected at most 1 items of 'state', got 2. concat() …",
        ),
        (Policy("chunk", {"state": "a"}, cfg.n), "robot: policy, prompt: expected a text, got 2."),
        (
            Policy("chunk", {"image": cfg.cameras}, ignored=["images/top"]),
            "robot: policy: expected the key 'images/top' in one place, got several.",
        ),
    ],
)
def test_a_policy_that_the_config_contradicts_is_refused_when_it_is_bound(policy: Policy, sentence: str) -> None:
    expect_refusal(SpecError, sentence, bind, policy)


def test_a_modality_that_the_config_leaves_out_has_no_keys() -> None:
    absent = STATE.model_copy(update={"name": "touch", "when": cfg.n == 3, "fields": {"touch": batched()}})
    modalities = (CAMERA, STATE, absent)
    sentence = "robot: items: expected modalities whose when= holds for the config, got 'touch'."
    expect_refusal(SpecError, sentence, bind, Policy("chunk", {"touch": "touch"}), modalities)
    without_keys = Policy("chunk", {"touch": [], "state": "state"})
    assert list(bind(without_keys, modalities).expected) == ["state", "prompt"]


# -- an observation ----------------------------------------------------------------------------------------------------


def test_an_observation_becomes_a_request() -> None:
    observation = make_observation(camera_info=5) | {"camera_info/left": "x"}
    request = bind().make_request(observation)
    assert request["prompt"] == "<image><image>pick {it} up"
    scene, wrist = request["multi_modal_data"]["image"]
    assert (np.asarray(scene) == observation["scene/image"]).all()
    assert (np.asarray(wrist) == observation["scene/wrist"]).all()
    (state,) = request["multi_modal_data"]["state"]
    assert state.tolist() == [0.5, -0.5, 1.0]
    observation["scene/image"][:] = 0
    assert np.asarray(scene).min() == 7, "the request does not lie in the memory of the observation"


def test_the_items_of_an_observation_are_made_once() -> None:
    plan = make_spec().bind(CONFIG, Tokenizer())
    assert plan.policy is not None
    data = plan.policy.make_request(make_observation())["multi_modal_data"]
    for name, items in data.items():
        parsed = plan.modalities[name].parser.parse(items, hidden_size=None)
        for item, parsed_item in zip(items, parsed.values, strict=True):
            assert parsed_item is item


def test_numbers_and_lists_are_parts_of_an_item() -> None:
    request = bind().make_request(make_observation(joints=[0.25, 1], gripper=2))
    assert request["multi_modal_data"]["state"][0].tolist() == [0.25, 1.0, 2.0]


def test_pictures_may_have_their_channels_first() -> None:
    picture = np.arange(3 * 4 * 6, dtype=np.uint8).reshape(3, 4, 6)
    request = bind().make_request(make_observation(scene_image=picture))
    assert (np.asarray(request["multi_modal_data"]["image"][0]) == np.moveaxis(picture, 0, -1)).all()
    picture_of_pil = Pictures.fromarray(np.moveaxis(picture, 0, -1))
    again = bind().make_request(make_observation(scene_image=picture_of_pil))
    assert again["multi_modal_data"]["image"][0].tobytes() == np.moveaxis(picture, 0, -1).tobytes()


def test_a_text_of_an_observation_is_an_item() -> None:
    policy = bind(Policy("chunk", {"note": "note"}, "<image>"), (NOTE,))
    assert policy.make_request({"note": "ab"}) == {"prompt": "<image>", "multi_modal_data": {"note": ["ab"]}}


def test_an_instruction_may_have_a_default() -> None:
    policy = bind(Policy("chunk", {"state": "state"}, "do: {prompt}", instruction="wait"))
    state = np.zeros(3)
    assert policy.make_request({"state": state})["prompt"] == "do: wait"
    assert policy.make_request({"state": state, "prompt": "go"})["prompt"] == "do: go"


NAN = np.array([0.0, np.nan])
KEYS = "['scene/image', 'scene/wrist', 'joints', 'gripper', 'prompt']"
PIXELS = "expected 8-bit RGB pixels (height, width, 3)"
REFUSED = {
    "no camera": ({"scene_wrist": None}, f"scene/wrist: {PIXELS}, got none."),
    "no joints": ({"joints": None}, "joints: expected a part of a (3,) float32 tensor, got none."),
    "no instruction": ({"prompt": None}, "prompt: expected a text, got none."),
    "a number as instruction": ({"prompt": 5}, "prompt: expected a text, got int 5."),
    "a placeholder": (
        {"prompt": "see <image>"},
        "prompt: expected a text without '<image>', which stands for an item, got one with it.",
    ),
    "another key": (
        {"scene_imag": np.zeros(3)},
        f"scene/imag: expected keys among {KEYS}, got 'scene/imag'. Leave it out, or name it in ignored= of …",
    ),
    "a key of many characters": (
        {"a\n" * 99: 1},
        f"{'a' + chr(92) + 'na' + chr(92) + 'n'}…...: expected keys among {KEYS}, got 'a…...'. Leave …",
    ),
    "a key under no ignored one": ({"camera_infos": 1}, "camera_infos: expected keys among …"),
    "too many joints": (
        {"joints": np.zeros(3)},
        "joints + gripper: expected a (3,) float32 tensor, got shape (4,).",
    ),
    "NaN": (
        {"joints": NAN},
        "joints + gripper: expected finite values of magnitude <= 65504, got nan at [1].",
    ),
    "a matrix of joints": (
        {"joints": np.zeros((2, 1))},
        "joints: expected a number, or an array of one dimension, got shape (2, 1) of float64.",
    ),
    "bools": (
        {"joints": np.ones(2, bool)},
        "joints: expected a number, or an array of one dimension, got shape (2,) of bool.",
    ),
    "a bool": ({"gripper": True}, "gripper: expected a number, or an array of one dimension, got bool True."),
    "a text as joints": (
        {"joints": "ab"},
        "joints: expected a number, or an array of one dimension, got str 'ab'.",
    ),
    "lists of several lengths": (
        {"joints": [[1], [1, 2]]},
        "joints: expected a number, or an array of one dimension, got list [[1], [1, 2]].",
    ),
    "a picture of floats": (
        {"scene_image": np.zeros((4, 4, 3), np.float32)},
        f"scene/image: {PIXELS}, got shape (4, 4, 3) of float32. openpi_client.image_tools.convert_to_uint8 makes …",
    ),
    "a picture without channels": (
        {"scene_image": np.zeros((4, 4), np.uint8)},
        f"scene/image: {PIXELS}, got shape (4, 4) of uint8.",
    ),
    "a picture of four channels": (
        {"scene_image": np.zeros((4, 4, 4), np.uint8)},
        f"scene/image: {PIXELS}, got shape (4, 4, 4) of uint8.",
    ),
    "an empty picture": (
        {"scene_image": np.zeros((0, 4, 3), np.uint8)},
        "scene/image: expected an array of shape (height, width, 3) or (3, height, width), got shape (0, 4, 3).",
    ),
    "a text as picture": ({"scene_image": "x"}, "scene/image: expected a PIL image or an array, got str 'x'."),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_malformed_observation_is_refused_by_its_key(changes: Any, sentence: str) -> None:
    expect_refusal(InputError, sentence, bind().make_request, make_observation(**changes))


def test_without_a_place_for_it_an_instruction_is_another_key() -> None:
    policy = bind(Policy("chunk", {"state": "state"}, "go"))
    sentence = "prompt: expected keys among ['state'], got 'prompt'. Leave it out, or name it in ignored= of …"
    expect_refusal(InputError, sentence, policy.make_request, {"state": np.zeros(3), "prompt": "x"})


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("robot.image[1]: expected a, got b.", "scene/wrist: expected a, got b."),
        ("robot.image: expected a, got b.", "scene/image, scene/wrist: expected a, got b."),
        ("robot.state[0], layout: expected a.", "joints + gripper, layout: expected a."),
        ("robot.sound[0]: expected a.", "robot.sound[0]: expected a."),
        ("prompt: expected robot.image[1].", "prompt: expected robot.image[1]."),
    ],
)
def test_a_sentence_about_an_item_names_its_keys(sentence: str, expected: str) -> None:
    assert bind().name_keys(sentence) == expected


# -- actions -----------------------------------------------------------------------------------------------------------


def test_actions_have_a_row_for_each_step() -> None:
    assert bind().decode([100, 101, 102, 103]).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert bind().shape == (2, 2)
    one_step = bind(Policy("step", {"state": "state"}))
    assert one_step.decode([100, 149]).tolist() == [[0.0, 49.0]]
    assert one_step.shape == (1, 2)


def test_actions_may_stand_in_a_text() -> None:
    output = Output("chunk", any_id(100, 150) * 4, decode_pairs, after=153)
    spec = ModelSpec("robot", CAMERA, STATE, outputs=[output], policy=Policy("chunk", {"state": "state"}))
    policy = spec.bind(CONFIG, Tokenizer()).policy
    assert policy is not None
    chunk = [153, 100, 101, 102, 103]
    assert policy.decode([5, 6, *chunk, 5, *chunk[:3]]).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert policy.shape == (2, 2)
    sentence = "robot.outputs.chunk: expected a whole output in the answer, got none. The model wrote text alone, or …"
    for ids in ([5, 6], [5, *chunk[:3]]):
        expect_refusal(InputError, sentence, policy.decode, ids)


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), st.integers(0, 3))
def test_parts_join_in_their_order(values: list[float], split: int) -> None:
    changes = {"joints": np.array(values[:split]), "gripper": np.array(values[split:], np.float32)}
    (state,) = bind().make_request(make_observation(**changes))["multi_modal_data"]["state"]
    assert state.tolist() == values


def test_the_largest_request_has_the_largest_items() -> None:
    request = bind().make_largest_request()
    assert request["prompt"] == "<image><image>"
    assert [picture.size for picture in request["data"]["image"]] == [(8, 8), (8, 8)]
    assert [tuple(state.shape) for state in request["data"]["state"]] == [(3,)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_is_itself_again_from_a_document(policy: Policy) -> None:
    functions = {"robots:read_pixels": read_pixels, "robots:pairs": decode_pairs, "robots:step": decode_step}
    spec = make_spec(policy)
    document = json.loads(json.dumps(spec.to_document(functions=functions)))
    assert ModelSpec.from_document(document, functions=functions) == spec
