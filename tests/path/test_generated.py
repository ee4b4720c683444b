"""The generated classes: their source and modules, their registration, subclasses of them, and the dummy inputs."""

from __future__ import annotations

import importlib
import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry

from examples.terra.spec import TERRA
from mmkit import Audio, Image, InputError, ModelSpec, Video, embed
from mmkit.testing import processors, vllm_path
from mmkit.vllm_api.pipeline import Request
from tests.path.plain import ONES, ids, plain, processor, run
from tests.path.planted.base import checkpoint
from tests.unit.common import make_modality


class RegisteredForCausalLM(processors.StandIn):
    """What vLLM's registry asks of a multimodal model, and nothing else."""


def registered(spec: ModelSpec, **classes: type) -> Any:
    """The processor of a spec by vLLM's registries, as it makes it in its processes."""
    spec.register(RegisteredForCausalLM, **classes)
    # itself: no process is spawned to look at it
    ModelRegistry.register_model("RegisteredForCausalLM", RegisteredForCausalLM)
    return processors.make_registered_processor(processors.load_model_config(checkpoint("RegisteredForCausalLM")))


@pytest.mark.parametrize(
    ("spec", "name", "home"), [(TERRA, "Terra", "mmkit.generated.examples.terra.spec.TERRA"), (plain(), "Plain", None)]
)
def test_generated_classes(spec: ModelSpec, name: str, home: str | None) -> None:
    """They can be read and pickled, also those of a spec that no module holds."""
    classes = spec.classes
    assert [c.__name__ for c in classes] == [f"{name}{part}" for part in ("ProcessingInfo", "DummyInputs", "Processor")]
    assert inspect.getsource(classes.processor).startswith(f"class {name}Processor(Processor):")
    assert repr(spec.modalities[0].layout) in inspect.getsource(inspect.getmodule(classes.info))
    assert all(c.__doc__ for c in classes)
    assert [pickle.loads(pickle.dumps(c)) for c in classes] == list(classes) == list(spec.classes)
    assert home in (None, classes.info.__module__)


def test_modules_that_do_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^mmkit\.generated\.no_such\.SPEC: No module named 'no_such'$"):
        importlib.import_module("mmkit.generated.no_such.SPEC")


def test_a_variable_that_is_assigned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, or by importlib.reload: the module of its classes has those of the last spec."""
    source = (
        "from mmkit import ModelSpec\nfrom tests.path.planted.base import frames\nSPEC = ModelSpec('first', frames())\n"
    )
    (tmp_path / "assigned_again.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("assigned_again")
    for _ in range(2):
        assert module.SPEC.classes.info.spec is module.SPEC
        own = importlib.import_module("mmkit.generated.assigned_again.SPEC")
        assert own.FirstProcessingInfo is module.SPEC.classes.info
        importlib.reload(module)


def test_registration() -> None:
    """It can be repeated, and of subclasses it is they that are asked: a separator after the prompt as Chameleon's, a
    limit, a dummy item."""
    spec = plain()
    assert type(registered(spec)) is type(registered(spec)) is spec.classes.processor
    assert RegisteredForCausalLM.mm_spec is spec

    class Sub(spec.classes.processor):  # type: ignore[name-defined, misc]
        def render(self, request: Request, *timer: Any) -> Any:
            return super().render(replace(request, prompt=[*request.prompt, *ids("b")]), *timer)

    class Info(spec.classes.info):  # type: ignore[name-defined, misc]
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"frames": 1}

    class Dummies(spec.classes.dummy_inputs):  # type: ignore[name-defined, misc]
        def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
            return {"frames": [3 * ONES] * mm_counts["frames"]}

    instance = registered(spec, processor=Sub, info=Info, dummy_inputs=Dummies)
    assert run(instance, "<frame>", {"frames": ONES}).ids == ids("<pad> <pad> b")
    with pytest.raises(InputError, match="At most 1 "):
        run(instance, "<frame> <frame>", {"frames": [ONES, ONES]})
    dummy = vllm_path.read_outcome(instance.get_dummy_mm_inputs({"frames": 1}))
    assert torch.equal(dummy.fields["frames"][0]["frames"], 3 * ONES)


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
    own = make_modality(name, item=item, layout=embed(9) * 3, process=lambda items, _: {"x": [0] * len(items)})
    spec = ModelSpec("sized", own)
    instance = processor(spec, limit_mm_per_prompt={name: {"count": 2, **sizes}})
    _, items = instance.dummy_inputs.worst(256, {name: 2}, instance.info.ctx.get_mm_config().limit_per_prompt)
    known = [vars(instance.plan.modalities[name].item.facts(value, 0)) for value in items[name].get_all()]
    assert [{key: one[key] for key in facts} for one in known] == [facts] * 2
    assert len(instance.get_dummy_mm_inputs({name: 2})["mm_placeholders"][name]) == 2
