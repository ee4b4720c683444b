"""The state that the routes of one server share, and what it makes of a message: vLLM's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from ..bound.modality import BoundModality
from ..errors import InputError
from ..vllm_api.chat import modalities
from . import protocol
from .engine import Engine
from .protocol import Choice, Limits, Usage, decoded, named, shown
from .wire import Decoder, Media, check_kind, describe, embeds_of, encoded, media_of


class ServerState:
    """The model, the limits and the open sessions of one server.

    Attributes:
        engine: vLLM.
        limits: what one client may ask.
        models: the names under which the model is served.
        origins: of the pages that may open websockets; ``*`` for any.
        in_messages: the modalities that have a content part of their own in messages.
        sessions: how many are open.
    """

    def __init__(
        self, engine: Engine, limits: Limits, models: list[str], origins: Iterable[str] = "*"
    ) -> None:
        self.engine, self.limits, self.models = engine, limits, models
        self.plan, self.origins = engine.plan, frozenset(origins)
        self.in_messages = modalities(engine.plan.spec)
        self.sessions, self._turns = 0, count()
        self._described: protocol.Modalities | None = None

    # -- the server --------------------------------------------------------------------------------

    async def described(self) -> protocol.Modalities:
        """The modalities, outputs and limits of the model; made once, because it processes the
        largest items."""
        if self._described is None:
            self._described = await self.engine.beside(self._describe)
        return self._described

    def _describe(self) -> protocol.Modalities:
        allowed, plan = self.engine.limits(), self.plan
        return protocol.Modalities(
            model=self.models[0],
            spec=plan.spec.name,
            vocab_size=plan.vocab_size,
            max_model_len=self.engine.max_model_len,
            text=self.engine.has_tokenizer,
            modalities=[describe(of, allowed.get(name)) for name, of in plan.modalities.items()],
            outputs=[
                protocol.OutputInfo(
                    name=of.name, tokens=of.num_tokens, shape=list(of.shape), dtype=of.dtype
                )
                for of in plan.outputs.values()
            ],
            limits=self.limits,
        )

    def next_copy(self) -> int | None:
        """The copy of the model that computes the next session, whose prefix cache has it; None if
        there is but one."""
        copies = self.engine.copies
        return next(self._turns) % copies if copies > 1 else None

    # -- requests ----------------------------------------------------------------------------------

    def check_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            InputError: another one.
        """
        if asked is not None and asked not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", shown(asked))
        return asked or self.models[0]

    def output(self, asked: protocol.Generating) -> Any:
        """The output that a request asks for; None without one.

        Raises:
            InputError: an unknown output.
        """
        known = self.plan.outputs
        if asked.output is not None and asked.output not in known:
            expected = f"one of {', '.join(known)}" if known else "none, as the spec declares none"
            raise InputError("output", expected, shown(asked.output))
        return known.get(asked.output or "")

    async def prompt(
        self, asked: protocol.Prompted, settings: Any = None, *, special: bool = True
    ) -> dict[str, Any]:
        """vLLM's prompt of a request or session message; without one, the placeholders of its
        items. `tokenization_kwargs` in it are for `Engine.render`.

        Args:
            asked: the message.
            settings: the message that has `mm_processor_kwargs` and `cache_salt`; `asked` by
                default.
            special: whether a text gets special tokens.

        Raises:
            InputError: items, ids or names that the model does not take.
        """
        settings = settings or asked
        kwargs = decoded(dict[str, Any] | None, settings.mm_processor_kwargs, "mm_processor_kwargs")
        if kwargs and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: --trust-request-mm-kwargs allows them."
            raise InputError("mm_processor_kwargs", "none", "some", remedy)
        data, uuids = await asyncio.to_thread(self._items, asked)
        written: Any = asked.prompt
        if isinstance(written, str) and not self.engine.has_tokenizer:
            raise InputError("prompt", "token ids, since the server has no tokenizer", "a text")
        if isinstance(written, list):
            self.plan.check_ids(written)
        media = [(name, one) for name in data for one in media_of(data[name])]
        if media:
            of = dict(media)
            await self._check_places(written, data, of)
            weighed = [(f"items.{name}", one) for name, one in media]
            await asyncio.to_thread(self.check_pixels, weighed)
            for name in of:
                data[name] = await self.engine.loaded(data[name], f"items.{name}")
        if written is None:
            written = await self.engine.beside(self.plan.spell, data)
        prompt = {
            "multi_modal_data": data,
            "multi_modal_uuids": uuids,
            "mm_processor_kwargs": kwargs,
            "cache_salt": settings.cache_salt,
            "tokenization_kwargs": {} if special else {"add_special_tokens": False},
        }
        key = "prompt" if isinstance(written, str) else "prompt_token_ids"
        return {key: written, **{name: value for name, value in prompt.items() if value}}

    def _items(
        self, asked: protocol.Prompted
    ) -> tuple[dict[str, Any], dict[str, list[str | None]]]:
        """The items and the uuids of a message, names first, then counts; media are still to be
        loaded."""
        sent = named(asked.items, self.plan.modalities, "items")
        uuids = named(asked.uuids, sent, "uuids", list[str | None] | None)
        decoder, data = Decoder(self.limits), {}
        for name, raw in sent.items():
            modality = self.plan.modalities[name]
            data[name] = decoder.items(raw, f"items.{name}", modality.item, embeds_of(modality))
            self._check(modality, data[name])
        return data, {name: names for name, names in uuids.items() if names is not None}

    def _check(self, modality: BoundModality, value: Any) -> None:
        """Refuse too many items, and media of another kind, before anybody loads them."""
        where = f"items.{modality.name}"
        values = next(iter(value.values())) if isinstance(value, dict) else value
        if isinstance(values, list):
            modality.intake.check_count(len(values), self.engine.limits().get(modality.name))
        if not isinstance(value, list):
            check_kind(value, modality.item, where)
            return
        for index, one in enumerate(value):
            check_kind(one, modality.item, f"{where}[{index}]")

    async def _check_places(
        self, prompt: Any, data: Mapping[str, Any], media: Iterable[str]
    ) -> None:
        """Refuse media for which a prompt has no place, as far as that is known before they are
        loaded."""
        if prompt is None or self.plan.spec.prompt is not None:
            return
        counters = {name: standing for name in media if (standing := self.plan.standing(name))}
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        ids = await self.engine.ids({key: prompt}) if counters else []
        for name, standing in counters.items():
            items, places = len(data[name]), standing(ids)
            if places < items:
                where, remedy = self.plan.modalities[name].where, "Write one placeholder per item."
                expected = f"{items} placeholder(s) in the prompt for {items} item(s)"
                raise InputError(where, expected, str(places), remedy)

    def check_pixels(self, media: Iterable[tuple[str, Media]]) -> None:
        """Refuse images and videos, with their paths, that are too large, before they are
        decoded."""
        left = self.limits.pixels
        for where, one in media:
            left -= one.pixels(self.engine.frames)
            if left < 0:
                raise self.limits.too_large(where, "pixels", "pixels in one request")


# -- answers ---------------------------------------------------------------------------------------


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """Token counts."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=protocol.PromptTokensDetails(cached_tokens=cached),
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


async def produced(output: Any, ids: Sequence[int]) -> protocol.Produced:
    """The output that ids are; decoded in a thread, since that may take its time.

    Raises:
        InputError: ids that are no output.
        SpecError: the function of the spec fails.
    """
    array = await asyncio.to_thread(output.decode, ids)
    return protocol.Produced(name=output.name, tensor=encoded(array, "output"))
