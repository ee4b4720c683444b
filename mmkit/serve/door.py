"""The state that the routes of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import Any

from msgspec import Raw

from ..bound.modality import BoundModality
from ..errors import InputError
from ..vllm_api.chat import modalities
from . import chat, parsing, protocol
from .answers import Output
from .engine import Engine, EngineDeadError
from .limits import Limits
from .media import check_kinds, media_of, pixels
from .modalities import describe, describe_output
from .protocol import Modalities, Prompted, Said, Sampling, ServerLimits
from .wire import Decoder, Media, TooLarge, by_modality

_POLL = 0.25
"""Seconds between two looks at the engine."""


class Door:
    """The model, the limits and the open sessions of one server.

    Attributes:
        engine: vLLM.
        limits: what one client may ask.
        models: the names under which the model is served.
        origins: of the pages that may open websockets; ``*`` for any.
        in_messages: the modalities that have a content part of their own in messages.
        places: numbers of the open sessions, at all API servers of one address different ones.
        over: done when the engine is dead or shut down.
    """

    def __init__(
        self, engine: Engine, limits: Limits, models: list[str], origins: Iterable[str] = "*"
    ) -> None:
        self.engine, self.limits, self.models = engine, limits, models
        self.plan, self.origins = engine.plan, frozenset(origins)
        self.in_messages = modalities(engine.plan.spec)
        self.places: set[int] = set()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._described: Modalities | None = None
        self._watch = asyncio.ensure_future(self._watching())

    async def described(self) -> Modalities:
        """The modalities, outputs and limits of the model; made once, because it processes the
        largest items."""
        if self._described is None:
            self._described = await self.engine.beside(self._describe)
        return self._described

    def _describe(self) -> Modalities:
        allowed, modalities = self.engine.limits(), self.plan.modalities
        return Modalities(
            model=self.models[0],
            spec=self.plan.spec.name,
            vocab_size=self.plan.vocab_size,
            max_model_len=self.engine.max_model_len,
            text=self.engine.has_tokenizer,
            modalities=[describe(modalities[name], allowed.get(name)) for name in modalities],
            outputs=[describe_output(output) for output in self.plan.outputs.values()],
            limits=ServerLimits(**{**asdict(self.limits), "sessions": self.most_sessions}),
        )

    async def _watching(self) -> None:
        while not self.engine.dead:
            await asyncio.sleep(_POLL)
        self.over.set_result(None)

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        """Raise in what waits for the engine when that is over: vLLM says nothing to requests of an
        engine that is shut down.

        Raises:
            EngineDeadError: it is.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:

                def end(_: object) -> None:
                    scope.reschedule(loop.time())

                self.over.add_done_callback(end)
                try:
                    yield
                finally:
                    self.over.remove_done_callback(end)
        except TimeoutError:
            if scope.expired():
                raise EngineDeadError from None
            raise

    @property
    def most_sessions(self) -> int:
        """Sessions that may be open at once, the share of this API server."""
        most = self.limits.sessions or self.engine.spare_sessions
        return max(1, most // self.engine.api_servers[1])

    @contextmanager
    def place(self) -> Iterator[int | None]:
        """A place for a session while the block runs; None where all are taken."""
        rank, servers = self.engine.api_servers
        places = range(rank, rank + servers * self.most_sessions, servers)
        place = next((place for place in places if place not in self.places), None)
        if place is not None:
            self.places.add(place)
        try:
            yield place
        finally:
            self.places.discard(-1 if place is None else place)

    def check_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            InputError: another one.
        """
        if asked is not None and asked not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", parsing.shown(asked))
        return asked or self.models[0]

    async def output(self, asked: Sampling) -> Output | None:
        """The form of the answer for the output that a request asks for; None without an output.

        Raises:
            InputError: an unknown output, or a PNG of an output that is no image.
        """
        if asked.output is None:
            if asked.output_format is not None:
                raise InputError("output_format", "an output beside it", "none")
            return None
        known = self.plan.outputs
        if asked.output not in known:
            expected = f"one of {', '.join(known)}" if known else "none, as the spec declares none"
            raise InputError("output", expected, parsing.shown(asked.output))
        output, as_png = known[asked.output], asked.output_format == "png"
        if as_png and not await asyncio.to_thread(lambda: output.is_image):
            expected = f'"tensor", as {output.name} is no image'
            raise InputError("output_format", expected, '"png"')
        return Output(output, as_png)

    async def prompt(
        self, asked: Prompted, settings: Any = None, last: Sequence[int] = ()
    ) -> dict[str, Any]:
        """vLLM's prompt of a request or session message; without one, the placeholders of its
        items. `tokenization_kwargs` in it are for `Engine.render`.

        Args:
            asked: the message.
            settings: the message that has `mm_processor_kwargs` and `cache_salt`; `asked` by
                default.
            last: the last id of what a session has already, if it has begun.

        Raises:
            InputError: items, ids, names or messages that the model does not take.
        """
        settings = settings or asked
        option = "mm_processor_kwargs"
        kwargs = parsing.decoded(_OPTIONS, settings.mm_processor_kwargs, where=option)
        if kwargs and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: --trust-request-mm-kwargs allows them."
            raise InputError(option, "none", "some", remedy)
        said = isinstance(asked, Said) and asked.messages != protocol.nothing()
        template = _template(asked) if isinstance(asked, Said) else {}
        if said:
            prompt, special = await self._of_messages(asked, template, last), False
        elif template:
            raise InputError(next(iter(template)), "messages beside it", "none")
        else:
            prompt, special = await self._of_prompt(asked), not last
        prompt |= {option: kwargs, "cache_salt": settings.cache_salt}
        if not special:
            prompt["tokenization_kwargs"] = {"add_special_tokens": False}
        return {name: value for name, value in prompt.items() if value or name in _PROMPTS}

    async def _of_messages(
        self, asked: Any, template: Mapping[str, Any], last: Sequence[int]
    ) -> dict[str, Any]:
        """The prompt that the chat template makes of messages, and their items."""
        items, uuids = (
            parsing.decoded(_ANY, getattr(asked, name), where=name) for name in ("items", "uuids")
        )
        beside = {"prompt": asked.prompt is not None, "items": items, "uuids": uuids}
        for name, given in beside.items():
            if given:
                remedy = "Write what belongs there into the messages."
                raise InputError(name, "none beside messages", "some", remedy)
        if not self.engine.has_tokenizer:
            raise InputError("messages", "a prompt, since the server has no tokenizer", "messages")
        messages, sent = await asyncio.to_thread(chat.messages, asked.messages, self)
        return await self.engine.chat(messages, template, sent, last)

    async def _of_prompt(self, asked: Prompted) -> dict[str, Any]:
        """A prompt that the caller has written, and its items."""
        data, uuids = await asyncio.to_thread(self._items, asked)
        written: Any = asked.prompt
        if isinstance(written, str) and not self.engine.has_tokenizer:
            raise InputError("prompt", "token ids, since the server has no tokenizer", "a text")
        if isinstance(written, list):
            self.plan.check_ids(written)
        media = {name: parts for name, value in data.items() if (parts := media_of(value))}
        weighed = {f"items.{name}": parts for name, parts in media.items()}
        if media:
            await self._check_places(written, data, media)
            await asyncio.to_thread(self._check_pixels, weighed)
            data = await self.engine.load(data)
        if written is None:
            written = await self.engine.beside(self.plan.spell, data)
        key = "prompt" if isinstance(written, str) else "prompt_token_ids"
        return {key: written, "multi_modal_data": data, "multi_modal_uuids": uuids}

    def _items(self, asked: Any) -> tuple[dict[str, Any], dict[str, list[str | None]]]:
        """The items and the uuids of a message, names first, then counts; media are still to be
        loaded."""
        plan = self.plan
        try:
            named = by_modality(asked.items, plan.modalities, "items")
        except parsing.UnknownField as error:
            plan.check_names([error.name])
            raise
        try:
            uuids = by_modality(asked.uuids, named, "uuids", list[str | None] | None)
        except parsing.UnknownField as error:
            expected = "items of that modality beside their uuids"
            remedy = "Send null for an item that the server has."
            raise InputError(error.where, expected, "none", remedy) from None
        kinds = {name: modality.item for name, modality in plan.modalities.items()}
        beside = {name: modality.intake.companions for name, modality in plan.modalities.items()}
        data = self._decoder().decode(named, kinds, beside)
        for name, value in data.items():
            self._check(plan.modalities[name], value)
        return data, {name: names for name, names in uuids.items() if names is not None}

    def parts(
        self, sent: Mapping[str, list[Raw]], media: Sequence[Media] = ()
    ) -> dict[str, list[Any]]:
        """Items of content parts from their JSON, in their order; media are still to be loaded.

        Args:
            sent: by modality, one by one. A precomputed embedding is an object of its fields.
            media: images and videos beside them, which vLLM loads.

        Raises:
            InputError: an item is malformed, or there are too many.
            TooLarge: they are beyond a limit of the server.
        """
        decoder, data = self._decoder(), {}
        for name, raws in sent.items():
            modality = self.plan.modalities[name]
            embeds = [modality.intake.embeds_field, *modality.intake.companions]
            data[name] = [
                decoder.part(raw, f"items.{name}[{i}]", modality.item, embeds)
                for i, raw in enumerate(raws)
            ]
            self._check(modality, data[name])
        own = {f"items.{name}": media_of(values) for name, values in data.items()}
        self._check_pixels({**own, "messages": media})
        return data

    def _decoder(self) -> Decoder:
        return Decoder(self.limits.elements, self.limits.items)

    def _check(self, modality: BoundModality, value: Any) -> None:
        """Refuse too many items, and media of another kind."""
        values = next(iter(value.values())) if isinstance(value, dict) else value
        if isinstance(values, list):
            modality.intake.check_count(len(values), self.engine.limits().get(modality.name))
        check_kinds(value, modality.item, f"items.{modality.name}")

    async def _check_places(
        self, prompt: Any, data: Mapping[str, Any], media: Iterable[str]
    ) -> None:
        """Refuse media for which a prompt has no place, as far as that is known before they are
        loaded."""
        if prompt is None or self.plan.spec.prompt is not None:
            return
        counters = {name: count for name in media if (count := self.plan.standing(name))}
        ids = await self.engine.ids(prompt) if counters else None
        if ids is None:
            return
        for name, count in counters.items():
            items, places = len(data[name]), count(ids)
            if places < items:
                where, remedy = self.plan.modalities[name].where, "Write one placeholder per item."
                expected = f"{items} placeholder(s) in the prompt for {items} item(s)"
                raise InputError(where, expected, str(places), remedy)

    def _check_pixels(self, media: Mapping[str, Sequence[Media]]) -> None:
        """Refuse images and videos, by their paths, that are too large, before they are decoded."""
        most = left = self.limits.pixels
        for where, parts in media.items():
            for part in parts:
                left -= pixels(part, self.engine.frames)
                if left < 0:
                    expected = f"at most {most} pixels in one request"
                    remedy = "Send less at once, or raise MMKIT_SERVE_PIXELS on the server."
                    raise TooLarge(where, expected, "more", remedy)


def of_scope(scope: Any) -> Door | None:
    """The door of the server that has an ASGI scope; None if its model is not one of ours."""
    return getattr(scope["app"].state, "mmkit_door", None) if "app" in scope else None


def _template(asked: Said) -> dict[str, Any]:
    """The options of a message for the chat template, as fields of vLLM's chat request."""
    kwargs = parsing.decoded(_OPTIONS, asked.chat_template_kwargs, where="chat_template_kwargs")
    options = {
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
        "chat_template_kwargs": kwargs,
    }
    return {name: value for name, value in options.items() if value is not None}


_PROMPTS = ("prompt", "prompt_token_ids")
_ANY: Any = parsing.decoder(dict[str, Raw] | None)
_OPTIONS: Any = parsing.decoder(dict[str, Any] | None)
