"""A spec as a processor of transformers; see `Processor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override

from ..errors import InputError
from ..language.items.base import dtype_name
from ..language.names import CALL_ARGUMENTS
from ..language.vocabulary import read_text_config
from ..plan.bind import bind
from ..plan.plan import Plan
from .batch import make_batch
from .chat import Conversation
from .padding import parse_padding
from .saving import SavedProcessor
from .template import ContentFormat, choose_template, detect_content_format, render_messages

_KEYWORDS: Mapping[Any, str] = {"image": "images", "video": "videos", "audio": "audio"}
"""The names of items in processors of transformers, by vLLM's modality."""


class Sample(NamedTuple):
    """An unprocessed prompt of a call.

    Attributes:
        prompt: a text, or a list of ids.
        items: as a caller writes them into ``multi_modal_data``.
    """

    prompt: Any
    items: dict[str, Any]


class Processor(SavedProcessor):
    """Turns texts and items of a spec into the tensors that its model is trained on.

    Generated classes set `spec`. Make a processor with `ModelSpec.hf_processor`, or load one from a
    checkpoint with `from_pretrained` or transformers' `AutoProcessor`.

    Ids and fields equal vLLM's, value for value, because the same code makes them, if the
    processor has the dtype and the `mm_processor_kwargs` of the server. vLLM is not needed.

    Attributes:
        config: the config of the model.
        tokenizer: its tokenizer; None for a model that runs without one.
        hf_processor: the Hugging Face processor that the spec uses, or None.
        mm_processor_kwargs: options of every call, the same as the server's
            ``--mm-processor-kwargs``.
        dtype: dtype of the floats that the Hugging Face processor returns; None leaves them.
        plan: the spec, bound to these.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        *,
        hf_processor: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        dtype: torch.dtype | str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.hf_processor = hf_processor
        self.mm_processor_kwargs = dict(mm_processor_kwargs or {})
        self.dtype = _choose_dtype(dtype, config)
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.plan  # noqa: B018  (binding refuses a spec that cannot work)

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to config, tokenizer and Hugging Face processor."""
        return bind(
            self.spec,
            self.config,
            self.tokenizer,
            self.hf_processor,
            self.mm_processor_kwargs,
            dtype=self.dtype,
        )

    def __getstate__(self) -> dict[str, Any]:
        # a plan cannot be pickled; the copy binds the spec again
        state = dict(vars(self))
        state.pop("plan", None)
        return state

    @property
    @override
    def model_input_names(self) -> list[str]:
        names = ["input_ids", "attention_mask", "mm_token_type_ids"]
        for modality in self.plan.modalities.values():
            names.extend(modality.fields)
        return names

    @override
    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        input_ids: Any = None,
        add_special_tokens: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str | None = False,
        max_length: int | None = None,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = "pt",
        **items: Any,
    ) -> BatchFeature:
        """Return a prompt with its items, or a batch of prompts, as tensors.

        A text, or a flat list of ids, is one prompt, and each modality takes what one puts into
        ``multi_modal_data``: an item, or a list of items. A list of texts, or of lists of ids, is a
        batch, and each modality takes a list with the items of each prompt: None for no items.

        The result has:

        - `input_ids`: int64 (prompts, length), expanded; for an encoder-decoder model the
          encoder's, with `decoder_input_ids` and `decoder_attention_mask` beside them;
        - `attention_mask`: int64 (prompts, length), 0 for padding;
        - `mm_token_type_ids`: int64 (prompts, length), at positions that receive encoder rows 1 for
          images, 2 for videos, 3 for audio, and from 4 on for other modalities, in the order of the
          spec; 0 elsewhere;
        - `placeholders`: for each prompt a list of `mmkit.plan.placement.Placement`, in
          prompt order;
        - the fields of all items, prompt by prompt, as vLLM passes them to the model: batched
          fields stacked, or a list where the shapes differ, flat fields concatenated.

        For a model without placeholders (``tokens=0``) it has only `input_ids` and the fields.

        Args:
            text: a text, or a list of them.
            input_ids: token ids in place of a text, or a list or tensor of several prompts.
            add_special_tokens: whether the tokenizer adds its own to a text; by default as in a
                server. False for a text that `apply_chat_template` returned.
            padding: True pads prompts to the longest, "max_length" to `max_length`.
            truncation: False, the only value: nothing is cut off.
            max_length: the length for ``padding="max_length"``.
            padding_side: "left" or "right"; by default the tokenizer's, or right.
            pad_to_multiple_of: the padded length is a multiple of this number.
            return_tensors: "pt", the only form.
            items: by the name of their modality; for images, videos and audio also as ``images``,
                ``videos`` and ``audio``.

        Returns:
            A mapping of the names above.

        Raises:
            InputError: vLLM would refuse the request too; prompts of several lengths without
                padding; a list of items without one entry per prompt; an argument that is none.
        """
        name = self.spec.name
        if return_tensors not in ("pt", None):
            raise InputError(f"{name}.return_tensors", '"pt"', repr(return_tensors))
        if truncation not in (False, None, "do_not_truncate"):
            remedy = "Nothing is cut off, as in a server: shorten the prompt itself."
            raise InputError(f"{name}.truncation", "False", repr(truncation), remedy)
        self._check_arguments(items)
        pad_options = parse_padding(
            self.plan,
            self.tokenizer,
            padding,
            max_length=max_length,
            padding_side=padding_side,
            pad_to_multiple_of=pad_to_multiple_of,
        )
        tokenization: dict[str, Any] = {}
        if add_special_tokens is not None and text is not None:
            tokenization["add_special_tokens"] = add_special_tokens
        samples = self.split_samples(text, input_ids, **items)
        previews = []
        for sample in samples:
            previews.append(self.plan.preview(sample.prompt, sample.items, **tokenization))
        batch = make_batch(self.plan, previews, pad_options)
        if self.spec.decoder_prompt is not None:
            decoder_prompts = []
            for sample in samples:
                ids = self.plan.encode(sample.prompt, **tokenization)
                decoder_prompts.append(self.plan.rewrite("decoder_prompt", ids))
            batch.update(pad_options.pad_prompts("decoder_input_ids", decoder_prompts, name))
        return BatchFeature(batch)

    def _check_arguments(self, items: Iterable[str]) -> None:
        """Refuse names that are neither modalities nor arguments of a call.

        Raises:
            InputError: names the first of them.
        """
        modalities = self.item_names
        for name in items:
            # embeddings by a name of their own get the remedy of `check_names`
            if name.removesuffix("_embeds") in modalities:
                continue
            expected = f"modalities among {modalities}, or {', '.join(CALL_ARGUMENTS)}"
            remedy = ""
            if name == "text_kwargs":
                remedy = "Write options of the text as arguments of the call."
            elif name.endswith("_kwargs"):
                remedy = "Options of the Hugging Face processor are kwargs= of hf_processor()."
            raise InputError(f"{self.spec.name}, a call", expected, repr(name), remedy)

    @property
    def item_names(self) -> list[str]:
        """The names by which a call takes items.

        They are the names of the modalities, and transformers' names for images, videos and audio.
        """
        names = set(self.plan.modalities)
        for modality in self.plan.modalities.values():
            if modality.item.vllm_modality:
                names.add(_KEYWORDS[modality.item.vllm_modality])
        return sorted(names)

    def split_samples(self, text: Any = None, input_ids: Any = None, **items: Any) -> list[Sample]:
        """Return the prompts of a call, each with its items, unprocessed; arguments as for a call.

        Raises:
            InputError: no prompt, a text beside ids, or another number of items than of prompts.
        """
        where = f"{self.spec.name}.prompt"
        if text is None and input_ids is None and self.spec.is_raw:
            input_ids = []
        if text is None and input_ids is None:
            raise InputError(where, "a text or input_ids", "neither")
        if text is not None and input_ids is not None:
            raise InputError(where, "a text or input_ids", "both")
        data = self._name_modalities(items)
        if isinstance(text, str):
            return [Sample(text, data)]
        prompts = _to_list(input_ids if text is None else text)
        if not isinstance(prompts, (list, tuple)):
            expected = "token ids" if text is None else "a text, or a list of them"
            raise InputError(where, expected, repr(prompts))
        prompts = [_to_list(prompt) for prompt in prompts]
        has_lists = any(isinstance(prompt, (list, tuple)) for prompt in prompts)
        if text is None and not has_lists:
            return [Sample(prompts, data)]  # one prompt: a flat list of ids
        if not prompts:
            raise InputError(where, "at least one prompt", "none")
        self._check_counts(data, len(prompts))
        samples = []
        for i, prompt in enumerate(prompts):
            sample = Sample(prompt, {})
            for name, values in data.items():
                if values[i] is not None:
                    sample.items[name] = values[i]
            samples.append(sample)
        return samples

    def _name_modalities(self, items: Mapping[str, Any]) -> dict[str, Any]:
        """Return the items of a call by the names of their modalities, for transformers' names too.

        Raises:
            InputError: a name that is no modality, or both names of one.
        """
        values = {name: value for name, value in items.items() if value is not None}
        modality_names: dict[str, str] = {}
        for name, modality in self.plan.modalities.items():
            if modality.item.vllm_modality and name not in values:
                modality_names[_KEYWORDS[modality.item.vllm_modality]] = name
        data: dict[str, Any] = {}
        for name, value in values.items():
            if name not in self.plan.modalities:
                name = modality_names.get(name, name)
            data[name] = value
        self.plan.check_names(data)
        return data

    def _check_counts(self, data: Mapping[str, Any], num_prompts: int) -> None:
        """Refuse modalities without a list of one entry per prompt."""
        for name, values in data.items():
            if not isinstance(values, (list, tuple)):
                got = type(values).__name__
            elif len(values) != num_prompts:
                got = f"{len(values)} of them"
            else:
                continue
            expected = f"a list with the items of each of {num_prompts} prompts"
            remedy = "Write None for a prompt without any."
            raise InputError(f"{self.spec.name}.{name}", expected, got, remedy)

    # -- messages ----------------------------------------------------------------------------------

    @override
    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        *,
        tokenize: bool = False,
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        return_tensors: str | None = "pt",
        chat_template_content_format: ContentFormat | Literal["auto"] = "auto",
        interleave_mm_strings: bool = False,
        **options: Any,
    ) -> Any:
        """Return the prompt that vLLM's chat makes of messages, as text or as tensors.

        It takes a conversation, or a list of conversations, and returns one prompt or a list. The
        content of a message is a text or a list of parts, ``{"type": "text", "text": ...}`` and
        ``{"type": "series", "series": item}`` with the name of a modality. As in vLLM, a template
        with a loop over the parts receives them, and writes the target of an item itself. Any other
        template receives one text: the targets that the texts do not hold, modality by modality,
        and then the texts, each on a line. A target is the text of the spec's `replace`.

        Args:
            conversation: messages with `role` and `content`, or lists of them. Templates also
                receive what vLLM passes on: `tool_calls`, `tool_call_id`, `reasoning`, `name`,
                `task`, and `tools` of a developer's message.
            chat_template: a template, or the name of one, in place of the processor's. Without it,
                and with `tools`, the tokenizer's own comes first, as in vLLM.
            tokenize: return tensors: only `input_ids`, or all with ``return_dict=True``.
            return_dict: with `tokenize`, return the whole result of `Processor.__call__`.
            processor_kwargs: arguments of that call, for example `padding`.
            return_tensors: another argument of that call.
            chat_template_content_format: the server's ``--chat-template-content-format``: "string",
                "openai", or "auto", by which the syntax of the template tells.
            interleave_mm_strings: the server's ``--interleave-mm-strings``: targets stand
                among the texts, in the order of the parts.
            options: of the tokenizer's `apply_chat_template`, for example `add_generation_prompt`
                and `tools`; arguments of `Processor.__call__`; the template receives the others.

        Raises:
            InputError: the model has no tokenizer, there is no template, the template refuses the
                conversation or reads what vLLM does not pass on, or vLLM would refuse a message.
        """
        where = f"{self.spec.name}.conversation"
        if self.tokenizer is None:
            raise InputError(where, "a model with a tokenizer", "one without", "Call it with ids.")
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise InputError(where, "a list with at least one message", repr(conversation))
        call_options = {"return_tensors": return_tensors, **(processor_kwargs or {})}
        for name in CALL_ARGUMENTS:
            if name in options:
                call_options[name] = options.pop(name)
        template = choose_template(
            f"{self.spec.name}.chat_template",
            chat_template,
            self.chat_template,
            getattr(self.tokenizer, "chat_template", None),
            options.get("tools"),
        )
        content_format = self._choose_content_format(chat_template_content_format, template)
        is_single = isinstance(conversation[0], Mapping)
        conversations = [conversation] if is_single else conversation
        texts: list[str] = []
        items_of_prompts: list[dict[str, Any]] = []
        for messages in conversations:
            reader = Conversation(
                self.spec,
                self.plan.modalities,
                content_format,
                interleave_mm_strings=interleave_mm_strings,
            )
            entries = [reader.parse_message(message) for message in messages]
            text = render_messages(
                where, self.tokenizer, template, entries, reader.left_out, options
            )
            texts.append(text)
            items_of_prompts.append(reader.gather_data())
        if not tokenize:
            return texts[0] if is_single else texts
        ids = [self.plan.encode(text, add_special_tokens=False) for text in texts]
        batch = self(input_ids=ids, **call_options, **_list_by_modality(items_of_prompts))
        return batch if return_dict else batch["input_ids"]

    def _choose_content_format(
        self, argument: ContentFormat | Literal["auto"], template: str
    ) -> ContentFormat:
        """Return the form in which a template receives the content of a message.

        Args:
            argument: `chat_template_content_format` of `apply_chat_template`.
            template: the chat template.

        Raises:
            InputError: there is no such form.
        """
        if argument == "auto":
            return detect_content_format(template)
        if argument not in ("string", "openai"):
            name = f"{self.spec.name}.chat_template_content_format"
            raise InputError(name, '"auto", "string" or "openai"', repr(argument))
        return argument


def _list_by_modality(items_of_prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return for each modality the items of every prompt: None for a prompt without any."""
    names: dict[str, None] = {}
    for items in items_of_prompts:
        names.update(dict.fromkeys(items))
    lists: dict[str, Any] = {}
    for name in names:
        lists[name] = [items.get(name) for items in items_of_prompts]
    return lists


def _choose_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype | None:
    """Return the dtype of a processor; None where nothing states one.

    The argument comes first, then the config of the language model, then the whole config.
    """
    candidates = [dtype]
    candidates += read_text_config(config, "dtype")
    candidates.append(getattr(config, "dtype", None))
    for candidate in candidates:
        if candidate:
            chosen: torch.dtype = getattr(torch, dtype_name(candidate))
            return chosen
    return None


def _to_list(value: Any) -> Any:
    """Return an array or a tensor as a list, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
