"""The base of vLLM's classes of models of transformers.

vLLM's Transformers modeling backend makes a model of transformers by `AutoModel`, puts layers of
its own into it, and runs it. Here that model is the author's whole class: with its `forward`, and
with what it does to states before the decoder and to logits after the head. Only the head is
vLLM's. `write_model_source` in `mmkit.generate` writes the subclasses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel, modeling_outputs
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from ..errors import MmkitError, SpecError, convert_errors
from ..vllm_api.compat import find
from .mixin import MultiModalModel
from .weight_names import WeightNames

# vLLM calls this in `__init__`; were it renamed, towers would silently get vLLM's layers
find("model_executor.models.transformers:TransformersForCausalLM.recursive_replace")
MoEMixin = find("model_executor.models.transformers.moe:MoEMixin", default=None)

_AUTO_MODEL = "vllm.model_executor.models.transformers.base.AutoModel"
"""The name by which vLLM's backend asks transformers for a model."""

_ADDS_DIMENSION_TO_MROPE = "uses_mrope" in TransformersForCausalLM.forward.__code__.co_names
"""Whether vLLM's `forward` brings positions of three dimensions to transformers' shape, as it does
before 0.18."""

_MAPS_BY_INSTANCE = hasattr(TransformersForCausalLM, "_create_hf_to_vllm_mapper")
"""Whether vLLM makes the mapper of weight names with the model, as it does from 0.18."""

_REFUSES_OTHER_ATTENTION = hasattr(TransformersForCausalLM, "_create_attention_instances")
"""Whether vLLM refuses a layer that does not call the attention which it puts in, as it does from
0.30."""

_REPLACEABLE_ATTENTION = "a language model whose attention transformers can replace"


def call_on_hf_model(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `TransformersModel` that calls a method of the class it serves."""

    @wraps(method)
    def call(self: Any, *args: Any, **fields: Any) -> Any:
        return method(self.model, *args, **fields)

    return call


class TransformersModel(MultiModalModel, TransformersForCausalLM):
    """Base of vLLM's classes of models of transformers.

    Attributes:
        hf_class: the class that was trained, a causal language model with `mm_spec`.
        model: a model of this class. Its decoder has vLLM's layers, the modules beside the decoder
            are the author's, and in place of its head it has a `_HeadInput`.
    """

    hf_class: ClassVar[Any]
    model: Any
    quant_config: Any
    _language_modules: list[str]
    _takes_positions: bool

    supports_eagle3 = False  # vLLM would take states out of the result of `forward`

    def __new__(cls, *args: Any, vllm_config: Any = None, **options: Any) -> Any:
        """Return a model of a subclass with vLLM's experts, where the config has experts."""
        has_experts = vllm_config is not None and _has_experts(vllm_config.model_config)
        if has_experts and MoEMixin is not None and not issubclass(cls, MoEMixin):
            cls = type(cls.__name__, (MoEMixin, cls), {"__module__": cls.__module__})
        return super().__new__(cls, *args, vllm_config=vllm_config, **options)

    def __init__(self, *, vllm_config: Any = None, prefix: str = "") -> None:
        self._where = f"{self.mm_spec.name}, {self.hf_class.__name__}"
        # a class without `MultiModalMixin` has none
        self._towers: Sequence[str] = getattr(self.hf_class, "vllm_towers", ())
        self._check_engine(vllm_config)
        self._head_name = ""
        self._examine_class(vllm_config.model_config.hf_config)
        with self._make_hf_model():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not _MAPS_BY_INSTANCE:
            names = {"": "model.", f"model.{self._head_name}.": "lm_head."}
            self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix=names)
        self._has_logits_of_class = False

    def _check_engine(self, vllm_config: Any) -> None:
        """Refuse an engine with which the class cannot be served.

        Raises:
            SpecError: says which option.
        """
        remedy = "Serve the model by a class of mmkit.MultiModalModel and vLLM's language model."
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            # the class's `forward` would run on each of them, and vLLM's layers only once
            expected = "all layers in one process of a pipeline"
            got = f"pipeline_parallel_size {vllm_config.parallel_config.pipeline_parallel_size}"
            raise SpecError(self._where, expected, got, remedy)
        mm_config = vllm_config.model_config.multimodal_config
        if getattr(mm_config, "mm_encoder_only", False):
            raise SpecError(self._where, "a language model", "mm_encoder_only", remedy)
        if self._towers and vllm_config.lora_config is not None:
            # vLLM maps tokens of the language model to adapters, and a tower has other positions
            remedy = "Leave vllm_towers out: the towers then have no layers that adapters change."
            raise SpecError(self._where, "vllm_towers without enable_lora", "both", remedy)

    # -- how vLLM makes the model ------------------------------------------------------------------

    @contextmanager
    def _make_hf_model(self) -> Iterator[None]:
        """Let vLLM, which asks `AutoModel`, make the author's class in the context.

        `AutoModel.register` would do so for the whole process, also where the class itself asks
        `AutoModel` for its decoder.
        """
        with patch(_AUTO_MODEL, self):
            yield

    def from_config(self, config: Any, dtype: Any = None, **_: Any) -> Any:
        """Make the author's class on the device of the context, ready for vLLM.

        vLLM calls it in place of `AutoModel.from_config`.

        Raises:
            SpecError: the class cannot be made without weights, has no head, or has a decoder whose
                attention vLLM cannot replace.
        """
        model = self._make_without_weights(config, dtype=dtype)
        decoder = _find_decoder(model)
        if decoder is model:
            expected = "a language model that get_decoder returns"
            remedy = "Name it: def get_decoder(self): return self.language_model."
            raise SpecError(self._where, expected, "the whole model", remedy)
        is_replaceable = getattr(decoder, "_supports_attention_backend", False)
        if not is_replaceable and not _REFUSES_OTHER_ATTENTION:
            got = f"{type(decoder).__name__} without _supports_attention_backend"
            remedy = "Call the attention by ALL_ATTENTION_FUNCTIONS, and set the attribute."
            raise SpecError(self._where, _REPLACEABLE_ATTENTION, got, remedy)
        self._check_tensors(model)
        self._check_towers(model)
        self._takes_positions = "position_ids" in signature(decoder.forward).parameters
        head = _find_head(model, decoder)
        if head is None:
            remedy = "Let get_output_embeddings of the class return it."
            raise SpecError(self._where, "a causal language model with a head", "none", remedy)
        self._head_name = _find_name(model, head)
        model.set_submodule(self._head_name, _HeadInput())
        name_of_decoder = _find_name(model, decoder)
        self._language_modules = []
        for name in _list_language_children(decoder):
            self._language_modules.append(f"{name_of_decoder}.{name}".lstrip("."))
        _subclass_decoder(model, decoder)
        model.get_decoder = lambda: model.get_submodule(name_of_decoder)
        return model

    def _decorate_cls_for_torch_compile(self, cls: Any, *args: Any, **options: Any) -> None:
        """Let vLLM decorate the class of the decoder for torch.compile; vLLM calls it from 0.19 on.

        Up to 0.21 vLLM decorates a subclass, and puts it into the module of transformers' class.
        There the author's class would find it, and call it by its own arguments.
        """
        module = sys.modules[cls.__module__]
        original: Any = getattr(module, cls.__name__, None)
        super()._decorate_cls_for_torch_compile(cls, *args, **options)
        decorated: Any = getattr(module, cls.__name__, None)
        if decorated is not original:
            setattr(module, cls.__name__, original)
            _classes_of_decoders[cls.__base__] = decorated

    def _make_without_weights(self, config: Any, **options: Any) -> Any:
        """Make the author's class on a device that holds no values.

        Raises:
            SpecError: it reads values, or its attention cannot be replaced.
        """
        expected = "a class whose __init__ reads no values of its parameters, which have none yet"
        if not self.hf_class._supports_attention_backend:
            expected = _REPLACEABLE_ATTENTION
        with convert_errors(f"{self._where}.__init__", expected):
            return self.hf_class._from_config(config, **options)

    def _examine_class(self, config: Any) -> None:
        """Find how the author's class names weights, and whether its head shares its weight.

        Whether the head has the weight of the embeddings vLLM reads from the config. There a model
        with a language model inside may say otherwise than the language model, and a class with a
        head of its own may share nothing.
        """
        with torch.device("meta"):
            model = self._make_without_weights(config)
        self._weight_names = WeightNames(self._where, model)
        head = _find_head(model, _find_decoder(model))
        embeddings = model.get_input_embeddings()
        self._has_tied_head = head is not None and head.weight is embeddings.weight
        config.get_text_config().tie_word_embeddings = self._has_tied_head

    def _get_tie_word_embeddings(self) -> bool:
        """Return whether the head has the weight of the embeddings; vLLM asks from 0.20 on."""
        return self._has_tied_head

    def _check_tensors(self, model: Any) -> None:
        """Refuse tensors beside the parameters that were computed from parameters.

        No checkpoint brings them, and the parameters have no values yet.

        Raises:
            SpecError: names one.
        """
        if torch.empty(0).is_meta:  # vLLM only looks at the classes of this model
            return
        for path, module in model.named_modules():
            for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
                if isinstance(value, torch.Tensor) and value.is_meta:
                    where = f"{self._where}.__init__, {f'{path}.{name}'.lstrip('.')}"
                    expected = "a tensor that is not computed from parameters"
                    remedy = "Compute it in the method that reads it."
                    raise SpecError(where, expected, "one that is", remedy)

    def _check_towers(self, model: Any) -> None:
        """Refuse a name in `vllm_towers` that is none of a module beside the decoder.

        Raises:
            SpecError: names it.
        """
        decoder = _find_decoder(model)
        modules = dict(model.named_modules())
        for name in self._towers:
            if name not in modules or _has_module(modules[name], decoder):
                expected = "names of modules beside the decoder, as named_modules() has them"
                raise SpecError(f"{self._where}.vllm_towers", expected, repr(name))

    def recursive_replace(self) -> None:
        """Put vLLM's layers into the decoder, and into the modules that `vllm_towers` names.

        The other modules stay the author's, also those that the author put into the decoder: their
        code may read attributes that vLLM's layers lack.
        """
        with _hide_modules_beside(self.model, [*self._language_modules, *self._towers]):
            super().recursive_replace()

    # -- weights -----------------------------------------------------------------------------------

    def _create_hf_to_vllm_mapper(self) -> None:
        """Map the weight names of the author's class to this model's names.

        Those below `model` are the class's; the head is vLLM's `lm_head`. vLLM's own mapping takes
        `model` for a decoder.
        """
        quant_config = self.quant_config
        self.quant_config = None  # it gets the names below
        super()._create_hf_to_vllm_mapper()
        self.quant_config = quant_config
        # the mapper calls `search` and `sub` of its patterns, and no other method
        patterns: dict[Any, str | None] = {self._weight_names: ""}
        for pattern, new in self.hf_to_vllm_mapper.orig_to_new_regex.items():
            if new is None:  # weights to ignore
                patterns[pattern] = None
        patterns[re.compile(rf"^{re.escape(self._head_name)}\.")] = "lm_head."
        patterns[re.compile(r"^(?!lm_head\.)")] = "model."
        self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_regex=patterns)
        self._maybe_apply_model_mapping()

    def load_weights(self, weights: Any) -> set[str]:
        """Load a checkpoint, with the weight names of the author's class.

        Raises:
            MmkitError: as `MultiModalModel.load_weights`.
            SpecError: the class does something to logits that vLLM cannot do, or transformers
                converts the values of a weight.
        """
        weights = self._weight_names.refuse_converted(weights)
        if not _MAPS_BY_INSTANCE:
            weights = self._weight_names.rename_all(weights)
        loaded = super().load_weights(weights)
        if hasattr(self, "logits_processor"):  # not in a model that vLLM converts for pooling
            self._adopt_logits()
        return loaded

    # -- how vLLM runs the model -------------------------------------------------------------------

    def get_language_model(self) -> Any:
        """Return the model itself, which is one."""
        return self

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return the states that reach the head, (tokens, hidden_size).

        Args:
            input_ids: integers (tokens,), or None.
            positions: integers (tokens,), or (3, tokens) for M-RoPE.
            intermediate_tensors: None.
            inputs_embeds: (tokens, hidden_size), or None.
            options: passed on.
        """
        if positions.ndim == 2 and not _ADDS_DIMENSION_TO_MROPE:
            positions = positions[:, None]
        super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **options)
        states = self._head_input.states
        assert states is not None
        return states[0]

    @property
    def _head_input(self) -> _HeadInput:
        head: _HeadInput = self.model.get_submodule(self._head_name)
        return head

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of the next token, as the author's class computes them.

        Args:
            hidden_states: (tokens, hidden_size), what reaches the head.

        Returns:
            (tokens, vocabulary size), or None on ranks that do not sample.
        """
        if not self._has_logits_of_class:
            self._adopt_logits()
        return super().compute_logits(hidden_states)

    @torch.no_grad()
    def _adopt_logits(self) -> None:
        """Find what `forward` does to the head's result, and let vLLM do the same.

        `forward` runs once, without the decoder, and with known logits as the head's result.

        Raises:
            SpecError: `forward` does not run so, keeps the positions from the decoder, or does more
                than to scale logits and to cap them as ``final_logit_softcapping`` of the config
                says.
        """
        vocab_size = self.text_config.vocab_size
        device = next(self.parameters()).device
        logits = torch.linspace(-1000, 1000, vocab_size, device=device)
        where = f"{self._where}.forward"
        expected = "a forward that takes inputs_embeds and position_ids, and calls decoder and head"
        with convert_errors(where, expected):
            changed = self._run_without_decoder(logits)
        soft_cap = getattr(self.text_config, "final_logit_softcapping", None)
        for cap in (None, soft_cap):
            capped = logits
            if cap is not None:
                capped = cap * torch.tanh(logits / cap)
            scale = float(changed @ capped / (capped @ capped))
            if torch.allclose(changed, scale * capped, rtol=1e-3, atol=1e-3 * abs(scale)):
                self.logits_processor = LogitsProcessor(vocab_size, scale=scale, soft_cap=cap)
                self._has_logits_of_class = True
                return
        expected = "logits that are the head's result, scaled, or capped by final_logit_softcapping"
        remedy = "Serve the model by a class of mmkit.MultiModalModel that computes them."
        raise SpecError(where, expected, "other changes", remedy)

    def _run_without_decoder(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what `forward` makes of the head's result (vocabulary size,), as float32."""
        decoder = _find_decoder(self.model)
        embeds = torch.zeros(1, 1, self.text_config.hidden_size, device=logits.device)
        positions = torch.zeros(1, 1, dtype=torch.long, device=logits.device)
        if self.model_config.uses_mrope:
            positions = positions.expand(3, 1, 1)
        head = self._head_input
        head.result = logits[None, None]
        stand_in = _DecoderStandIn(decoder)
        try:
            with _replace_module(self.model, decoder, stand_in):
                outputs = self.model(
                    input_ids=None,
                    inputs_embeds=embeds.to(self._dtype),
                    position_ids=positions,
                    use_cache=False,
                    return_dict=False,
                )
        finally:
            head.result = None
        changed: torch.Tensor = outputs[0][0, 0]
        if head.states is None or changed.shape != logits.shape:
            raise MmkitError("the head's result is not the first result of forward")
        if self._takes_positions and not stand_in.got_positions:
            # the decoder would count from 0, also in later steps and in other requests of a batch
            expected = "a forward that passes position_ids on to the language model"
            remedy = (
                "Between MultiModalMixin and your class, put a class with "
                "def forward(self, **inputs): return self.language_model(**inputs)."
            )
            raise SpecError(f"{self._where}.forward", expected, "none in its call", remedy)
        return changed.float()


def _has_experts(model_config: Any) -> bool:
    if hasattr(model_config, "is_moe"):
        return bool(model_config.is_moe)
    return bool(model_config.get_num_experts() > 0)  # before 0.14


class _HeadInput(nn.Module):
    """What a model has in place of its head: it keeps the states that reach the head.

    Attributes:
        states: (1, tokens, hidden_size).
        result: what it returns in place of the states, (1, tokens, vocabulary size).
    """

    states: torch.Tensor | None = None
    result: torch.Tensor | None = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.states = states
        if self.result is not None:
            return self.result
        return states


class _DecoderStandIn(nn.Module):
    """What a model has in place of its decoder while its logits are found out.

    Its states are its embeddings. Other attributes are the decoder's.

    Attributes:
        got_positions: whether it was called with `position_ids`.
    """

    got_positions = False

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "decoder", decoder)  # no part of the model

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["decoder"], name)

    def forward(
        self, *_: Any, inputs_embeds: torch.Tensor, position_ids: Any = None, **__: Any
    ) -> Any:
        self.got_positions = position_ids is not None
        return modeling_outputs.MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


# -- parts of a model of transformers --------------------------------------------------------------


def _find_decoder(model: Any) -> Any:
    """Return the module with the layers of the language model.

    A model's decoder may be a causal language model, which has a decoder itself. Transformers knows
    the language model of a model by few names; under another name, it is the causal language model
    among the children. Under one of those names there may be something else, as an output layer
    called ``decoder``.
    """
    decoder = model.get_decoder()
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        decoder = model.base_model
        if decoder is model:
            language_models = [child for child in model.children() if _has_head(child)]
            if len(language_models) == 1:
                return _find_decoder(language_models[0])
        return decoder
    if decoder.get_output_embeddings() is not None:
        return _find_decoder(decoder)
    return decoder


def _has_head(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None


def _list_language_children(decoder: nn.Module) -> list[str]:
    """Return the names of the children of a decoder that its class of transformers has.

    A decoder that extends one of transformers may have the author's encoder beside its layers.
    """
    names = [name for name, _ in decoder.named_children()]
    decoder_class: Any = type(decoder)
    for base in decoder_class.__mro__:
        if base.__module__.startswith("transformers.models."):
            break
    else:
        return names
    if base is decoder_class:
        return names
    with torch.device("meta"):
        plain_decoder = base(decoder.config)
    names_of_base = {name for name, _ in plain_decoder.named_children()}
    if not names_of_base:  # a base without layers, as LlamaPreTrainedModel: the author wrote them
        return names
    return [name for name in names if name in names_of_base]


def _find_head(model: Any, decoder: nn.Module) -> Any:
    """Return the head of a model, or of the part of it that has the decoder; None for no head."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and _has_module(part, decoder):
            head = part.get_output_embeddings()
            if head is not None:
                return head
    return None


@contextmanager
def _hide_modules_beside(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let a model have the named modules alone, and those that lead to them.

    A module that is replaced meanwhile stays replaced.
    """
    parents: set[str] = set()
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            parents.add(name)
    # a named module is visible as a whole; the model itself, "", has a prefix of all names
    prefixes = tuple([f"{name}.".lstrip(".") for name in names])
    before: dict[nn.Module, dict[str, Any]] = {}
    for path, module in list(model.named_modules()):
        if path not in parents or f"{path}.".startswith(prefixes):
            continue
        before[module] = module._modules
        module._modules = {}
        for name, child in before[module].items():
            child_path = f"{path}.{name}".lstrip(".")
            if child_path in parents or child_path in names:
                module._modules[name] = child
    try:
        yield
    finally:
        for module, modules in before.items():
            module._modules = modules | module._modules


def _has_module(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def _find_name(model: nn.Module, part: nn.Module) -> str:
    """Return the dotted name of a module of a model."""
    for name, module in model.named_modules():
        if module is part:
            return str(name)
    raise LookupError("the model has no such module")


@contextmanager
def _replace_module(model: nn.Module, part: nn.Module, other: nn.Module) -> Iterator[None]:
    """Put another module in place of a module of a model, under all of its names."""
    _set_module(model, part, other)
    try:
        yield
    finally:
        _set_module(model, other, part)


def _set_module(model: nn.Module, part: nn.Module, other: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is part:
                parent._modules[name] = other


_classes_of_decoders: dict[type, type] = {}
"""The classes of `_subclass_decoder`, by the class of transformers."""


def _subclass_decoder(model: nn.Module, decoder: Any) -> None:
    """Make the decoder of a model one of a subclass of its class.

    vLLM decorates the class of a decoder for torch.compile, in place. Were that transformers'
    class, no other model of it could be made in the process.
    """
    decoder_class = type(decoder)
    if decoder_class not in _classes_of_decoders:

        def take_over(self: Any, *, decoder: Any) -> None:
            self.__dict__ = decoder.__dict__

        members = {"__init__": take_over, "__module__": decoder_class.__module__}
        subclass = type(decoder_class.__name__, (decoder_class,), members)
        _classes_of_decoders[decoder_class] = subclass
    # made anew, as vLLM's decorator acts in `__init__`
    _set_module(model, decoder, _classes_of_decoders[decoder_class](decoder=decoder))
