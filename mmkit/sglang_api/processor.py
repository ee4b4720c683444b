"""The class that SGLang calls for each request with items."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from ..errors import InputError
from ..language.field import compact
from ..language.spec import Declaration
from ..plan.bind import plan_for_options
from ..plan.hf_calls import LazyProcessor
from ..plan.item import Item
from ..plan.modality import BoundModality
from ..plan.mrope import compute_positions, find_grids
from ..plan.placement import PlacedPrompt, Placement
from ..plan.plan import EMPTY, Plan
from ..wire.limits import Limits
from .binding import bind_spec
from .fields import choose_feature, hash_fields
from .hooks import check_installed
from .items import ItemReader, LoadMedia

MODALITY = "mmkit_modality"
"""Where an item of SGLang has the name of its modality."""

FEATURE = "mmkit_feature"
"""Where it has the name of the field that is its `feature`."""

FIELDS = "mmkit_fields"
"""Where it has its other fields, by name."""

_CARRIERS = {"image": Modality.IMAGE, "video": Modality.VIDEO, "audio": Modality.AUDIO}


class SpecProcessor(BaseMultimodalProcessor):
    """Turns requests into SGLang's input for its engine; `register` makes a subclass per model."""

    spec: ClassVar[Declaration]
    models: ClassVar[list[type]] = []

    # a text comes as it is, so that the options of the spec's tokenization hold
    generates_input_ids_from_raw_prompt = True
    supports_mm_processor_concurrency = False
    gpu_image_decode = False

    def __init__(
        self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **options: Any
    ) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **options)
        check_installed()
        dtype = ModelConfig.from_server_args(server_args).dtype
        self.plan: Plan = bind_spec(self.spec, hf_config, dtype, _processor)
        self._limits = Limits.from_environment()
        self._load = LoadMedia(self._load_image, self._load_audio)
        # one thread: tokenizers and Hugging Face processors are not for several
        self._executor = ThreadPoolExecutor(1, "mmkit")

    async def process_mm_data_async(
        self,
        image_data: Any = None,
        audio_data: Any = None,
        input_text: Any = "",
        request_obj: Any = None,
        **_: Any,
    ) -> MultimodalProcessorOutput:
        """Return a request in SGLang's form.

        Raises:
            InputError: the request cannot be served; SGLang answers 400, with the sentence.
            SpecError: a mistake of the spec.
        """
        if getattr(request_obj, "mm_hashes", None):
            # with the hash of another caller's item, a caller would get that item
            expected = "no hashes of items, which mmkit makes itself"
            raise InputError(f"{self.spec.name}.mm_hashes", expected, "some", "Leave them out.")
        lists = {
            "image": image_data,
            "video": getattr(request_obj, "video_data", None),
            "audio": audio_data,
        }
        options = getattr(request_obj, "mm_processor_kwargs", None) or {}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self.process_request, input_text, lists, options
        )

    def process_request(
        self,
        prompt: str | Sequence[int],
        lists: Mapping[str, Sequence[Any] | None],
        options: Mapping[str, Any] = EMPTY,
    ) -> MultimodalProcessorOutput:
        """Return a request in SGLang's form.

        Args:
            prompt: a text, or token ids.
            lists: SGLang's lists of media; see `mmkit.sglang_api.items`.
            options: its `mm_processor_kwargs`.

        Raises:
            InputError: the request cannot be served.
            SpecError: a mistake of the spec.
        """
        ids = self._encode(prompt)
        data = ItemReader(self.plan, self._limits, self._load).read_lists(lists)
        items = self.plan.parse_items(data)
        plan = self._find_plan(options)
        plan.fill_in_fields(items)
        plan.fill_in_layouts(items, may_be_larger=bool(options))
        placed = self.plan.rewrite_and_place(ids, items)
        return _make_output(plan, items, placed)

    def shutdown(self) -> None:
        """Stop the thread, besides what SGLang has started."""
        super().shutdown()
        self._executor.shutdown(wait=False)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt.

        SGLang gives a rendered chat as a text, which begins as the template says. The tokenizer
        would begin it a second time.
        """
        if not isinstance(prompt, str):
            return self.plan.encode(prompt)
        tokenizer = self._tokenizer
        start = getattr(tokenizer, "bos_token", None)
        if start and prompt.startswith(start) and self._tokenizer_auto_adds_specials:
            return self.plan.encode(prompt, add_special_tokens=False)
        return self.plan.encode(prompt)

    def _find_plan(self, options: Mapping[str, Any]) -> Plan:
        """Return the plan for the `mm_processor_kwargs` of a request."""
        if not options:
            return self.plan
        scope = self.plan.environment.scope
        processor = scope.proc
        assert isinstance(processor, LazyProcessor)  # as `bind_spec` makes it
        return plan_for_options(
            self.plan, {**scope.kwargs, **options}, processor.with_options(options)
        )

    def _load_image(self, source: Any) -> Any:
        return self._load_single_item(source, Modality.IMAGE)

    def _load_audio(self, source: Any, rate: int | None) -> Any:
        return self._load_single_item(source, Modality.AUDIO, audio_sample_rate=rate)


def _make_output(
    plan: Plan, items: Sequence[Item], placed: PlacedPrompt
) -> MultimodalProcessorOutput:
    """Return a request in SGLang's form.

    Args:
        plan: the plan for the options of the request.
        items: its items, with fields and layouts.
        placed: its prompt, with the layouts of the items.
    """
    by_place = {(item.modality, item.index): item for item in items}
    engine_items: list[MultimodalDataItem] = []
    grids: dict[int, np.ndarray] = {}
    for placement in placed.placements:
        modality = plan.modalities[placement.modality]
        if modality.is_ids_only:  # nothing of it reaches the model
            continue
        item = by_place[placement.modality, placement.index]
        engine_items.append(_make_item(modality, item, placement))
        mask = np.frombuffer(placement.tokens.mask, np.bool_)
        grids |= find_grids(modality, item.fields, mask, placement.start)
    output = MultimodalProcessorOutput(input_ids=placed.token_ids, mm_items=engine_items)
    if any(modality.grid for modality in plan.modalities.values()):
        positions, delta = compute_positions(len(placed.token_ids), grids)
        output.mrope_positions = positions
        output.mrope_position_delta = torch.tensor([[delta]])
    return output


def _make_item(modality: BoundModality, item: Item, placement: Placement) -> MultimodalDataItem:
    """Return an item in SGLang's form."""
    runs = []
    for start, length in placement.tokens.runs:
        first = placement.start + start
        runs.append((first, first + length - 1))  # SGLang's ends are included
    # SGLang encodes an item of several runs by itself only if it is audio
    carrier = Modality.AUDIO
    if len(runs) == 1:
        carrier = _CARRIERS.get(modality.name, Modality.AUDIO)
    fields: dict[str, Any] = {}
    for name, value in item.fields.items():
        if name in modality.fields_and_embeds:
            fields[name] = compact(value)
    identity = hash_fields(modality, fields)
    feature = modality.parser.embeds_field
    if not item.is_embedding:
        feature = choose_feature(modality, fields)
    engine_item = MultimodalDataItem(
        modality=carrier,
        offsets=runs,
        feature=fields.pop(feature),
        model_specific_data={MODALITY: modality.name, FEATURE: feature, FIELDS: fields},
    )
    engine_item.set_identity(identity)
    return engine_item
