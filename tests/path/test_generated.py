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
from mmkit.testing import vllm_path
from mmkit.vllm_api import checkpoint_processors
from mmkit.vllm_api.pipeline import ProcessorRequest
from tests.path.plain import ONES, ids, plain, processor, run
from tests.path.planted.base import checkpoint
from tests.unit.common import make_modality


class RegisteredForCausalLM(checkpoint_processors.StandIn):
    """What vLLM's registry asks of a multimodal model, and nothing else."""


def register(spec: ModelSpec, **classes: type) -> Any:
    """Register a spec, and return its processor by vLLM's registries, as it makes it in its processes."""
    spec.register(RegisteredForCausalLM, **classes)
    # itself: no process is spawned to look at it
    ModelRegistry.register_model("RegisteredForCausalLM", RegisteredForCausalLM)
    return checkpoint_processors.make_registered_processor(
        checkpoint_processors.load_model_config(checkpoint("RegisteredForCausalLM"))
    )


SPECS = [pytest.param(TERRA, "Terra", id="of a module"), pytest.param(plain(), "Plain", id="of no module")]


@pytest.mark.parametrize(("spec", "name"), SPECS)
def test_generated_classes_can_be_read(spec: ModelSpec, name: str) -> None:
    classes = spec.classes
    assert classes.info.__name__ == f"{name}ProcessingInfo"
    assert classes.dummy_inputs.__name__ == f"{name}DummyInputs"
    assert classes.processor.__name__ == f"{name}Processor"
    assert inspect.getsource(classes.processor).startswith(f"class {name}Processor(Processor):")
    assert repr(spec.modalities[0].layout) in inspect.getsource(inspect.getmodule(classes.info))
    for cls in classes:
        assert cls.__doc__


@pytest.mark.parametrize(("spec", "name"), SPECS)
def test_generated_classes_can_be_pickled(spec: ModelSpec, name: str) -> None:
    """Also those of a spec that no module holds."""
    for cls in spec.classes:
        assert pickle.loads(pickle.dumps(cls)) is cls


def test_generated_classes_are_generated_once() -> None:
    spec = plain()
    assert list(spec.classes) == list(spec.classes)


def test_generated_classes_are_in_a_module_named_after_the_variable_of_the_spec() -> None:
    assert TERRA.classes.info.__module__ == "mmkit.generated.examples.terra.spec.TERRA"


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
        generated = importlib.import_module("mmkit.generated.assigned_again.SPEC")
        assert generated.FirstProcessingInfo is module.SPEC.classes.info
        importlib.reload(module)


def test_registration_can_be_repeated() -> None:
    spec = plain()
    first = register(spec)
    second = register(spec)
    assert type(first) is type(second) is spec.classes.processor
    assert RegisteredForCausalLM.mm_spec is spec


def test_a_subclass_of_the_processor_may_add_to_the_prompt() -> None:
    """A separator after it, as Chameleon's."""
    spec = plain()

    class WithSeparator(spec.classes.processor):  # type: ignore[name-defined, misc]
        def render(self, request: ProcessorRequest, *timer: Any) -> Any:
            prompt = list(request.prompt) + ids("b")
            return super().render(replace(request, prompt=prompt), *timer)

    instance = register(spec, processor=WithSeparator)
    assert run(instance, "<frame>", {"frames": ONES}).ids == ids("<pad> <pad> b")


def test_a_subclass_of_the_info_may_set_a_limit() -> None:
    spec = plain()

    class OneFrame(spec.classes.info):  # type: ignore[name-defined, misc]
        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {"frames": 1}

    instance = register(spec, info=OneFrame)
    with pytest.raises(InputError, match="At most 1 "):
        run(instance, "<frame> <frame>", {"frames": [ONES, ONES]})


def test_a_subclass_of_the_dummy_inputs_may_have_another_item() -> None:
    spec = plain()

    class Threes(spec.classes.dummy_inputs):  # type: ignore[name-defined, misc]
        def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any) -> Any:
            return {"frames": [3 * ONES] * mm_counts["frames"]}

    instance = register(spec, dummy_inputs=Threes)
    dummy = vllm_path.collect_outcome(instance.get_dummy_mm_inputs({"frames": 1}))
    assert torch.equal(dummy.fields["frames"][0]["frames"], 3 * ONES)


def number_items(items: Any, scope: Any) -> dict[str, Any]:
    return {"x": [0] * len(items)}


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
    spec = ModelSpec("sized", make_modality(name, item=item, layout=embed(9) * 3, process=number_items))
    instance = processor(spec, limit_mm_per_prompt={name: {"count": 2} | sizes})
    _, items = instance.dummy_inputs.worst(256, {name: 2}, instance.info.ctx.get_mm_config().limit_per_prompt)
    values = items[name].get_all()
    assert len(values) == 2
    for value in values:
        assert facts.items() <= vars(instance.plan.modalities[name].item.facts(value, 0)).items()
    assert len(instance.get_dummy_mm_inputs({name: 2})["mm_placeholders"][name]) == 2
