"""A spec as a processor of transformers; see `Processor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin
from typing_extensions import override

from ..errors import InputError
from ..items.base import dtype_name
from ..plan import Plan, Preview
from ..spec import Declaration
from ..vocabulary import of_text_config
from . import saving
from .batch import Padding, batch_of, prompts_of

Messages = Sequence[Mapping[str, Any]]

_KEYWORDS = {"image": "images", "video": "videos", "audio": "audio"}
"""The names of items in processors of transformers."""


class Processor(ProcessorMixin):
    """Turns texts and items of a spec into the tensors that its model is trained on. Generated
    classes set `spec`. Make a processor with `ModelSpec.hf_processor`, or load one from a
    checkpoint with `from_pretrained` or transformers' `AutoProcessor`.

    Ids and fields equal those of vLLM, value for value, because the same code makes them, if the
    processor has the dtype and the `mm_processor_kwargs` of the server. vLLM is not needed.

    Attributes:
        config: the config of the model.
        tokenizer: its tokenizer; missing for a model that runs without one.
        hf_processor: the Hugging Face processor that the spec uses, or None.
        mm_processor_kwargs: options of every call, the same as the server's
            ``--mm-processor-kwargs``.
        dtype: dtype of the floats that the Hugging Face processor returns; None leaves them.
        plan: the spec, bound to these.
    """

    spec: ClassVar[Declaration]
    attributes: ClassVar[list[str]] = []  # `saving` has what is saved
    audio_tokenizer: ClassVar[None] = None  # for transformers 4

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
        self.config, self.hf_processor = config, hf_processor
        if tokenizer is not None:
            self.tokenizer = tokenizer
        self.mm_processor_kwargs = dict(mm_processor_kwargs or {})
        self.dtype = dtype_of(config) if dtype is None else getattr(torch, dtype_name(dtype))
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.plan  # noqa: B018  (binding refuses a spec that cannot work)

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to config, tokenizer and Hugging Face processor."""
        tokenizer = getattr(self, "tokenizer", None)
        options = self.mm_processor_kwargs
        return Plan(self.spec, self.config, tokenizer, self.hf_processor, options, dtype=self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "plan"}

    @override
    @classmethod
    def get_attributes(cls) -> list[str]:
        return cls.attributes  # for transformers 4

    @property
    @override
    def model_input_names(self) -> list[str]:
        fields = [name for m in self.plan.modalities.values() for name in m.fields]
        return ["input_ids", "attention_mask", "mm_token_type_ids", *fields]

    @override
    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        *,
        input_ids: Any = None,
        padding: bool | str = False,
        max_length: int | None = None,
        padding_side: str | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str | None = "pt",
        **items: Any,
    ) -> BatchFeature:
        """A prompt with its items, or a batch of prompts, as tensors.

        A text, or a flat list of ids, is one prompt, and each modality takes what one puts into
        ``multi_modal_data``: an item, or a list of items. A list of texts, or of lists of ids, is a
        batch, and each modality takes a list with the items of each prompt: None for no items.

        The result has:

        - `input_ids`: int64 (prompts, length), expanded; for an encoder-decoder model those of the
          encoder, with `decoder_input_ids` and `decoder_attention_mask` beside them;
        - `attention_mask`: int64 (prompts, length), 0 for padding;
        - `mm_token_type_ids`: int64 (prompts, length), at positions that receive encoder rows 1 for
          images, 2 for videos, 3 for audio, and from 4 on for other modalities, in the order of the
          spec; 0 elsewhere;
        - `placeholders`: for each prompt a list of `mmkit.placement.Placement`, in prompt order;
        - the fields of all items, prompt by prompt, as vLLM passes them to the model: batched
          fields stacked, or a list where the shapes differ, flat fields concatenated.

        Args:
            text: a text, or a list of them.
            input_ids: token ids in place of a text, or a list or tensor of several prompts.
            padding: True pads prompts to the longest, "max_length" to `max_length`.
            max_length: the length for ``padding="max_length"``. Nothing is cut off.
            padding_side: "left" or "right"; by default the tokenizer's, or right.
            pad_to_multiple_of: the padded length is a multiple of this number.
            return_tensors: "pt", the only form.
            items: by the name of their modality; for images, videos and audio also as ``images``,
                ``videos`` and ``audio``.

        Returns:
            A mapping of the names above.

        Raises:
            InputError: vLLM would refuse the request too; prompts of several lengths without
                padding; a list of items without one entry per prompt.
        """
        if return_tensors not in ("pt", None):
            raise InputError(f"{self.spec.name}.return_tensors", '"pt"', repr(return_tensors))
        prompts, is_batch = self._prompts(text, input_ids)
        data = self._data(items, len(prompts) if is_batch else None)
        padded = self._padding(padding, max_length, padding_side, pad_to_multiple_of)
        samples = [self.plan.preview(*sample) for sample in zip(prompts, data, strict=True)]
        batch = batch_of(self.plan, samples, padded)
        if self.spec.decoder_prompt is not None:
            where = f"{self.spec.name}.decoder_prompt"
            ids = [self.plan.rewrite("decoder_prompt", self.plan.encode(one)) for one in prompts]
            batch |= prompts_of("decoder_input_ids", ids, padded, where)
        return BatchFeature(batch)

    def preview(self, text: str | None = None, input_ids: Any = None, **items: Any) -> Preview:
        """One prompt with its items, before the batch; arguments as for a call."""
        (prompt,), _ = self._prompts(text, input_ids)
        (data,) = self._data(items, None)
        return self.plan.preview(prompt, data)

    def _prompts(self, text: Any, input_ids: Any) -> tuple[list[Any], bool]:
        """The prompts, each as a text or a list of ids, and whether the caller sent a batch."""
        where = f"{self.spec.name}.prompt"
        if (text is None) == (input_ids is None):
            if text is None and self.spec.is_raw:
                return [[]], False
            got = "neither" if text is None else "both"
            raise InputError(where, "a text or input_ids", got)
        if isinstance(text, str):
            return [text], False
        sent = [_listed(one) for one in _listed(input_ids if text is None else text)]
        if text is not None and not sent:
            raise InputError(where, "at least one prompt", "none")
        is_batch = text is not None or any(isinstance(one, (list, tuple)) for one in sent)
        return (sent, True) if is_batch else ([sent], False)

    def _data(self, items: Mapping[str, Any], prompts: int | None) -> list[dict[str, Any]]:
        """The items of each prompt, by modality. `prompts` is the number of prompts of a batch, or
        None for one prompt."""
        own, where = self.plan.modalities, self.spec.name
        names = {_KEYWORDS[m.item.media]: name for name, m in own.items() if m.item.media}
        given = {key: sent for key, sent in items.items() if sent is not None}
        data = {key if key in own else names.get(key, key): sent for key, sent in given.items()}
        if len(data) < len(given):
            got = " and ".join(items)
            raise InputError(f"{where}.images", "items under one name", got)
        self.plan.check_names(data)
        if prompts is None:
            return [data]
        for name, sent in data.items():
            got = f"{len(sent)} of them" if isinstance(sent, (list, tuple)) else type(sent).__name__
            if got != f"{prompts} of them":
                expected = f"a list with the items of each of {prompts} prompts"
                remedy = "Write None for a prompt without any."
                raise InputError(f"{where}.{name}", expected, got, remedy)
        rows = ({name: sent[i] for name, sent in data.items()} for i in range(prompts))
        return [{name: one for name, one in row.items() if one is not None} for row in rows]

    def _padding(
        self, padding: bool | str, length: int | None, side: str | None, multiple: int | None
    ) -> Padding:
        where = f"{self.spec.name}.padding"
        if padding not in (True, False, "longest", "max_length", "do_not_pad"):
            raise InputError(where, 'a bool, "longest" or "max_length"', repr(padding))
        if padding != "max_length":
            length = 0
        elif length is None:
            raise InputError(where, 'a max_length beside "max_length"', "none")
        side = side or getattr(getattr(self, "tokenizer", None), "padding_side", "right")
        is_wanted = padding not in (False, "do_not_pad")
        return Padding(is_wanted, self.pad_token_id, str(side), length, multiple or 1)

    @property
    def pad_token_id(self) -> int:
        """The padding id: the first id, among those of tokenizer and config for padding and end and
        then among all ids, that is no placeholder."""
        tokenizer = getattr(self, "tokenizer", None)
        known = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        known += of_text_config(self.config, "pad_token_id", "eos_token_id")
        candidates = [token for token in known if isinstance(token, int) and token >= 0]
        candidates += range(self.plan.vocab_size)
        return next(token for token in candidates if token not in self.plan.embed_ids)

    # -- messages ----------------------------------------------------------------------------------

    @override
    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        chat_template: str | None = None,
        *,
        tokenize: bool = False,
        return_dict: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        return_tensors: str | None = "pt",
        **options: Any,
    ) -> Any:
        """A conversation, or a list of conversations, as text or as tensors.

        The content of a message is a text or a list of parts, ``{"type": "text", "text": ...}`` and
        ``{"type": "series", "series": item}`` with the name of a modality. A template that knows
        the type writes the placeholder of the item; otherwise the placeholder is the text of the
        spec's `replace`. A template without types receives one text, as in vLLM: the placeholders,
        then the texts.

        Args:
            conversation: messages with `role` and `content`.
            chat_template: a template, or the name of one, in place of the processor's.
            tokenize: return tensors: the `input_ids` alone, or all with ``return_dict=True``.
            return_dict: with `tokenize`, return the whole result of `Processor.__call__`.
            processor_kwargs: arguments of that call, for example `padding`.
            return_tensors: another argument of that call.
            options: of the tokenizer's `apply_chat_template`, for example `add_generation_prompt`
                and `tools`; the template receives options that the tokenizer does not know.

        Raises:
            InputError: the model has no tokenizer, there is no template, a part is malformed, or
                neither the template nor the spec has a placeholder for an item.
        """
        where, known = f"{self.spec.name}.conversation", self.chat_template
        if (tokenizer := getattr(self, "tokenizer", None)) is None:
            raise InputError(where, "a model with a tokenizer", "one without", "Call it with ids.")
        if isinstance(known, Mapping):
            chat_template = known.get(chat_template or "default", chat_template)
        options["chat_template"] = template = chat_template or known
        if not isinstance(template, str):
            raise InputError(where, "a chat template", "none", "Give chat_template=.")
        is_one = bool(conversation) and isinstance(conversation[0], Mapping)
        conversations: Sequence[Any] = [conversation] if is_one else conversation
        texts, data = [], []
        for messages in conversations:
            items: dict[str, list[Any]] = {}
            rendered = [self._without_items(one, items, template) for one in messages]
            texts.append(tokenizer.apply_chat_template(rendered, tokenize=False, **options))
            data.append(items)
        if not tokenize:
            return texts[0] if is_one else texts
        ids = [self.plan.encode(text, add_special_tokens=False) for text in texts]
        sent = {name: [own.get(name) for own in data] for own in data for name in own}
        asked = {"return_tensors": return_tensors, **(processor_kwargs or {})}
        batch = self(input_ids=ids, **{**asked, **sent})
        return batch if return_dict else batch["input_ids"]

    def _without_items(
        self, message: Mapping[str, Any], items: dict[str, list[Any]], template: str
    ) -> dict[str, Any]:
        """A message in the template's form; its items go to `items`."""
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            return dict(message)
        has_types = any(f"{before}type" in template for before in (".", "['", '["'))
        where, modalities = f"{self.spec.name}.conversation", self.plan.modalities
        parts: list[dict[str, Any]] = []
        for part in content:
            name = part.get("type") if isinstance(part, Mapping) else None
            if name == "text":
                parts.append(dict(part))
                continue
            if name not in modalities or name not in part:
                known = (f'{{"type": "{key}", "{key}": ...}}' for key in ("text", *modalities))
                raise InputError(where, f"parts {' or '.join(known)}", f"type {name!r}")
            items.setdefault(name, []).append(part[name])
            if has_types and any(f"{quote}{name}{quote}" in template for quote in "'\""):
                parts.append({"type": name})
                continue
            text = self.spec.placeholder_text(name, len(items[name]) - 1)
            if text is None:
                either = f"a chat template with the type {name}"
                raise InputError(where, f"{either}, or replace() of a text in the spec", "neither")
            parts.append({"type": "text", "text": text, "of": name})
        if has_types:
            return {**message, "content": parts}
        in_order = sorted(parts, key=lambda part: "of" not in part)  # placeholders first
        return {**message, "content": "\n".join(part["text"] for part in in_order)}

    # -- a processor in a folder -------------------------------------------------------------------

    @override
    def to_dict(self, **_: Any) -> dict[str, Any]:
        return saving.described(self)

    @override
    def save_pretrained(
        self, save_directory: Any, push_to_hub: bool = False, **options: Any
    ) -> list[str]:
        """See `mmkit.training.saving.save`."""
        saving.save(self, save_directory)
        files: list[str] = super().save_pretrained(save_directory, push_to_hub, **options)
        return files

    @override
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Processor:
        """See `mmkit.training.saving.load`."""
        return saving.load(cls, pretrained_model_name_or_path, **options)


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype that a config states for its model, or None."""
    (stated,) = of_text_config(config, "dtype")
    dtype = getattr(torch, str(dtype_name(stated or getattr(config, "dtype", None))), None)
    return dtype if isinstance(dtype, torch.dtype) else None
