"""Ejected files: plain vLLM classes without mmkit that make the same of every request as the generated ones."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from examples.terra import CHECKPOINT
from examples.terra.spec import TERRA
from mmkit import (
    Modality,
    ModelSpec,
    Scope,
    SpecError,
    Tensor,
    batched,
    call,
    cfg,
    embed,
    floor,
    in_place,
    tok,
)
from mmkit.cli.eject import command
from mmkit.eject import eject, source
from mmkit.testing import harness, specs
from mmkit.testing.strategies import Request, items
from mmkit.testing.subject import Subject
from mmkit.vllm_api import kit
from tests import oracles
from tests.profiles import scaled

_FOLDER = tempfile.TemporaryDirectory(prefix="mmkit-eject-")  # removed when the interpreter exits
_numbers = itertools.count()


@contextmanager
def without_mmkit() -> Iterator[None]:
    """Nothing of mmkit or of this project can be imported."""
    blocked = {n for n in sys.modules if n.partition(".")[0] in ("mmkit", "examples", "tests")}
    kept = {name: sys.modules.pop(name) for name in blocked}
    sys.modules.update(dict.fromkeys(("mmkit", "examples", "tests")))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in ("mmkit", "examples", "tests"):
            del sys.modules[name]
        sys.modules.update(kept)


def imported(text: str) -> Any:
    """The module of an ejected file."""
    path = Path(_FOLDER.name) / f"ejected_{next(_numbers)}.py"
    path.write_text(text)
    found: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(found)
    with without_mmkit():
        found.loader.exec_module(module)
    return module


def built(spec: ModelSpec, text: str, config: Any) -> Any:
    """The ejected processor of a spec."""
    module, prefix = imported(text), spec.classes.processor.__name__.removesuffix("Processor")
    info, dummy, made = (getattr(module, prefix + s) for s in ("ProcessingInfo", "DummyInputs", "Processor"))
    return harness.generated(info, dummy, made, config)


class Pair:
    """A generated processor and the ejected one."""

    def __init__(self, spec: ModelSpec, ours: Any) -> None:
        self.spec, self.ours, self.plan = spec, ours, ours.info.plan
        self.text = eject(spec)
        self.ejected = built(spec, self.text, ours.info.ctx.model_config)
        drawn = {name: items(modality.item) for name, modality in self.plan.modalities.items()}
        self.subject = Subject(ours, drawn, model_dir=".", plan=self.plan)
        self.both = (self.ours, self.ejected)
        self.taken = 0  # requests that were not refused

    def same(self, prompt: Any, data: Any, kwargs: Any = None, caches: Sequence[Any] = (None, None)) -> Any:
        """The outcome of a request, which is the same for both, errors and their messages included."""
        ours, ejected = (_outcome(p, prompt, data, kwargs or {}, c) for p, c in zip(self.both, caches, strict=True))
        assert_equal(ours, ejected)
        self.taken += not isinstance(ours[0], set)
        return ours


def _outcome(made: Any, prompt: Any, data: Any, kwargs: Any, cache: Any) -> Any:
    try:
        return harness.run(made, prompt, data, kwargs, cache), kit.render(made, prompt, data, kwargs, None)
    except ValueError as error:
        # what comes of the spec itself may be told in other words; the class of an ejected error is its own
        kinds = {kind.__name__ for kind in type(error).__mro__} & {"InputError", "SpecError"}
        # TypeErrors of functions name the module
        text = re.sub(r"(examples(\.[a-z_]+)+|ejected_\d+)\.", "", str(error))
        return kinds, text if "SpecError" not in kinds else ""


def assert_equal(ours: Any, ejected: Any) -> None:
    if isinstance(ours[0], set) or isinstance(ejected[0], set):
        assert ours == ejected
        return
    for name in ("ids", "ranges", "hashes"):
        assert getattr(ours[0], name) == getattr(ejected[0], name), name
    for made in ("prompt_token_ids", "encoder_prompt_token_ids", "mm_hashes"):
        assert ours[1].get(made) == ejected[1].get(made), made
    assert {n: len(found) for n, found in ours[0].fields.items()} == {n: len(f) for n, f in ejected[0].fields.items()}
    for name, found in ours[0].fields.items():
        for i, (one, other) in enumerate(zip(found, ejected[0].fields[name], strict=True)):
            assert list(one) == list(other)
            for key, value in one.items():
                assert_same_value(value, other[key])
                mine, theirs = ours[0].items[name][i][key], ejected[0].items[name][i][key]
                assert type(mine.field) is type(theirs.field)
                assert getattr(mine.field, "keep_on_cpu", None) == getattr(theirs.field, "keep_on_cpu", None)


def assert_same_value(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@functools.cache
def pair(name: str) -> Pair:
    if name == "terra":
        return pair_of(TERRA, harness.model_config(CHECKPOINT, trust_remote_code=False))
    spec = oracles.SYSTEMS[name].load_spec()
    return Pair(spec, oracles.processor(name, enable_mm_embeds=True))


NAMES = ["terra", *oracles.SYSTEMS]
OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "terra": [{}],
    "fuyu": [{}, {"size": {"height": 60, "width": 90}}],
    "internvl2": [{}, {"max_dynamic_patch": 2}, {"dynamic_image_size": False}, {"use_thumbnail": False}],
}
"""Options of requests, for the specs about which requests are drawn."""


@pytest.mark.parametrize("name", NAMES)
def test_an_ejected_file_is_tidy_and_imports_nothing_of_mmkit(name: str) -> None:
    text = pair(name).text
    assert "mmkit" not in text
    assert max(map(len, text.splitlines())) <= 120
    of_vllm = {"numpy", "torch", "PIL", "blake3", "transformers", "typing_extensions", "vllm"}
    allowed = of_vllm.union(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] in allowed
        elif isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= allowed


def owners(made: Pair) -> dict[int, set[str]]:
    return {token: set(names) for token, names in made.plan._owners.items()}


@pytest.mark.parametrize("name", NAMES)
def test_what_vllm_asks(name: str) -> None:
    """Limits, token counts, the dummy request and the placeholder ids."""
    made = pair(name)
    ours, ejected = made.ours.info, made.ejected.info
    assert ours.get_supported_mm_limits() == ejected.get_supported_mm_limits()
    assert owners(made) == {token: set(names) for token, names in ejected.owners.items()}
    assert made.plan._surplus == ejected.surplus
    for counts in ({name: 1} for name in made.plan.modalities):
        assert ours.get_mm_max_tokens_per_item(64, counts) == ejected.get_mm_max_tokens_per_item(64, counts)
        one, other = (kit.dummy(processor, counts) for processor in made.both)
        for key in ("prompt_token_ids", "mm_hashes"):
            assert one[key] == other[key]
        assert repr(one["mm_placeholders"]) == repr(other["mm_placeholders"])


@pytest.mark.parametrize("name", oracles.SYSTEMS)
def test_stored_cases(name: str) -> None:
    made, system = pair(name), oracles.SYSTEMS[name]
    for case in system.cases():
        if "prompt" in case:
            prompt = system.encode(made.ours.info.ctx.tokenizer, case["prompt"], case["tokenize"])
        else:
            prompt = oracles.ids(case)
        made.same(prompt, oracles.items_of(case), case.get("mm_processor_kwargs", {}))
    assert made.taken > 5


@pytest.mark.parametrize("name", OPTIONS)
def test_drawn_requests(name: str) -> None:
    """Sequences of requests, expanded prompts again, and caches; at the end each pair of caches has seen the same."""
    made = pair(name)
    options = st.sampled_from(OPTIONS[name])
    before = made.taken

    @settings(max_examples=scaled(15))
    @given(requests=st.lists(st.tuples(made.subject.requests(most=2), options), min_size=1, max_size=3))
    def holds(requests: Sequence[tuple[Request, Mapping[str, Any]]]) -> None:
        caches = [harness.Caches(processor, 0.01, pair=True) for processor in made.both]
        for request, kwargs in requests:
            got = made.same(request.prompt, request.data(), kwargs, caches)
            if not isinstance(got[0], set):
                made.same(got[0].ids, request.data(), kwargs)
            made.same([*request.prompt, *request.prompt], request.data(), kwargs)
            made.same(request.prompt[1:], request.data(), kwargs)

    holds()
    assert made.taken > before + 5


PICTURE = PILImage.new("RGB", (40, 30), (10, 200, 30))
BAD: Mapping[str, Sequence[Any]] = {
    "llava": [
        None,
        [],
        "image.png",
        [None],
        np.zeros((4, 4, 5), np.uint8),
        np.full((3, 8, 8), np.nan, np.float32),
        torch.zeros(3, 8, 8).to_sparse(),
        {"image_embeds": torch.full((2, 8), float("inf"))},
        {"image_embeds": []},
    ],
    "terra": [
        5,
        torch.zeros(5, 3),
        torch.zeros(1, 6, 3, dtype=torch.int64),
        [[0.0, 1.0], [2.0]],
        [[["x", 0, 0]] * 6],
        torch.full((6, 3), 1000.5),
        torch.full((6, 3), 1000.0, dtype=torch.bfloat16),
        np.ma.masked_array(np.zeros((6, 3)), mask=True),
        np.zeros((6, 3), dtype=object),
        {"actions_embeds": [torch.zeros(6, 8)]},
        torch.zeros(26, 6, 3),
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    made = pair(name)
    (modality,) = made.plan.modalities
    good = torch.zeros(6, 3) if name == "terra" else PICTURE
    prompt = sorted(made.plan.embed_ids) * (6 if name == "terra" else 1)
    outcomes = [made.same(prompt, {modality: bad}) for bad in BAD[name]]
    for ids in ([], [1], [*prompt, *prompt], [*prompt, -1], [*prompt, 10**9], [*prompt, "x"], [*prompt, True]):
        outcomes += [made.same(ids, {modality: [good] * count}) for count in (1, 2)]
    outcomes.append(made.same(prompt, {"sound": [good]}))
    assert sum(isinstance(outcome[0], set) for outcome in outcomes) > 15


@pytest.mark.parametrize("name", ["terra", "llava"])
def test_prompts_without_items(name: str) -> None:
    """vLLM's renderer passes them through the tokenization parameters."""
    made = pair(name)

    def rendered(info: Any, ids: list[int]) -> Any:
        params = info.get_default_tok_params().with_kwargs()
        try:
            return params.apply_post_tokenization(info.ctx.tokenizer, {"prompt_token_ids": list(ids)})
        except ValueError as error:
            return str(error)

    for ids in ([], [1, 2, 3], sorted(made.plan.embed_ids)[:1], [-1], [10**9]):
        assert rendered(made.ours.info, ids) == rendered(made.ejected.info, ids)


# -- drawn specs ---------------------------------------------------------------------------------------------


def alpha_list(values: Any, scope: Scope) -> dict[str, Any]:
    return {"alpha_data": list(values)}


def alpha_joined(values: Any, scope: Scope) -> dict[str, Any]:
    return {"alpha_data": torch.cat(list(values))}


def beta_list(values: Any, scope: Scope) -> dict[str, Any]:
    return {"beta_data": list(values)}


def beta_joined(values: Any, scope: Scope) -> dict[str, Any]:
    return {"beta_data": torch.cat(list(values))}


PROCESSES = {"alpha": (alpha_list, alpha_joined), "beta": (beta_list, beta_joined)}


@functools.cache
def made_up_config() -> Any:
    harness.stand_in("MmkitMadeUp")
    return harness.model_config(specs.checkpoint(), enable_mm_embeds=True)


def pair_of(spec: ModelSpec, config: Any = None) -> Pair:
    return Pair(spec, harness.generated(*spec.classes, config or made_up_config()))


@settings(max_examples=scaled(10))
@given(data=st.data())
def test_generated_specs(data: Any) -> None:
    sample = data.draw(specs.specs())
    drawn = sample.spec
    with_functions = [m.model_copy(update={"process": PROCESSES[m.name][m.process.joined]}) for m in drawn.modalities]
    spec = ModelSpec("made_up", *with_functions, **({"prompt": drawn.prompt} if drawn.prompt is not None else {}))
    try:
        made = pair_of(spec)
    except SpecError:
        with pytest.raises(ValueError, match="made_up"):
            built(spec, eject(spec), made_up_config())
        return
    assert owners(made) == {token: set(names) for token, names in made.ejected.info.owners.items()}
    for _ in range(2):
        request = data.draw(made.subject.requests())
        got = made.same(request.prompt, request.data())
        if not isinstance(got[0], set):
            made.same(got[0].ids, request.data())
        made.same(request.prompt[1:], request.data())


def test_without_ruff_the_text_is_tidy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_formatted", lambda text: text)
    molmo = pair("molmo")
    text = eject(molmo.spec)
    assert max(map(len, text.splitlines())) <= 120
    code, formatted = (ast.unparse(ast.parse(t)).partition("class ")[2] for t in (text, molmo.text))
    assert code == formatted


def test_registered_as_its_docstring_says() -> None:
    """With vLLM's registry, on a model class."""
    made = pair("llava")
    module = imported(made.text)
    model = type("EjectedLlava", (oracles.MadeUpForCausalLM,), {"__module__": __name__})
    globals()["EjectedLlava"] = model
    ModelRegistry.register_model("EjectedLlava", model)
    MULTIMODAL_REGISTRY.register_processor(
        module.LlavaLikeProcessor, info=module.LlavaLikeProcessingInfo, dummy_inputs=module.LlavaLikeDummyInputs
    )(model)
    overrides = {"architectures": ["EjectedLlava"]}
    config = oracles.model_config(oracles.SYSTEMS["llava"].checkpoint, hf_overrides=overrides)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    assert type(processor) is module.LlavaLikeProcessor
    (written,) = made.plan.modalities["image"].updates[0].resolve(made.plan._scope)[1]
    ours, ejected = (_outcome(p, [written], {"image": [PICTURE]}, {}, None) for p in (made.ours, processor))
    assert_equal(ours, ejected)


PLAIN: dict[str, Any] = {
    "item": Tensor(shape=(2, 2)),
    "layout": embed(tok["<alpha_embed>"]),
    "update": in_place(),
    "fields": {"alpha_data": batched()},
}


def test_a_checkpoint_tells_mappings_from_objects() -> None:
    spec = ModelSpec("nested", Modality("alpha", **PLAIN, limit=floor(cfg.rope_parameters.rope_theta)))
    config = made_up_config()
    text = eject(spec, Scope(cfg=config.hf_config))
    assert 'rope_parameters["rope_theta"]' in text
    assert built(spec, text, config).info.get_supported_mm_limits() == {"alpha": 10000}
    with pytest.raises(ValueError, match=r"^nested.alpha, limit: AttributeError"):
        built(spec, eject(spec), config)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = "examples.terra.spec:TERRA"
    text = command(target, tmp_path / "plain.py")
    assert (tmp_path / "plain.py").read_text() == text
    assert not capsys.readouterr().out
    assert command(target) == text == capsys.readouterr().out


# -- what cannot be ejected ------------------------------------------------------------------------------------------


def uses_mmkit(s: Scope) -> Any:
    return embed(s.tok["<alpha_embed>"])


def place(index: int) -> int:
    """A name that the ejected file has already."""
    return index


def _closure() -> Any:
    number = 2
    return lambda s: number


def imports_within(s: Scope) -> int:
    from tests.oracles import TOLERANCE

    return int(TOLERANCE)


REFUSED: Mapping[str, tuple[str, Any]] = {
    "expected functions that use nothing of mmkit but Scope and InputError, got embed in "
    "tests.path.test_eject. Say it in the declaration instead.": ("layout", uses_mmkit),
    "expected a function without variables of another one, got _closure.<locals>.<lambda>. "
    "Make it a plain function of a module.": ("limit", _closure()),
    "expected imports of the project above its functions, got one of tests.oracles in imports_within. "
    "Import it at the top of its module.": ("limit", imports_within),
    "expected a function of a module, got a functools.partial. Make it a plain function of a module.": (
        "process",
        functools.partial(alpha_list),
    ),
    "expected one thing named place, got mmkit.updates.place and tests.path.test_eject.place. "
    "Rename the one of your module.": ("limit", call(place, 2)),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_ejected(sentence: str) -> None:
    part, value = REFUSED[sentence]
    with pytest.raises(SpecError) as refused:
        eject(ModelSpec("spec", Modality("alpha", **{**PLAIN, part: value})))
    assert str(refused.value) == f"spec, eject: {sentence}"
