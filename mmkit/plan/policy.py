"""A policy bound to a config: observations of a robot as requests, and outputs as actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError, SpecError, locate_errors
from ..language.expr import Scope
from ..language.items import ItemType
from ..language.items.base import describe_array
from ..language.items.values import describe
from ..language.policy import INSTRUCTION, PROMPT_KEY, Policy
from ..language.spec import Array, check_output_of_policy
from .modality import BoundModality
from .output import BoundOutput
from .parsing import CanonicalItems

MAX_KEY_CHARS = 80
"""Characters of an unknown key that an error shows."""


class ObservedItem(NamedTuple):
    """One item of each request.

    Attributes:
        modality: its name.
        item_type: the bound type of its items.
        keys: what of an observation it is; several are one after the other.
    """

    modality: str
    item_type: ItemType
    keys: tuple[str, ...]

    @property
    def where(self) -> str:
        """Names its keys in errors."""
        return " + ".join(self.keys)


class BoundPolicy:
    """A policy of a spec, bound to a config and a tokenizer: ``plan.policy``.

    Attributes:
        spec: the declaration, with the values of its expressions.
        output: the output that is the actions.
        items: the items of each request.
        expected: what an observation has under each key.
        takes_instruction: whether an observation has an instruction.
    """

    def __init__(
        self,
        spec: Policy,
        model: str,
        modalities: Mapping[str, BoundModality],
        outputs: Mapping[str, BoundOutput],
    ) -> None:
        """Find the parts that a bound declaration names.

        Args:
            spec: the declaration, with the values of its expressions.
            model: the name of the spec.
            modalities: the bound modalities, by name.
            outputs: the bound outputs, by name.

        Raises:
            SpecError: a modality that the config leaves out, or more items than it may have.
        """
        self.spec = spec
        self.output = outputs[spec.output]
        self._model = model
        self.items: list[ObservedItem] = []
        for name, keys_of_items in spec.items.items():
            if not keys_of_items:
                continue
            if name not in modalities:
                expected = "modalities whose when= holds for the config"
                raise SpecError("items", expected, repr(name))
            modality = modalities[name]
            if modality.limit is not None and len(keys_of_items) > modality.limit:
                expected = f"at most {modality.limit} items of {name!r}"
                remedy = "concat() makes one item of several keys."
                raise SpecError("items", expected, str(len(keys_of_items)), remedy)
        for name, keys in spec.list_items():
            self.items.append(ObservedItem(name, modalities[name].item, keys))
        # every modality has those of all
        self._placeholder_texts = next(iter(modalities.values())).parser.placeholder_texts
        self.takes_instruction = INSTRUCTION in spec.prompt
        self.expected: dict[str, str] = {}
        for item in self.items:
            for key in item.keys:
                self.expected[key] = _describe_value(item)
        if self.takes_instruction:
            self.expected[PROMPT_KEY] = "a text"

    # -- an observation ----------------------------------------------------------------------------

    def make_request(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return vLLM's prompt of an observation, as for `LLM.generate`.

        Args:
            observation: by key a picture, an array, a number, a list of numbers, or a text.

        Raises:
            InputError: names the key of the first value that is missing, unknown or malformed.
        """
        self._check_keys(observation)
        request: dict[str, Any] = {"prompt": self._write_prompt(observation)}
        data: dict[str, CanonicalItems] = {}
        for item in self.items:
            value = _find_value(item, observation)
            canonical = item.item_type.canonical(value, item.where)
            data.setdefault(item.modality, CanonicalItems()).append(canonical)
        request["multi_modal_data"] = data
        return request

    def make_largest_request(self) -> dict[str, Any]:
        """Return a request of the largest items, without an instruction."""
        data: dict[str, list[Any]] = {}
        for item in self.items:
            data.setdefault(item.modality, []).append(item.item_type.candidates()[0])
        return {"prompt": self.spec.prompt.replace(INSTRUCTION, ""), "data": data}

    def is_ignored(self, key: str) -> bool:
        """Tell whether nothing reads what an observation has under a key."""
        return any(key == name or key.startswith(f"{name}/") for name in self.spec.ignored)

    def _check_keys(self, observation: Mapping[str, Any]) -> None:
        """Refuse keys that the model does not read."""
        for key in observation:
            if key in self.expected or self.is_ignored(key):
                continue
            where = _shorten_key(key)
            expected = f"keys among {list(self.expected)}"
            remedy = "Leave it out, or name it in ignored= of the policy."
            raise InputError(where, expected, f"'{where}'", remedy)

    def _write_prompt(self, observation: Mapping[str, Any]) -> str:
        """Return the text that the model reads."""
        prompt: str = self.spec.prompt
        if not self.takes_instruction:
            return prompt
        instruction = observation.get(PROMPT_KEY, self.spec.instruction)
        if not isinstance(instruction, str):
            got = "none" if PROMPT_KEY not in observation else describe(instruction)
            raise InputError(PROMPT_KEY, "a text", got)
        for text in self._placeholder_texts:
            if text in instruction:
                expected = f"a text without {text!r}, which stands for an item"
                raise InputError(PROMPT_KEY, expected, "one with it")
        # no format(): an instruction may have braces
        return prompt.replace(INSTRUCTION, instruction)

    def name_keys(self, message: str) -> str:
        """Return a sentence about an item with the keys that the item is made of.

        ``robot.image[1]: expected ...`` becomes ``observation/wrist_image: expected ...``. Other
        sentences stay as they are.
        """
        match = re.match(rf"{re.escape(self._model)}\.(\w+)(\[(\d+)\])?", message)
        if match is None:
            return message
        items = [item for item in self.items if item.modality == match[1]]
        if match[3] is not None:
            index = int(match[3])
            items = items[index : index + 1]
        if not items:
            return message
        return ", ".join(item.where for item in items) + message[match.end() :]

    # -- actions -----------------------------------------------------------------------------------

    def decode(self, ids: Any) -> Array:
        """Return the actions of an answer, one row for each step.

        Args:
            ids: the ids of the answer: the output, or a text with the output in it, of which the
                first counts.

        Raises:
            InputError: the answer has no whole output.
            SpecError: the function of the spec fails.
        """
        if self.output.after is None:
            actions = self.output.decode(ids)
        else:
            actions = self._find_actions(ids)
        if actions.ndim < 2:
            actions = actions.reshape(1, -1)
        return actions

    def _find_actions(self, ids: Any) -> Array:
        """Return the first whole output in an answer of text."""
        for part in self.output.split_answer(ids):
            if part.array is not None:
                return part.array
        expected = "a whole output in the answer"
        remedy = "The model wrote text alone, or max_tokens= in sampling= cut it off."
        raise InputError(self.output.where, expected, "none", remedy)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a chunk of actions, steps first; of one unit, where their number varies."""
        shape = self.output.shape
        if len(shape) < 2:
            shape = (1, *(shape or (1,)))
        return shape


def bind_policy(
    spec: Policy | None,
    model: str,
    scope: Scope,
    modalities: Mapping[str, BoundModality],
    outputs: Mapping[str, BoundOutput],
) -> BoundPolicy | None:
    """Bind a policy to a config and a tokenizer.

    Args:
        spec: the declaration; None for a model that no robot drives.
        model: the name of the spec.
        scope: with the config and the tokenizer.
        modalities: the bound modalities, by name.
        outputs: the bound outputs, by name.

    Raises:
        SpecError: an expression without a value, or a part that cannot be.
    """
    if spec is None:
        return None
    check_output_of_policy(spec, list(outputs), f"{model}.policy")
    with locate_errors(model):
        return BoundPolicy(spec.bind(scope), model, modalities, outputs)


def _describe_value(item: ObservedItem) -> str:
    """Return what an observation has under a key of an item."""
    if len(item.keys) > 1:
        return f"a part of {item.item_type.expected}"
    if item.item_type.vllm_modality == "image":
        return "8-bit RGB pixels (height, width, 3)"
    return item.item_type.expected


def _find_value(item: ObservedItem, observation: Mapping[str, Any]) -> Any:
    """Return the value of one item in an observation.

    Raises:
        InputError: there is no prompt, or a prompt that would be read wrongly.
    """
    values = []
    for key in item.keys:
        if key not in observation:
            raise InputError(key, _describe_value(item), "none")
        values.append(observation[key])
    if len(values) == 1:
        value = values[0]
        if item.item_type.vllm_modality == "image" and isinstance(value, np.ndarray):
            _check_pixels(value, item.where)
        return value
    parts = []
    for key, value in zip(item.keys, values, strict=True):
        parts.append(_make_vector(value, key))
    return np.concatenate(parts)


def _check_pixels(pixels: Array, where: str) -> None:
    """Refuse an array that is no picture; floats would be scaled as if they were bytes."""
    has_channels = pixels.ndim == 3 and 3 in (pixels.shape[0], pixels.shape[-1])
    if pixels.dtype == np.uint8 and has_channels:
        return
    expected = "8-bit RGB pixels (height, width, 3)"
    remedy = ""
    if pixels.dtype != np.uint8:
        remedy = "openpi_client.image_tools.convert_to_uint8 makes them of floats from 0 to 1."
    raise InputError(where, expected, describe_array(pixels), remedy)


def _make_vector(value: Any, where: str) -> Array:
    """Return a part of an item as an array of one dimension.

    Raises:
        InputError: other values than numbers, or more dimensions.
    """
    expected = "a number, or an array of one dimension"
    if not isinstance(value, (int, float, list, np.ndarray)) or isinstance(value, bool):
        raise InputError(where, expected, describe(value))
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        raise InputError(where, expected, describe(value)) from None
    if array.dtype.kind not in "iuf" or array.ndim > 1:
        raise InputError(where, expected, describe_array(array))
    return np.atleast_1d(array)


def _shorten_key(key: str) -> str:
    """Return a key as errors name it, on one line."""
    text = repr(key)[1:-1]
    if len(text) > MAX_KEY_CHARS:
        text = f"{text[:MAX_KEY_CHARS]}..."
    return text
