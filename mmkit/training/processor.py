"""A spec as a processor of transformers; see `Processor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import torch
from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override

from ..errors import InputError
from ..items.base import dtype_name
from ..plan import Plan
from ..vocabulary import of_text_config
from .batch import Padding, batch_of
from .saving import SavedProcessor

Sample: TypeAlias = tuple[Any, dict[str, Any]]
"""A prompt, as a text or a list of ids, and its items by modality."""

_KEYWORDS: Mapping[Any, str] = {"image": "images", "video": "videos", "audio": "audio"}
"""The names of items in processors of transformers."""


class Processor(SavedProcessor):
    """Turns texts and items of a spec into the tensors that its model is trained on. Generated
    classes set `spec`. Make a processor with `ModelSpec.hf_processor`, or load one from a
    checkpoint with `from_pretrained` or transformers' `AutoProcessor`.

    Ids and fields equal those of vLLM, value for value, because the same code makes them, if the
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
        self.config, self.tokenizer, self.hf_processor = config, tokenizer, hf_processor
        self.mm_processor_kwargs = dict(mm_processor_kwargs or {})
        known = *of_text_config(config, "dtype"), getattr(config, "dtype", None)
        stated = dtype_name(next(filter(None, (dtype, *known)), None))
        self.dtype: torch.dtype | None = stated and getattr(torch, stated)
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        self.plan  # noqa: B018  (binding refuses a spec that cannot work)

    @cached_property
    def plan(self) -> Plan:
        """The spec, bound to config, tokenizer and Hugging Face processor."""
        own = self.config, self.tokenizer, self.hf_processor, self.mm_processor_kwargs
        return Plan(self.spec, *own, dtype=self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "plan"}

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
        sent = self.samples(text, input_ids, **items)
        padded = self.padded(padding, max_length, padding_side, pad_to_multiple_of)
        samples = [self.plan.preview(*sample) for sample in sent]
        batch = batch_of(self.plan, samples, padded)
        if self.spec.decoder_prompt is not None:
            ids = [self.plan.rewrite("decoder_prompt", self.plan.encode(one)) for one, _ in sent]
            batch |= padded.prompts("decoder_input_ids", ids, self.spec.name)
        return BatchFeature(batch)

    def samples(self, text: Any = None, input_ids: Any = None, **items: Any) -> list[Sample]:
        """Prompts with their items, unprocessed; arguments as for a call."""
        where, own = f"{self.spec.name}.prompt", self.plan.modalities
        if text is None and input_ids is None and self.spec.is_raw:
            input_ids = []
        if (text is None) == (input_ids is None):
            raise InputError(where, "a text or input_ids", "neither" if text is None else "both")
        given = {key: sent for key, sent in items.items() if sent is not None}
        names = {_KEYWORDS.get(m.item.media): name for name, m in own.items() if name not in given}
        data = {key if key in own else names.get(key, key): sent for key, sent in given.items()}
        self.plan.check_names(data)
        if isinstance(text, str):
            return [(text, data)]
        prompts = [_listed(one) for one in _listed(input_ids if text is None else text)]
        if text is None and not any(isinstance(one, (list, tuple)) for one in prompts):
            return [(prompts, data)]
        if not prompts:
            raise InputError(where, "at least one prompt", "none")
        for name, sent in data.items():
            got = f"{len(sent)} of them" if isinstance(sent, (list, tuple)) else type(sent).__name__
            if got != f"{len(prompts)} of them":
                expected = f"a list with the items of each of {len(prompts)} prompts"
                remedy = "Write None for a prompt without any."
                raise InputError(f"{self.spec.name}.{name}", expected, got, remedy)
        rows = [{name: sent[i] for name, sent in data.items()} for i in range(len(prompts))]
        found = [{name: one for name, one in row.items() if one is not None} for row in rows]
        return [*zip(prompts, found, strict=True)]

    def padded(
        self, padding: bool | str, length: int | None, side: str | None, multiple: int | None
    ) -> Padding:
        """The padding that the arguments of a call ask for. Its id is the first that is no
        placeholder: the tokenizer's for padding, that for the end, and then any from 0 on."""
        has_length = padding == "max_length" and length is not None
        if padding not in (True, False, "longest", "do_not_pad") and not has_length:
            expected = 'a bool, "longest", or "max_length" beside max_length='
            raise InputError(f"{self.spec.name}.padding", expected, repr(padding))
        known = [getattr(self.tokenizer, f"{kind}_token_id", None) for kind in ("pad", "eos")]
        taken, others = {None, *self.plan.embed_ids}, range(self.plan.vocab_size)
        token: Any = next(token for token in chain(known, others) if token not in taken)
        side = str(side or getattr(self.tokenizer, "padding_side", "right"))
        if padding in (False, "do_not_pad"):
            return Padding(token, side, is_wanted=False)
        return Padding(token, side, (length or 0) if has_length else 0, multiple or 1)

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
        **options: Any,
    ) -> Any:
        """A conversation, or a list of conversations, as text or as tensors.

        The content of a message is a text or a list of parts, ``{"type": "text", "text": ...}`` and
        ``{"type": "series", "series": item}`` with the name of a modality. A template that knows
        the type writes the placeholder of the item; otherwise the placeholder is the text of the
        spec's `replace`. A template without types receives one text, as in vLLM: the placeholders,
        then the texts.

        Args:
            conversation: messages with `role` and `content`, or lists of them.
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
        if self.tokenizer is None:
            raise InputError(where, "a model with a tokenizer", "one without", "Call it with ids.")
        named = known if isinstance(known, Mapping) else {"default": known}
        options["chat_template"] = template = named.get(chat_template or "default", chat_template)
        if not isinstance(template, str):
            raise InputError(where, "a chat template", "none", "Give chat_template=.")
        is_one = bool(conversation) and isinstance(conversation[0], Mapping)
        conversations = [conversation] if is_one else conversation
        data: list[dict[str, list[Any]]] = [{} for _ in conversations]
        pairs = zip(conversations, data, strict=True)
        rendered = [[self._without_items(m, own, template) for m in one] for one, own in pairs]
        texts = self.tokenizer.apply_chat_template(rendered, tokenize=False, **options)
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
            text = self.spec.placeholder_text(name, len(items[name]) - 1)
            if has_types and any(f"{quote}{name}{quote}" in template for quote in "'\""):
                parts.append({"type": name})
            elif text is not None:
                parts.append({"type": "text", "text": text, "of": name})
            else:
                either = f"a chat template with the type {name}"
                raise InputError(where, f"{either}, or replace() of a text in the spec", "neither")
        if has_types:
            return {**message, "content": parts}
        in_order = sorted(parts, key=lambda part: "of" not in part)  # placeholders first
        return {**message, "content": "\n".join(part["text"] for part in in_order)}


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
