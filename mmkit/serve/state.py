"""The state that the routes of one server share, and what it makes of a message: vLLM's prompt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

from msgspec import Raw

from ..errors import InputError
from ..plan.output import BoundOutput
from ..vllm_api.chat import modalities
from ..vllm_api.incoming import REQUEST, Incoming, Places
from . import protocol
from .decoding import decode_fields, quote
from .engine import Engine
from .errors import SESSIONS, TooBusy
from .protocol import Choice, Limits, OutputInfo, PromptTokensDetails, Usage
from .wire import Decoder, describe_modality, encode_value, list_embeds_fields


class ServerState:
    """The model, the limits and the open sessions of one server.

    Attributes:
        engine: vLLM.
        limits: what one client may ask.
        models: the names under which the model is served.
        origins: of the pages that may open websockets; ``*`` for any.
        message_modalities: the modalities that have a content part of their own in messages.
        is_stopping: whether the server has the order to stop, and takes no more requests.
        stopping: is set soon afterwards, for those who wait for it.
    """

    def __init__(
        self, engine: Engine, limits: Limits, models: list[str], origins: Iterable[str] = "*"
    ) -> None:
        self.engine, self.limits, self.models = engine, limits, models
        self.plan, self.origins = engine.plan, frozenset(origins)
        self.message_modalities = modalities(engine.plan.spec)
        self._places = asyncio.Semaphore(limits.sessions)
        self.is_stopping, self.stopping = False, asyncio.Event()
        self._loop = asyncio.get_running_loop()

    # -- the server --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more requests. Can be called again, and from any thread."""
        self.is_stopping = True  # at once: the next step of vLLM's may break a request
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stopping.set)

    @cached_property
    def description(self) -> protocol.Modalities:
        """The modalities, outputs and limits of the model; made once, on vLLM's thread for items,
        because it processes the largest ones."""
        allowed, plan = self.engine.most_items, self.plan
        return protocol.Modalities(
            model=self.models[0],
            spec=plan.spec.name,
            vocab_size=plan.vocab_size,
            max_model_len=self.engine.max_model_len,
            text=self.engine.has_tokenizer,
            modalities=[
                describe_modality(of, allowed.get(name)) for name, of in plan.modalities.items()
            ],
            outputs=[
                OutputInfo(name=of.name, tokens=of.num_tokens, shape=[*of.shape], dtype=of.dtype)
                for of in plan.outputs.values()
            ],
            limits=self.limits,
        )

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[None]:
        """A context in which one more session is open.

        Raises:
            TooBusy: there are as many as may be.
        """
        if self._places.locked():
            expected = f"at most {self.limits.sessions} open at once"
            raise TooBusy("session", expected, "one more", "Try again later.")
        async with self._places:
            with SESSIONS.track_inprogress():
                yield

    # -- requests ----------------------------------------------------------------------------------

    def resolve_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for.

        Raises:
            InputError: another one.
        """
        if asked is not None and asked not in self.models:
            raise InputError("model", f"one of {', '.join(self.models)}", quote(asked))
        return asked or self.models[0]

    def find_output(self, asked: protocol.Generating) -> Any:
        """The output that a request asks for; None without one.

        Raises:
            InputError: an unknown output.
        """
        known = self.plan.outputs
        if asked.output is not None and asked.output not in known:
            expected = f"one of {', '.join(known)}" if known else "none, as the spec declares none"
            raise InputError("output", expected, quote(asked.output))
        return known.get(asked.output or "")

    def make_incoming(
        self, field: str = "", places: Sequence[Places] = (), *, begins_twice: bool = False
    ) -> Incoming:
        """What vLLM's functions are to know of a new request; see `Incoming`."""

        def refuse_pixels() -> InputError:
            return self.limits.make_error(field or "body", "pixels", "pixels in one request")

        return Incoming(self.limits.pixels, refuse_pixels, field, places, begins_twice)

    async def make_prompt(self, asked: protocol.Prompted, settings: Any = None) -> dict[str, Any]:
        """vLLM's prompt of a request or session message; without one, the placeholders of its
        items.

        Args:
            asked: the message.
            settings: the message that has `mm_processor_kwargs` and `cache_salt`; `asked` by
                default.

        Raises:
            InputError: items, ids or names that the model does not take.
        """
        settings = settings or asked
        if settings.mm_processor_kwargs and not self.engine.trust_kwargs:
            remedy = "They can make a request costly: --trust-request-mm-kwargs allows them."
            raise InputError("mm_processor_kwargs", "none", "some", remedy)
        data, uuids = await asyncio.to_thread(self._items, asked)
        written: Any = asked.prompt
        if isinstance(written, str) and not self.engine.has_tokenizer:
            raise InputError("prompt", "token ids, since the server has no tokenizer", "a text")
        if isinstance(written, list):
            self.plan.check_ids(written)
        # each message of a session has a budget of its own
        token = REQUEST.set(self.make_incoming())
        try:
            for name, value in data.items():
                data[name] = await self.engine.load_media(value, f"items.{name}")
        finally:
            REQUEST.reset(token)
        if written is None:
            written = await self.engine.run_on_item_thread(self.plan.spell, data)
        prompt = {
            "multi_modal_data": data,
            "multi_modal_uuids": uuids,
            "mm_processor_kwargs": settings.mm_processor_kwargs,
            "cache_salt": settings.cache_salt,
        }
        key = "prompt" if isinstance(written, str) else "prompt_token_ids"
        return {key: written, **{name: value for name, value in prompt.items() if value}}

    def _items(self, asked: protocol.Prompted) -> tuple[dict[str, Any], dict[str, Any]]:
        """The items and the uuids of a message, names first, then counts; media are still to be
        loaded."""
        sent = decode_fields(asked.items, dict.fromkeys(self.plan.modalities, Raw), "items")
        uuids = decode_fields(asked.uuids, dict.fromkeys(sent, list[str | None] | None), "uuids")
        decoder, data = Decoder(self.limits), {}
        for name, raw in sent.items():
            modality = self.plan.modalities[name]
            value = decoder.decode_items(
                raw, f"items.{name}", modality.item, list_embeds_fields(modality)
            )
            values = next(iter(value.values())) if isinstance(value, dict) else value
            if isinstance(values, list):
                modality.parser.check_count(len(values), self.engine.most_items.get(name))
            data[name] = value
        return data, {name: names for name, names in uuids.items() if names is not None}


# -- answers ---------------------------------------------------------------------------------------


class Answer:
    """vLLM's answer to a request, as it grows.

    Attributes:
        ids: what was generated, by the number of the choice.

    Args:
        output: of the spec, that is asked for; None without one.
    """

    def __init__(self, output: BoundOutput | None = None) -> None:
        self.ids = defaultdict[int, list[int]](list)
        self._output = output

    async def make_choice(self, part: Any) -> Choice:
        """What is new in one of the answers of one of vLLM's outputs.

        Raises:
            InputError: ids that are not the output that is asked for.
            SpecError: a function of the spec that decodes it fails.
        """
        self.ids[part.index] += part.token_ids
        produced = None
        if self._output is not None and part.finish_reason in ("stop", "length"):
            # in a thread, since that may take its time
            array = await asyncio.to_thread(self._output.decode, self.ids[part.index])
            produced = protocol.Produced(
                name=self._output.name, tensor=encode_value(array, "output")
            )
        logprobs = [{token: of.logprob for token, of in at.items()} for at in part.logprobs or ()]
        return Choice(
            index=part.index,
            token_ids=list(part.token_ids),
            text=part.text or None,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            logprobs=logprobs or None,
            produced=produced,
        )

    def make_usage(self, last: Any) -> Usage:
        """Token counts, after the last of vLLM's outputs."""
        prompt, generated = len(last.prompt_token_ids), sum(map(len, self.ids.values()))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=last.num_cached_tokens or 0),
        )
