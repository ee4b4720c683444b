"""The state that the routes of one server share, and what it makes of a request: vLLM's prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Raw

from ..errors import InputError
from ..plan.output import AnswerReader, BoundOutput, find_output
from ..vllm_api.chat import list_part_types
from ..vllm_api.server_request import SERVER_REQUEST, ItemPaths, ServerRequest
from ..wire.decoding import decode_fields, quote
from ..wire.items import Decoder, MediaPart, encode_value, find_media, list_embeds_fields
from . import protocol
from .description import describe_modality
from .engine import Engine
from .errors import SESSIONS, SessionRefused, TooBusy
from .limits import ServerLimits
from .protocol import AnswerPart, Choice, OutputInfo, PromptTokensDetails, Usage

NUM_CONTEXT_IDS = 6
"""Ids of a prompt beside which the ids of an answer become text.

A tokenizer may drop the space before the first word of a text.
"""


def find_state(app: Any) -> ServerState | None:
    """Return the state of a server from its application; None for a model without a spec."""
    return getattr(app.state, "mmkit", None)


class ServerState:
    """The model, the limits and the open sessions of one server.

    Args:
        engine: vLLM.
        limits: what one client may ask for.
        models: the names under which the model is served.
        origins: of the pages that may open websockets; ``*`` for any.

    Attributes:
        engine: see above.
        limits: see above.
        models: see above.
        origins: see above.
        plan: the spec, bound to the model.
        message_modalities: the modalities that have a content part of their own in messages.
        is_stopping: whether the server has the order to stop, and takes no more requests.
        stop_event: is set soon afterwards, for tasks that wait for it.
    """

    def __init__(
        self, engine: Engine, limits: ServerLimits, models: list[str], origins: Iterable[str] = "*"
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.models = models
        self.plan = engine.plan
        self.origins = frozenset(origins)
        self.message_modalities = list_part_types(engine.plan.spec)
        self.is_stopping = False
        self.stop_event = asyncio.Event()
        self._session_slots = asyncio.Semaphore(limits.sessions)
        self._loop = asyncio.get_running_loop()

    # -- the server --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more requests.

        It can be called again, and from any thread.
        """
        self.is_stopping = True  # at once: the next step of vLLM's may break a request
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stop_event.set)

    @cached_property
    def description(self) -> protocol.Modalities:
        """The modalities, outputs and limits of the model.

        Made once, on vLLM's thread for items, because it processes the largest ones.
        """
        plan = self.plan
        modality_infos = []
        for name, modality in plan.modalities.items():
            modality_infos.append(describe_modality(modality, self.engine.most_items.get(name)))
        outputs = []
        for output in plan.outputs.values():
            info = OutputInfo(
                name=output.name,
                tokens=output.num_tokens,
                shape=list(output.shape),
                dtype=output.dtype,
                after=output.after,
                until=output.until,
                most=None if output.until is None else output.most,
            )
            outputs.append(info)
        return protocol.Modalities(
            model=self.models[0],
            spec=plan.spec.name,
            vocab_size=plan.vocab_size,
            max_model_len=self.engine.max_model_len,
            text=self.engine.has_tokenizer,
            modalities=modality_infos,
            outputs=outputs,
            limits=self.limits,
        )

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[None]:
        """Count one more open session within the block.

        Raises:
            SessionRefused: the server runs no language model.
            TooBusy: there are as many as may be.
        """
        if self.engine.is_encode_only:
            expected = "a server that runs the language model"
            remedy = "Open it at the server that generates."
            raise SessionRefused("session", expected, "one that only encodes items", remedy)
        if self._session_slots.locked():
            expected = f"at most {self.limits.sessions} open at once"
            raise TooBusy("session", expected, "one more", "Try again later.")
        async with self._session_slots:
            with SESSIONS.track_inprogress():
                yield

    # -- requests ----------------------------------------------------------------------------------

    def resolve_model(self, name: str | None) -> str:
        """Return the name of the model that a request asks for.

        Args:
            name: from the request; None for the first name.

        Raises:
            InputError: the server has no such model.
        """
        if name is None:
            return self.models[0]
        if name not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", quote(name))
        return name

    def find_output(self, request: protocol.GenerationFields) -> BoundOutput | None:
        """Return the output that a request asks for; None without one.

        Raises:
            InputError: the spec has no such output.
        """
        if request.output is None:
            return None
        return find_output(self.plan.outputs, request.output, "output", quote(request.output))

    def make_server_request(
        self,
        field: str = "",
        item_paths: Sequence[ItemPaths] = (),
        *,
        adds_special_tokens_twice: bool = False,
    ) -> ServerRequest:
        """Return what vLLM's functions are to know of a new request; see `ServerRequest`."""

        def make_pixel_error() -> InputError:
            return self.limits.make_error(field or "body", "pixels", "pixels in one request")

        return ServerRequest(
            self.limits.pixels,
            make_pixel_error,
            field,
            item_paths,
            adds_special_tokens_twice,
            self.engine.has_render_processes,
        )

    async def make_prompt(
        self, message: protocol.PromptFields, settings: protocol.GenerationFields
    ) -> dict[str, Any]:
        """Return vLLM's prompt of a request, or of a message of a session.

        A message without a prompt gets the targets of its items as the prompt.

        Args:
            message: it has the prompt and the items.
            settings: it has `mm_processor_kwargs` and `cache_salt`: the first message of a session;
                without a session, the same request as `message`.

        Raises:
            InputError: items, ids or names that the model does not take.
            TooLarge: the items are beyond a limit.
        """
        if settings.mm_processor_kwargs and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: --trust-request-mm-kwargs allows them."
            raise InputError("mm_processor_kwargs", "none", "some", remedy)
        data, uuids, media = await asyncio.to_thread(self._decode_items, message)
        text_or_ids: Any = message.prompt
        if isinstance(text_or_ids, str) and not self.engine.has_tokenizer:
            raise InputError("prompt", "token ids, since the server has no tokenizer", "a text")
        if isinstance(text_or_ids, list):
            self.plan.check_ids(text_or_ids)
        await self._load_media(media)
        if text_or_ids is None:
            text_or_ids = await self.engine.run_on_item_thread(self.plan.spell, data)
        prompt: dict[str, Any] = {}
        if isinstance(text_or_ids, str):
            prompt["prompt"] = text_or_ids
        else:
            prompt["prompt_token_ids"] = text_or_ids
        if data:
            prompt["multi_modal_data"] = data
        if uuids:
            prompt["multi_modal_uuids"] = uuids
        if settings.mm_processor_kwargs:
            prompt["mm_processor_kwargs"] = settings.mm_processor_kwargs
        if settings.cache_salt:
            prompt["cache_salt"] = settings.cache_salt
        return prompt

    def _decode_items(self, message: protocol.PromptFields) -> MessageItems:
        """Return the items of a message, whose media are still to be loaded.

        Raises:
            InputError: an unknown modality, malformed uuids or items, or too many of them.
            TooLarge: the items are beyond a limit.
        """
        item_types = dict.fromkeys(self.plan.modalities, Raw)
        raw_items = decode_fields(message.items, item_types, "items", noun="modalities")
        uuid_types = dict.fromkeys(raw_items, list[str | None] | None)
        raw_uuids = decode_fields(message.uuids, uuid_types, "uuids", noun="modalities")
        decoder = Decoder(self.limits)
        data: dict[str, Any] = {}
        media: list[MediaPart] = []
        for name, raw in raw_items.items():
            modality = self.plan.modalities[name]
            embeds_fields = list_embeds_fields(modality)
            value = decoder.decode_items(raw, f"items.{name}", modality.item, embeds_fields)
            rows_or_items = value
            if isinstance(value, dict):  # precomputed embeddings: their first field
                rows_or_items = next(iter(value.values()))
            if isinstance(rows_or_items, list):
                most_items = self.engine.most_items.get(name)
                modality.parser.check_count(len(rows_or_items), most_items)
            data[name] = value
            media += find_media(data, name, f"items.{name}")
        uuids = {}
        for name, names in raw_uuids.items():
            if names is not None:
                uuids[name] = names
        return MessageItems(data, uuids, media)

    async def _load_media(self, media: Sequence[MediaPart]) -> None:
        """Load the media of a message in place, within the limit on pixels."""
        # The middleware has set one for the connection, which may be a session: each of its
        # messages has a limit of its own.
        token = SERVER_REQUEST.set(self.make_server_request())
        try:
            await self.engine.load_media(media)
        finally:
            SERVER_REQUEST.reset(token)


class MessageItems(NamedTuple):
    """The items of a request, or of a message of a session.

    Attributes:
        data: as in ``multi_modal_data``.
        uuids: of each modality the names of its items, if they have names.
        media: the media in `data`, which are still to be loaded.
    """

    data: dict[str, Any]
    uuids: dict[str, list[str | None]]
    media: list[MediaPart]


# -- answers ---------------------------------------------------------------------------------------


class Answer:
    """vLLM's answer to a request, as it grows.

    Args:
        engine: vLLM.
        sampling: vLLM's parameters of the request.
        output: of the spec, if the request asks for one.

    Attributes:
        ids: the generated ids, by the number of the choice.
    """

    def __init__(self, engine: Engine, sampling: Any, output: BoundOutput | None = None) -> None:
        self.ids: defaultdict[int, list[int]] = defaultdict(list)
        self._engine = engine
        self._sampling = sampling
        self._output = output
        # of an answer with outputs in a text, by the number of the choice
        self._readers: dict[int, AnswerReader] = {}

    async def make_choice(self, completion: Any, prompt: Sequence[int], *, stream: bool) -> Choice:
        """Return what is new in one of the completions of one of vLLM's outputs.

        Args:
            completion: vLLM's `CompletionOutput`.
            prompt: the ids before it.
            stream: whether the answer comes as it grows.

        Raises:
            InputError: the ids are not the output that the request asks for.
            SpecError: a function of the spec that decodes it fails.
        """
        self.ids[completion.index] += completion.token_ids
        produced = None
        parts = None
        if self._output is not None and self._output.after is not None:
            parts = await self._find_parts(self._output, completion, prompt, stream=stream)
        elif self._output is not None and completion.finish_reason in ("stop", "length"):
            produced = await self._decode_output(self._output, self.ids[completion.index])
        return Choice(
            index=completion.index,
            token_ids=list(completion.token_ids),
            text=completion.text or None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            logprobs=_convert_logprobs(completion.logprobs),
            produced=produced,
            parts=parts,
        )

    async def make_all_parts(self, index: int, prompt: Sequence[int]) -> list[AnswerPart] | None:
        """Return all parts of an answer that was streamed; None if it has no outputs in a text.

        Args:
            index: the number of the choice.
            prompt: the ids before it.
        """
        output = self._output
        if output is None or output.after is None:
            return None
        ids = self.ids[index]
        parts = await asyncio.to_thread(output.split_answer, ids, prompt)
        return [self._convert_part(output, part, ids, prompt) for part in parts]

    async def _find_parts(
        self, output: BoundOutput, completion: Any, prompt: Sequence[int], *, stream: bool
    ) -> list[AnswerPart] | None:
        """Return the parts in the new ids of a completion; of a stream, the outputs alone."""
        if completion.index not in self._readers:
            # of a prompt that is embeddings, vLLM has no ids
            self._readers[completion.index] = AnswerReader(output, prompt or ())
        reader = self._readers[completion.index]
        # in a thread, since decoding an output may take its time
        parts = await asyncio.to_thread(reader.find_parts, completion.token_ids)
        ids = self.ids[completion.index]
        converted = []
        for part in parts:
            if part.is_output or not stream:
                converted.append(self._convert_part(output, part, ids, prompt))
        if stream and not converted:
            return None
        return converted

    def _convert_part(
        self, output: BoundOutput, part: Any, ids: list[int], prompt: Sequence[int]
    ) -> AnswerPart:
        """Return a part of an answer on the wire.

        Args:
            output: the output that the request asks for.
            part: of an `AnswerReader`.
            ids: the ids of the answer.
            prompt: the ids before them.
        """
        if part.is_output:
            produced = None
            if part.array is not None:
                tensor = encode_value(part.array, "output")
                produced = protocol.Produced(name=output.name, tensor=tensor)
            return AnswerPart(
                type="output", start=part.start, length=len(part.ids), produced=produced
            )
        text = None
        if self._engine.has_tokenizer:
            before = [*prompt[-NUM_CONTEXT_IDS:], *ids[: part.start]]
            text = self._engine.decode_text(part.ids, before, self._sampling)
        return AnswerPart(type="text", start=part.start, length=len(part.ids), text=text)

    async def _decode_output(self, output: BoundOutput, ids: list[int]) -> protocol.Produced:
        """Return an output of the spec; in a thread, since decoding may take its time."""
        array = await asyncio.to_thread(output.decode, ids)
        return protocol.Produced(name=output.name, tensor=encode_value(array, "output"))

    def make_usage(self, last: Any) -> Usage:
        """Count tokens, after the last of vLLM's outputs."""
        num_prompt_tokens = len(last.prompt_token_ids)
        num_generated_tokens = 0
        for ids in self.ids.values():
            num_generated_tokens += len(ids)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_generated_tokens,
            total_tokens=num_prompt_tokens + num_generated_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=last.num_cached_tokens or 0),
        )


def _convert_logprobs(logprobs: Any) -> list[dict[int, float]] | None:
    """Return vLLM's logprobs as numbers: for each new token, the likeliest ids."""
    if not logprobs:
        return None
    converted = []
    for position in logprobs:
        converted.append({token: logprob.logprob for token, logprob in position.items()})
    return converted
