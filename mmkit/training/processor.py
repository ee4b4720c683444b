"""A spec as a processor of transformers; see `Processor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from transformers.feature_extraction_utils import BatchFeature
from typing_extensions import override

from ..errors import InputError, convert_errors
from ..language.items.base import dtype_name
from ..language.names import CALL_ARGUMENTS
from ..language.vocabulary import of_text_config
from ..plan.plan import Plan
from .batch import Padding, batch_of
from .chat import ContentFormat, Conversation, content_format, has_role
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
        add_special_tokens: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str | None = False,
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
        - `placeholders`: for each prompt a list of `mmkit.plan.placement.Placement`, in
          prompt order;
        - the fields of all items, prompt by prompt, as vLLM passes them to the model: batched
          fields stacked, or a list where the shapes differ, flat fields concatenated.

        For a model without placeholders (``tokens=0``) it has `input_ids` and the fields alone.

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
        padded = self.padded(padding, max_length, padding_side, pad_to_multiple_of)
        tokenization: dict[str, Any] = {}
        if add_special_tokens is not None and text is not None:
            tokenization["add_special_tokens"] = add_special_tokens
        prompts = self.samples(text, input_ids, **items)
        samples = [self.plan.preview(prompt, data, **tokenization) for prompt, data in prompts]
        batch = batch_of(self.plan, samples, padded)
        if self.spec.decoder_prompt is not None:
            ids = [self.plan.encode(prompt, **tokenization) for prompt, _ in prompts]
            rewritten = [self.plan.rewrite("decoder_prompt", one) for one in ids]
            batch |= padded.prompts("decoder_input_ids", rewritten, name)
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
        """The names by which a call takes items: those of the modalities, and transformers' names
        for images, videos and audio."""
        modalities = self.plan.modalities
        of_transformers = {_KEYWORDS[m.item.media] for m in modalities.values() if m.item.media}
        return sorted({*modalities, *of_transformers})

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
        listed = _listed(input_ids if text is None else text)
        if not isinstance(listed, (list, tuple)):
            expected = "token ids" if text is None else "a text, or a list of them"
            raise InputError(where, expected, repr(listed))
        prompts = [_listed(one) for one in listed]
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
        placeholder: the tokenizer's for padding, that for the end, and then any from 0 on.

        Raises:
            InputError: a value that an argument cannot have, or a length or a multiple for prompts
                that are not padded.
        """
        name = self.spec.name
        has_length = padding == "max_length" and length is not None
        if padding not in (True, False, "longest", "do_not_pad") and not has_length:
            expected = 'a bool, "longest", or "max_length" beside max_length='
            raise InputError(f"{name}.padding", expected, repr(padding))
        if side not in (None, "left", "right"):
            raise InputError(f"{name}.padding_side", '"left" or "right"', repr(side))
        for argument, value in (("max_length", length), ("pad_to_multiple_of", multiple)):
            is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value is not None and not is_number:
                raise InputError(f"{name}.{argument}", "a number above 0", repr(value))
        if length is not None and not has_length:
            expected = 'padding="max_length" beside it'
            got, remedy = f"padding={padding!r}", "Nothing is cut off, as in a server."
            raise InputError(f"{name}.max_length", expected, got, remedy)
        is_wanted = padding not in (False, "do_not_pad")
        if multiple is not None and not is_wanted:
            got = f"padding={padding!r}"
            raise InputError(f"{name}.pad_to_multiple_of", "padding=True beside it", got)
        known = [getattr(self.tokenizer, f"{kind}_token_id", None) for kind in ("pad", "eos")]
        taken, others = {None, *self.plan.embed_ids}, range(self.plan.vocab_size)
        token: Any = next(token for token in chain(known, others) if token not in taken)
        side = str(side or getattr(self.tokenizer, "padding_side", "right"))
        return Padding(token, side, length or 0, multiple or 1, is_wanted)

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
        """A conversation, or a list of conversations, as text or as tensors: the prompt that vLLM's
        chat makes of these messages.

        The content of a message is a text or a list of parts, ``{"type": "text", "text": ...}`` and
        ``{"type": "series", "series": item}`` with the name of a modality. As in vLLM, a template
        with a loop over the parts receives them, and writes the placeholder of an item itself. Any
        other template receives one text: the placeholders that the texts do not hold, modality by
        modality, and then the texts, each on a line. A placeholder is the text of the spec's
        `replace`.

        Args:
            conversation: messages with `role` and `content`, or lists of them. Templates also
                receive what vLLM passes on: `tool_calls`, `tool_call_id`, `reasoning`, `name`.
            chat_template: a template, or the name of one, in place of the processor's. Without it,
                and with `tools`, the tokenizer's own comes first, as in vLLM.
            tokenize: return tensors: the `input_ids` alone, or all with ``return_dict=True``.
            return_dict: with `tokenize`, return the whole result of `Processor.__call__`.
            processor_kwargs: arguments of that call, for example `padding`.
            return_tensors: another argument of that call.
            chat_template_content_format: the server's ``--chat-template-content-format``: "string",
                "openai", or "auto", by which the syntax of the template tells.
            interleave_mm_strings: the server's ``--interleave-mm-strings``: placeholders stand
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
        template = self._template(chat_template, options.get("tools"))
        form = chat_template_content_format
        if form == "auto":
            form = content_format(template)
        if form not in ("string", "openai"):
            where = f"{self.spec.name}.chat_template_content_format"
            raise InputError(where, '"auto", "string" or "openai"', repr(form))
        is_one = isinstance(conversation[0], Mapping)
        conversations = [conversation] if is_one else conversation
        texts: list[str] = []
        requests: list[dict[str, Any]] = []
        for messages in conversations:
            reader = Conversation(
                self.spec, self.plan.modalities, form, interleave_mm_strings=interleave_mm_strings
            )
            read = [reader.read(message) for message in messages]
            texts.append(self._rendered(read, reader.left_out, template, options))
            requests.append(reader.data())
        if not tokenize:
            return texts[0] if is_one else texts
        ids = [self.plan.encode(text, add_special_tokens=False) for text in texts]
        names = {name: None for request in requests for name in request}
        items: dict[str, Any] = {
            name: [request.get(name) for request in requests] for name in names
        }
        batch = self(input_ids=ids, **call_options, **items)
        return batch if return_dict else batch["input_ids"]

    def _template(self, chosen: str | None, tools: Any) -> str:
        """Return the chat template that vLLM takes.

        Raises:
            InputError: there is none.
        """
        where = f"{self.spec.name}.chat_template"
        of_tokenizer: Any = getattr(self.tokenizer, "chat_template", None)
        template: Any = self.chat_template
        if chosen is not None:
            templates = {**_named_templates(template), **_named_templates(of_tokenizer)}
            if chosen in templates:
                return str(templates[chosen])
            if "{" not in chosen:
                expected = f"a template, or a name among {sorted(templates)}"
                raise InputError(where, expected, repr(chosen))
            return chosen
        if tools is not None and of_tokenizer is not None:
            template = of_tokenizer
        named = _named_templates(template)
        name = "tool_use" if tools is not None and "tool_use" in named else "default"
        template = named.get(name)
        if not isinstance(template, str):
            raise InputError(where, "a chat template", "none", "Give chat_template=.")
        return template

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        left_out: list[dict[str, Any]],
        template: str,
        options: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: as vLLM passes them to the template.
            left_out: per message, what vLLM does not pass on.
            template: the chat template.
            options: of the tokenizer and the template.

        Raises:
            InputError: the template refuses the messages, or reads what vLLM does not pass on.
        """
        where = f"{self.spec.name}.conversation"
        if not has_role(template, "developer"):
            for i, message in enumerate(messages):
                if message["role"] == "developer":
                    # some releases of vLLM make it a system message, and merge these into one
                    remedy = "Write a system message."
                    got = "developer, which it does not name"
                    raise InputError(f"{where}[{i}]", "a role of the chat template", got, remedy)
        render = partial(
            self.tokenizer.apply_chat_template, chat_template=template, tokenize=False, **options
        )
        with convert_errors(where, "messages that the chat template takes", InputError):
            text: str = render(messages)
        if any(left_out):
            whole = [{**message, **more} for message, more in zip(messages, left_out, strict=True)]
            try:
                differs = render(whole) != text
            except Exception:  # of the template, which cannot take what it reads
                differs = True
            if differs:
                names = sorted({name for more in left_out for name in more})
                expected = "messages of which vLLM's chat passes all on to the template"
                remedy = "Write the thoughts of a message as its reasoning, and leave out others."
                raise InputError(where, expected, f"{names} as well, which it reads", remedy)
        return text


def _named_templates(templates: Any) -> Mapping[str, Any]:
    """Return the templates of a tokenizer or a processor, which has one or several, by name."""
    if templates is None:
        return {}
    return templates if isinstance(templates, Mapping) else {"default": templates}


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
