"""The state that the routes of one server share."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import Raw
from vllm.v1.engine.exceptions import EngineDeadError

from ..bound.modality import BoundModality
from ..errors import InputError
from ..vllm_api.chat import modalities
from . import chat
from .engine import Engine
from .protocol import (
    Choice,
    Generating,
    Limits,
    Modalities,
    OutputInfo,
    Produced,
    Prompted,
    PromptTokensDetails,
    Said,
    UnknownField,
    Usage,
    decoded,
    named,
    nothing,
    shown,
)
from .wire import Decoder, Media, check_kind, describe, encoded, media_of

T = TypeVar("T")
_POLL = 0.25


class Gone(Exception):
    """The client left."""


class ServerState:
    """The model, the limits and the open sessions of one server.

    Attributes:
        engine: vLLM.
        limits: what one client may ask.
        models: the names under which the model is served.
        origins: of the pages that may open websockets; ``*`` for any.
        in_messages: the modalities that have a content part of their own in messages.
        over: done when the engine is dead or shut down.
    """

    def __init__(
        self, engine: Engine, limits: Limits, models: list[str], origins: Iterable[str] = "*"
    ) -> None:
        self.engine, self.limits, self.models = engine, limits, models
        self.plan, self.origins = engine.plan, frozenset(origins)
        self.in_messages = modalities(engine.plan.spec)
        self._places: set[int] = set()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._described: Modalities | None = None
        self.watch = asyncio.ensure_future(self._watching())

    # -- the server --------------------------------------------------------------------------------

    async def described(self) -> Modalities:
        """The modalities, outputs and limits of the model; made once, because it processes the
        largest items."""
        if self._described is None:
            self._described = await self.engine.beside(self._describe)
        return self._described

    def _describe(self) -> Modalities:
        allowed, plan = self.engine.limits(), self.plan
        return Modalities(
            model=self.models[0],
            spec=plan.spec.name,
            vocab_size=plan.vocab_size,
            max_model_len=self.engine.max_model_len,
            text=self.engine.has_tokenizer,
            modalities=[describe(of, allowed.get(name)) for name, of in plan.modalities.items()],
            outputs=[
                OutputInfo(
                    name=output.name,
                    tokens=output.num_tokens,
                    shape=list(output.shape),
                    dtype=output.dtype,
                    png=output.is_image,
                )
                for output in plan.outputs.values()
            ],
            limits=replace(self.limits, sessions=self.most_sessions),
        )

    async def _watching(self) -> None:
        while not self.engine.dead:
            await asyncio.sleep(_POLL)
        self.over.set_result(None)

    async def unless_over(self, work: Awaitable[T], *leaving: asyncio.Future[Any]) -> T:
        """The outcome of some work, which is cancelled if the engine is over, of which vLLM tells
        nobody who waits for one that is shut down, or if the client leaves.

        Raises:
            EngineDeadError: it is over.
            Gone: the client left.
        """
        working = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {working, self.over, *leaving}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineDeadError if self.over.done() else Gone
            return await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    @property
    def most_sessions(self) -> int:
        """Sessions that may be open at once: the share of this API server."""
        most = self.limits.sessions or self.engine.spare_sessions
        return max(1, most // self.engine.api_servers[1])

    @contextmanager
    def place(self) -> Iterator[int | None]:
        """The number of a session while the block runs, another one at each API server; None where
        all are taken."""
        rank, servers = self.engine.api_servers
        numbers = range(rank, rank + servers * self.most_sessions, servers)
        number = next((number for number in numbers if number not in self._places), None)
        if number is None:
            yield None
            return
        self._places.add(number)
        try:
            yield number
        finally:
            self._places.remove(number)

    # -- requests ----------------------------------------------------------------------------------

    def check_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            InputError: another one.
        """
        if asked is not None and asked not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", shown(asked))
        return asked or self.models[0]

    async def output(self, asked: Generating) -> Any:
        """The output that a request asks for; None without one.

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
            raise InputError("output", expected, shown(asked.output))
        output = known[asked.output]
        if asked.output_format == "png" and not await asyncio.to_thread(lambda: output.is_image):
            expected = f'"tensor", as {output.name} is no image'
            raise InputError("output_format", expected, '"png"')
        return output

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
        kwargs = _options(settings, "mm_processor_kwargs")
        if kwargs and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: --trust-request-mm-kwargs allows them."
            raise InputError("mm_processor_kwargs", "none", "some", remedy)
        template = _template(asked) if isinstance(asked, Said) else {}
        if isinstance(asked, Said) and asked.messages != nothing():
            prompt, special = await self._of_messages(asked, template, last), False
        elif template:
            raise InputError(next(iter(template)), "messages beside it", "none")
        else:
            prompt, special = await self._of_prompt(asked), not last
        prompt |= {"mm_processor_kwargs": kwargs, "cache_salt": settings.cache_salt}
        if not special:
            prompt["tokenization_kwargs"] = {"add_special_tokens": False}
        always = ("prompt", "prompt_token_ids")
        return {name: value for name, value in prompt.items() if value or name in always}

    async def _of_messages(
        self, asked: Said, template: Mapping[str, Any], last: Sequence[int]
    ) -> dict[str, Any]:
        """The prompt that the chat template makes of messages, and their items."""
        beside = {name: getattr(asked, name) for name in ("items", "uuids")}
        given = [name for name, raw in beside.items() if raw not in (nothing(), Raw(b"{}"))]
        if asked.prompt is not None or given:
            remedy = "Write what belongs there into the messages."
            where = "prompt" if asked.prompt is not None else given[0]
            raise InputError(where, "none beside messages", "some", remedy)
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
        media = {name: parts for name in data if (parts := list(media_of(data[name])))}
        if media:
            await self._check_places(written, data, media)
            weighed = {f"items.{name}": parts for name, parts in media.items()}
            await asyncio.to_thread(self._check_pixels, weighed)
            for name in media:
                data[name] = await self.engine.loaded(data[name], f"items.{name}")
        if written is None:
            written = await self.engine.beside(self.plan.spell, data)
        key = "prompt" if isinstance(written, str) else "prompt_token_ids"
        return {key: written, "multi_modal_data": data, "multi_modal_uuids": uuids}

    def _items(self, asked: Prompted) -> tuple[dict[str, Any], dict[str, list[str | None]]]:
        """The items and the uuids of a message, names first, then counts; media are still to be
        loaded."""
        plan, decoder = self.plan, Decoder(self.limits)
        try:
            sent = named(asked.items, plan.modalities, "items")
        except UnknownField as error:
            plan.check_names([error.name])
            raise
        try:
            uuids = named(asked.uuids, sent, "uuids", list[str | None] | None)
        except UnknownField as error:
            expected = "items of that modality beside their uuids"
            remedy = "Send null for an item that the server has."
            raise InputError(f"uuids.{error.name}", expected, "none", remedy) from None
        data = {}
        for name, raw in sent.items():
            modality, where = plan.modalities[name], f"items.{name}"
            fields = [f"{name}_embeds", *modality.intake.companions]
            data[name] = decoder.items(raw, where, modality.item, fields)
            self._check(modality, data[name])
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
        decoder, data = Decoder(self.limits), {}
        for name, raws in sent.items():
            modality = self.plan.modalities[name]
            fields = [f"{name}_embeds", *modality.intake.companions]
            data[name] = [
                decoder.one(raw, f"items.{name}[{i}]", modality.item, fields)
                for i, raw in enumerate(raws)
            ]
            self._check(modality, data[name])
        own = {f"items.{name}": list(media_of(values)) for name, values in data.items()}
        self._check_pixels({**own, "messages": media})
        return data

    def _check(self, modality: BoundModality, value: Any) -> None:
        """Refuse too many items, and media of another kind, before anybody loads them."""
        where = f"items.{modality.name}"
        values = next(iter(value.values())) if isinstance(value, dict) else value
        if isinstance(values, list):
            modality.intake.check_count(len(values), self.engine.limits().get(modality.name))
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            at = f"{where}[{index}]" if isinstance(value, list) else where
            check_kind(one, modality.item, at)

    async def _check_places(
        self, prompt: Any, data: Mapping[str, Any], media: Iterable[str]
    ) -> None:
        """Refuse media for which a prompt has no place, as far as that is known before they are
        loaded."""
        if prompt is None or self.plan.spec.prompt is not None:
            return
        counters = {name: count for name in media if (count := self.plan.standing(name))}
        ids = await self.engine.ids(prompt) if counters else None
        for name, count in counters.items() if ids is not None else ():
            items, places = len(data[name]), count(ids)  # type: ignore[arg-type]
            if places < items:
                where, remedy = self.plan.modalities[name].where, "Write one placeholder per item."
                expected = f"{items} placeholder(s) in the prompt for {items} item(s)"
                raise InputError(where, expected, str(places), remedy)

    def _check_pixels(self, media: Mapping[str, Sequence[Media]]) -> None:
        """Refuse images and videos, by their paths, that are too large, before they are decoded."""
        left = self.limits.pixels
        for where, parts in media.items():
            for part in parts:
                left -= part.pixels(self.engine.frames)
                if left < 0:
                    raise self.limits.too_large(where, "pixels", "pixels in one request")


def _options(message: Any, name: str) -> Any:
    return decoded(dict[str, Any] | None, getattr(message, name), name)


def _template(asked: Said) -> dict[str, Any]:
    """The options of a message for the chat template, as fields of vLLM's chat request."""
    options = {
        "add_generation_prompt": asked.add_generation_prompt,
        "continue_final_message": asked.continue_final_message,
        "chat_template_kwargs": _options(asked, "chat_template_kwargs"),
    }
    return {name: value for name, value in options.items() if value is not None}


# -- answers ---------------------------------------------------------------------------------------


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def choice(part: Any) -> Choice:
    """One of vLLM's outputs."""
    logprobs = [
        {token: likelihood.logprob for token, likelihood in step.items()}
        for step in part.logprobs or ()
    ]
    return Choice(
        index=part.index,
        token_ids=list(part.token_ids),
        text=part.text or None,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        logprobs=logprobs or None,
    )


async def produced(output: Any, ids: Sequence[int], form: str | None) -> Produced:
    """The output that ids are; decoded in a thread, since that may take its time.

    Raises:
        InputError: ids that are no output.
        SpecError: the function of the spec fails.
    """

    def decode() -> Produced:
        array = output.decode(ids)
        if form != "png":
            return Produced(name=output.name, tensor=encoded(array, "output"))
        from PIL import Image

        Image.fromarray(array).save(file := io.BytesIO(), "PNG")
        return Produced(name=output.name, png=base64.b64encode(file.getvalue()).decode())

    return await asyncio.to_thread(decode)
