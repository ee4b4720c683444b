"""Ejected files: plain vLLM classes without mmkit that make the same of every request as the generated ones."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from vllm import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY

from mmkit import (
    Audio,
    Modality,
    ModelSpec,
    Scope,
    SpecError,
    Tensor,
    Video,
    after,
    batched,
    between,
    call,
    ceil_div,
    cfg,
    each,
    embed,
    end,
    equal,
    flat,
    floor,
    fmt,
    hf,
    in_place,
    insert,
    item,
    maximum,
    option,
    out,
    replace,
    shared,
    start,
    tok,
    token,
    where,
)
from mmkit.eject import eject
from mmkit.testing import harness, specs
from mmkit.testing.strategies import Request, items
from mmkit.testing.subject import Subject
from mmkit.vllm_api import kit
from tests import oracles

TERRA = Path(__file__).parents[2] / "examples" / "terra" / "checkpoint"
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


def imported(text: str, folder: Path) -> Any:
    """The module of an ejected file."""
    path = folder / f"ejected_{next(_numbers)}.py"
    path.write_text(text)
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules[path.stem] = module
    with without_mmkit():
        made.loader.exec_module(module)
    return module


def built(spec: ModelSpec, text: str, folder: Path, config: Any) -> Any:
    """The ejected processor of a spec."""
    module, prefix = imported(text, folder), spec.classes.processor.__name__.removesuffix("Processor")
    info, dummy, made = (getattr(module, prefix + s) for s in ("ProcessingInfo", "DummyInputs", "Processor"))
    return harness.generated(info, dummy, made, config)


@functools.cache
def folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="mmkit-eject-")
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory[str]] = []


COMPARED: Counter[str] = Counter()
TAKEN: Counter[str] = Counter()
"""Requests by spec, and those of them that were not refused."""


class Pair:
    """A generated processor and the ejected one."""

    def __init__(self, spec: ModelSpec, ours: Any) -> None:
        self.spec, self.ours, self.plan = spec, ours, ours.info.plan
        self.text = eject(spec)
        self.ejected = built(spec, self.text, folder(), ours.info.ctx.model_config)
        drawn = {name: items(modality.item) for name, modality in self.plan.modalities.items()}
        self.subject = Subject(ours, drawn, model_dir=".", plan=self.plan)
        self.both = (self.ours, self.ejected)

    def same(self, prompt: Any, data: Any, kwargs: Any = None, caches: Sequence[Any] = (None, None)) -> Any:
        """The outcome of a request, which is the same for both, errors and their messages included."""
        COMPARED[self.spec.name] += 1
        ours, ejected = (_outcome(p, prompt, data, kwargs or {}, c) for p, c in zip(self.both, caches, strict=True))
        assert_equal(ours, ejected)
        TAKEN[self.spec.name] += not isinstance(ours[0], set)
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
        from examples.terra.spec import TERRA as spec

        made = spec.classes
        config = harness.model_config(TERRA, trust_remote_code=False)
        return Pair(spec, harness.generated(made.info, made.dummy_inputs, made.processor, config))
    spec = oracles.SYSTEMS[name].load_spec()
    return Pair(spec, oracles.processor(name, enable_mm_embeds=True))


NAMES = ["terra", *oracles.SYSTEMS]
OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "fuyu": [{}, {"size": {"height": 60, "width": 90}}],
    "internvl2": [{}, {"max_dynamic_patch": 2}, {"dynamic_image_size": False}, {"use_thumbnail": False}],
    "molmo": [{}, {"max_crops": 2}],
}


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
    assert made.plan._numbered == ejected.surplus
    for counts in ({name: 1} for name in made.plan.modalities):
        assert ours.get_mm_max_tokens_per_item(64, counts) == ejected.get_mm_max_tokens_per_item(64, counts)
        one, other = (kit.dummy(processor, counts) for processor in made.both)
        for key in ("prompt_token_ids", "mm_hashes"):
            assert one[key] == other[key]
        assert repr(one["mm_placeholders"]) == repr(other["mm_placeholders"])


STORED = [(name, case) for name, system in oracles.SYSTEMS.items() for case in system.cases()]


@pytest.mark.parametrize("name", oracles.SYSTEMS)
def test_stored_cases(name: str) -> None:
    made, system = pair(name), oracles.SYSTEMS[name]
    for case in system.cases():
        prompt = (
            oracles.ids(case)
            if "prompt" not in case
            else system.encode(made.ours.info.ctx.tokenizer, case["prompt"], case["tokenize"])
        )
        made.same(prompt, oracles.items_of(case), case.get("mm_processor_kwargs", {}))
    assert TAKEN[system.load_spec().name] > 5


@pytest.mark.parametrize("name", NAMES)
def test_generated_requests(name: str) -> None:
    """Sequences of requests, expanded prompts again, and caches; at the end each pair of caches has seen the same."""
    made = pair(name)
    options = st.sampled_from(list(OPTIONS.get(name, [{}])))

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(requests=st.lists(st.tuples(made.subject.requests(most=2), options), min_size=1, max_size=3))
    def holds(requests: Sequence[tuple[Request, Mapping[str, Any]]]) -> None:
        caches = [harness.Caches(processor, 0.01, pair=True) for processor in made.both]
        for request, kwargs in requests:
            got = made.same(request.prompt, request.data(), kwargs, caches)
            if not isinstance(got[0], set):
                made.same(got[0].ids, request.data(), kwargs)
            made.same([*request.prompt, *request.prompt], request.data(), kwargs)
            made.same(request.prompt[1:], request.data(), kwargs)

    before = TAKEN[made.spec.name]
    holds()
    assert TAKEN[made.spec.name] > before + 10


def picture(width: int = 40, height: int = 30) -> Any:
    return PILImage.new("RGB", (width, height), (10, 200, 30))


BAD_IMAGES: list[Any] = [
    None,
    [],
    5,
    "image.png",
    [None],
    np.zeros((0, 4, 3), np.uint8),
    np.zeros((4, 4, 5), np.uint8),
    np.full((3, 8, 8), np.nan, np.float32),
    torch.zeros(3, 8, 8).to_sparse(),
    [picture(), "x"],
    {"image_embeds": torch.full((2, 8), float("inf"))},
    {"image_embeds": [torch.zeros(4)]},
    {"image_embeds": []},
    torch.zeros(1, 4, 3),
]

BAD_ACTIONS: list[Any] = [
    None,
    [],
    5,
    "actions",
    [None],
    torch.zeros(5, 3),
    torch.zeros(1, 6, 3, dtype=torch.int64),
    torch.zeros(6, 3, dtype=torch.complex64),
    np.zeros((6, 3), dtype=bool),
    [[0.0, 1.0], [2.0]],
    [[["x", 0, 0]] * 6],
    torch.full((6, 3), float("nan")),
    torch.full((6, 3), float("inf")),
    torch.full((6, 3), 1000.5),
    torch.full((6, 3), 1000.0, dtype=torch.bfloat16),
    np.ma.masked_array(np.zeros((6, 3)), mask=True),
    np.zeros((6, 3), dtype=object),
    {"actions_embeds": [torch.zeros(6, 8)]},
    torch.zeros(26, 6, 3),
]


@pytest.mark.parametrize("name", NAMES)
def test_refusals(name: str) -> None:
    made = pair(name)
    modality = next(iter(made.plan.modalities))
    good = torch.zeros(6, 3) if name == "terra" else picture()
    first: Any = made.plan.modalities[modality]
    written = [] if first.updates[0].kind != "replace" else list(first.updates[0].resolve(made.plan._scope)[1])
    prompt = written or sorted(made.plan.embed_ids)[:1]
    refused = 0
    for bad in BAD_ACTIONS if name == "terra" else BAD_IMAGES:
        refused += isinstance(made.same(prompt, {modality: bad})[0], set)
    odd = [[-1], [10**9], ["x"], [1.5], [True], [2**31]]
    for ids in ([], [1], [1, *prompt, 1], [*prompt, *prompt], [*prompt] * 3, *([*prompt, *ids] for ids in odd)):
        for count in (1, 2):
            refused += isinstance(made.same(ids, {modality: [good] * count})[0], set)
    refused += isinstance(made.same(prompt, {"sound": [good]})[0], set)
    assert refused > 15


@pytest.mark.parametrize("name", NAMES)
def test_prompts_without_items(name: str) -> None:
    """vLLM's renderer passes them through the tokenization parameters."""
    made = pair(name)
    for ids in ([], [1, 2, 3], [0], sorted(made.plan.embed_ids)[:1], [-1], [10**9]):
        got = []
        for info in (made.ours.info, made.ejected.info):
            params = info.get_default_tok_params().with_kwargs()
            try:
                got.append(params.apply_post_tokenization(info.ctx.tokenizer, {"prompt_token_ids": list(ids)}))
            except ValueError as error:
                got.append(str(error))
        assert got[0] == got[1]


def test_an_ejected_file_runs_in_a_process_without_mmkit(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(pair("terra").text)
    code = (
        "import sys; sys.modules['mmkit'] = None\nimport plain\nfrom vllm.multimodal.processing import "
        "BaseMultiModalProcessor as B\nassert issubclass(plain.TerraProcessor, B)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- specs of every kind ---------------------------------------------------------------------------------------------


def alpha_list(values: Any, scope: Scope) -> dict[str, Any]:
    return {"alpha_data": list(values)}


def alpha_joined(values: Any, scope: Scope) -> dict[str, Any]:
    return {"alpha_data": torch.cat(list(values))}


def beta_list(values: Any, scope: Scope) -> dict[str, Any]:
    return {"beta_data": list(values)}


def beta_joined(values: Any, scope: Scope) -> dict[str, Any]:
    return {"beta_data": torch.cat(list(values))}


FUNCTIONS = {("alpha", False): alpha_list, ("alpha", True): alpha_joined}
FUNCTIONS |= {("beta", False): beta_list, ("beta", True): beta_joined}


@functools.cache
def made_up_config() -> Any:
    harness.stand_in("MmkitMadeUp")
    return harness.model_config(specs.checkpoint(), enable_mm_embeds=True)


def pair_of(spec: ModelSpec) -> Pair:
    made = spec.classes
    return Pair(spec, harness.generated(made.info, made.dummy_inputs, made.processor, made_up_config()))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
@given(data=st.data())
def test_generated_specs(data: Any) -> None:
    sample = data.draw(specs.specs())
    drawn = sample.spec
    with_functions = [m.model_copy(update={"process": FUNCTIONS[m.name, m.process.joined]}) for m in drawn.modalities]
    spec = ModelSpec("made_up", *with_functions, **({"prompt": drawn.prompt} if drawn.prompt is not None else {}))
    try:
        made = pair_of(spec)
    except SpecError:
        with pytest.raises(ValueError, match="made_up"):
            built(spec, eject(spec), folder(), made_up_config())
        return
    assert owners(made) == {token: set(names) for token, names in made.ejected.info.owners.items()}
    for _ in range(2):
        request = data.draw(made.subject.requests())
        got = made.same(request.prompt, request.data())
        if not isinstance(got[0], set):
            made.same(got[0].ids, request.data())
        made.same(request.prompt[1:], request.data())


WORDS = ("a", "b", "c", "d", "e", "f")
SIDES = {"small": 2}


class Padded:
    """Called like a Hugging Face processor: items padded to the longest."""

    def __init__(self, extra: int) -> None:
        self.extra = extra

    def __call__(self, series: Sequence[torch.Tensor], text: str = "", **options: Any) -> dict[str, Any]:
        longest = max(map(len, series)) + self.extra
        made = [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in series]
        return {"padded": torch.stack(made), "kept": torch.tensor([len(one) for one in series]), "text": text}


def letter(index: int) -> str:
    """The word of an index."""
    return WORDS[index % len(WORDS)]


def ends(s: Scope) -> list[int]:
    """The prompt, closed."""
    return [*s.prompt, s.tok["</s>"]]


def scaled(values: Sequence[Any], s: Scope) -> dict[str, Any]:
    """Audio of a scale that a request may choose."""
    scale = s.kwargs.get("scale", s.cfg.two)
    return {"audio_features": [torch.as_tensor(value) * scale for value in values]}


def stacked(values: Sequence[Any], s: Scope) -> dict[str, Any]:
    """Brightness of the frames of videos, one after the other."""
    frames = [torch.as_tensor(np.asarray(value[0])).float().mean((1, 2, 3)) for value in values]
    return {"video_frames": torch.cat(frames), "video_lengths": [torch.tensor(len(f)) for f in frames]}


rows = maximum(1, ceil_div(item.length, cfg.two))
mark = embed(tok["<alpha_embed>"])
half = option("half", cfg.one)

SPECS = {
    "numbered": ModelSpec(
        "numbered",
        Modality(
            "alpha",
            item=Tensor(shape=(between(1, cfg.three), 2), dtype="int64", bound=9),
            layout=mark * rows + tok[call(letter, item.index)],
            update=replace(tok[call(letter, item.index)] + tok["<alpha>"]),
            fields={"alpha_data": flat(item.length, dtype="int64")},
            limit=cfg.three,
        ),
        prompt=ends,
    ),
    "looped": ModelSpec(
        "looped",
        Modality(
            "alpha",
            item=Tensor(shape=(between(1, 4), 2), finite=False, largest=[(4, 2), (cfg.three, 2)]),
            layout=each(
                item.length,
                lambda x: each(cfg.rows, lambda y: mark * y + tok["<alpha_open>"], sep=tok["a"]) + mark * (x + half),
                sep=tok["b"],
                last=tok["<alpha_close>"],
            )
            + token(
                where(
                    item.length > 1, where(item.length > 2, tok["c"], tok["a"]), embed(tok["<alpha_embed>"]) + tok["d"]
                )
            ),
            update=[replace(tok["<alpha>"] + tok["e"]), replace(tok["<alpha>"])],
            fields={
                "alpha_data": batched(shape=(between(1, 4), 2)),
                "alpha_sizes": batched(value=item.length * cfg.two, dtype="int32", keep_on_cpu=True),
                "alpha_side": shared(value=call(SIDES.get, "small")),
            },
            process=alpha_list,
            embeds=mark * item.length,
        ),
        Modality(
            "beta",
            item=Tensor(shape=()),
            layout=lambda s: [s.tok["<beta_open>"]] * s.item.index + [s.tok["<beta_close>"]],
            update=insert(end()),
            fields={"beta_data": batched()},
            when=lambda s: "<missing>" in s.tok,
        ),
    ),
    "padded": ModelSpec(
        "padded",
        Modality(
            "alpha",
            item=Tensor(shape=(between(1, 4), 2)),
            layout=mark * out.alpha_kept
            + token(where(item.length > 3, token(where(item.length > 1, tok["c"], tok["d"])), tok["b"])),
            update=insert(after(tok["<s>"])),
            fields={"alpha_data": batched(), "alpha_kept": batched(dtype="int64")},
            process=hf(
                call(Padded, option("extra", cfg.one)),
                inputs={"alpha": "series"},
                outputs={"padded": "alpha_data", "kept": "alpha_kept"},
                unpad={"alpha_data": (out.alpha_kept, 2)},
                text=fmt("<{}>", cfg.two),
            ),
            cache=item.count <= cfg.two,
        ),
    ),
    "media": ModelSpec(
        "media",
        Modality(
            "audio",
            item=Audio(largest=40, rate=16),
            layout=embed(tok["<alpha_embed>"]) * ceil_div(item.length, 8),
            update=in_place(),
            fields={"audio_features": batched()},
            process=scaled,
        ),
        Modality(
            "video",
            item=Video(largest=[(4, 8, 8), (2, 16, 8)], metadata=True),
            layout=embed(tok["<beta_embed>"]) * (item.frames + where(equal(item.metadata.fps, 1.0), 1, 0)),
            update=insert(start()),
            fields={"video_frames": flat(out.video_lengths), "video_lengths": batched()},
            process=stacked,
            cache=False,
            limit=2,
        ),
    ),
}
CHOICES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "looped": [{}, {"half": 2}, {"half": -1}],
    "padded": [{}, {"extra": 2}],
    "media": [{}, {"scale": 3}],
}


@pytest.mark.parametrize("name", SPECS)
def test_every_part_of_the_language(name: str) -> None:
    made = pair_of(SPECS[name])
    assert owners(made) == {token: set(names) for token, names in made.ejected.info.owners.items()}
    assert made.plan._numbered == made.ejected.info.surplus
    for counts in ({modality: 2} for modality in made.plan.modalities):
        one, other = (kit.dummy(processor, counts) for processor in made.both)
        assert one["prompt_token_ids"] == other["prompt_token_ids"]
    options = st.sampled_from(list(CHOICES.get(name, [{}])))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(requests=st.lists(st.tuples(made.subject.requests(), options), min_size=1, max_size=3))
    def holds(requests: Sequence[tuple[Request, Mapping[str, Any]]]) -> None:
        caches = [harness.Caches(processor, 0.01, pair=True) for processor in made.both]
        for request, kwargs in requests:
            got = made.same(request.prompt, request.data(), kwargs, caches)
            if not isinstance(got[0], set):
                made.same(got[0].ids, request.data(), kwargs)
            made.same(request.prompt[1:], request.data(), kwargs)

    holds()
    assert TAKEN[name] > 5


@pytest.mark.parametrize("name", ["terra", "internvl2", "molmo", "fuyu"])
def test_without_ruff_the_text_is_tidy_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmkit.eject import source

    monkeypatch.setattr(source, "_formatted", lambda text: text)
    text = eject(pair(name).spec)
    assert max(map(len, text.splitlines())) <= 120
    code, formatted = (ast.unparse(ast.parse(t)).partition("class ")[2] for t in (text, pair(name).text))
    assert code == formatted


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("terra", "bound=1000.0", "bound=999.0"),
        ("terra", "num_temporal_embeddings - 1", "num_temporal_embeddings"),
        ("llava", "PATCHES + CLASS_TOKEN", "PATCHES - CLASS_TOKEN + 1"),
        ("fuyu", 'literal(tok["|NEWLINE|"])', 'embed(tok["|NEWLINE|"])'),
        ("blip2", '("start", [])', '("end", [])'),
        ("deepseek_vl2", "s.item.count <= 2", "s.item.count <= 3"),
        ("florence2", "literal(s.cfg.eos_token_id)", "literal(s.cfg.bos_token_id)"),
    ],
)
def test_the_comparison_sees_a_change(name: str, old: str, new: str) -> None:
    made, mutant = pair(name), copy(pair(name))
    assert old in made.text
    mutant.ejected = built(made.spec, made.text.replace(old, new), folder(), made.ours.info.ctx.model_config)
    mutant.both = (made.ours, mutant.ejected)
    with pytest.raises(AssertionError):
        _probe(mutant)


def _probe(made: Pair) -> None:
    """Compare limits, and requests of one to three items."""
    limits = [processor.info.get_supported_mm_limits() for processor in made.both]
    assert limits[0] == limits[1]
    modality = next(iter(made.plan.modalities.values()))
    way = modality.updates[0]
    item = torch.full((6, 3), 999.5) if modality.name == "actions" else picture()
    written = sorted(made.plan.embed_ids) * 6 if way.kind == "in_place" else way.resolve(made.plan._scope)[1]
    for count in (1, 2, 3):
        made.same([made.subject.ordinary[0], *written * count], {modality.name: [item] * count})


def test_registered_as_its_docstring_says() -> None:
    """With vLLM's registry, on a model class."""
    made = pair("llava")
    module = imported(made.text, folder())
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
    ours, ejected = (_outcome(p, [written], {"image": [picture()]}, {}, None) for p in (made.ours, processor))
    assert_equal(ours, ejected)


def test_a_checkpoint_tells_mappings_from_objects() -> None:
    parts = {"item": Tensor(shape=(2, 2)), "layout": mark, "update": in_place(), "fields": {"alpha_data": batched()}}
    spec = ModelSpec("nested", Modality("alpha", **parts, limit=floor(cfg.rope_parameters.rope_theta)))
    config = made_up_config()
    text = eject(spec, Scope(cfg=config.hf_config))
    assert 'rope_parameters["rope_theta"]' in text
    assert built(spec, text, folder(), config).info.get_supported_mm_limits() == {"alpha": 10000}
    with pytest.raises(ValueError, match=r"^nested.alpha, limit: AttributeError"):
        built(spec, eject(spec), folder(), config)


@pytest.mark.parametrize("target", ["examples.terra.spec:TERRA", "examples.gallery.fuyu:FUYU"])
def test_the_command(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mmkit.cli.eject import command

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


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "a function that uses mmkit": (
        {"layout": uses_mmkit},
        "spec, eject: expected functions that use nothing of mmkit but Scope and InputError, got embed in "
        "tests.path.test_eject.",
    ),
    "variables of another function": (
        {"limit": _closure()},
        "spec, eject: expected a function without variables of another one, got _closure.<locals>.<lambda>. "
        "Make it a plain function of a module.",
    ),
    "an import inside a function": (
        {"limit": imports_within},
        "spec, eject: expected imports of the project above its functions, got one of .oracles in imports_within. "
        "Import it at the top of its module.",
    ),
    "an object": (
        {"process": functools.partial(alpha_list)},
        "spec, eject: expected a function of a module, got a functools.partial. Make it",
    ),
    "a name twice": (
        {"limit": call(place, 2)},
        "spec, eject: expected one thing named place, got ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_ejected(case: str) -> None:
    changed, message = REFUSED[case]
    parts = {"item": Tensor(shape=(2, 2)), "layout": mark, "update": in_place(), "fields": {"alpha_data": batched()}}
    with pytest.raises(SpecError) as refused:
        eject(ModelSpec("spec", Modality("alpha", **{**parts, **changed})))
    assert str(refused.value).startswith(message)
