"""The calls of vLLM that the routes make."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import msgspec
from msgspec import Raw
from pydantic import ValidationError
from typing_extensions import override
from vllm.engine.protocol import StreamingInput
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.utils.mistral import is_mistral_tokenizer

from ..bound.output import BoundOutput
from ..errors import InputError
from ..model import sampling_params
from ..outputs import EXTRA_ARG
from ..plan import Plan
from ..vllm_api.admission import VLLMValidationError
from ..vllm_api.chat import SENT
from ..vllm_api.compat import find
from ..vllm_api.processor import CommonProcessor
from .chat import Sent
from .errors import Lost
from .protocol import Limits, decoded, named
from .window import History
from .wire import FRAMES, Media

parse_model_prompt = find("renderers.inputs.preprocess:parse_model_prompt")
_MODULES = ("multimodal.media.connector", "multimodal.media")
MediaConnector: Any = find(*(f"{module}:MediaConnector" for module in _MODULES))
REGISTRY: Any = find(*(f"{module}:MEDIA_CONNECTOR_REGISTRY" for module in _MODULES))

T = TypeVar("T")

COPY = "X-data-parallel-rank"
"""The header by which a request names the copy of the model that has its prefix, as at vLLM's own
routes."""

TRIES = 3
"""The most times that a request is sent whose items the engine's cache lacks although vLLM's front
end assumed them."""

_PARAMS = "sampling_params"
_OURS = (
    *("detokenize", "extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length"),
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "skip_clone"),
)
"""Fields of `SamplingParams` that the routes set, or whose answer they do not give."""

_TAKEN = [name for name in SamplingParams.__struct_fields__ if name not in _OURS and name[0] != "_"]
_OF_IDS = ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids")
_BOUNDS = {"seed": 2**63, "top_k": 2**31, "min_tokens": 2**31, "max_tokens": 2**31}
"""What the engine has room for; vLLM's own routes check it, `SamplingParams` does not."""

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class Connector(MediaConnector):
    """vLLM's loader, which follows every http(s) URL unless its flags name hosts. This one follows
    none then, and no redirect, which may lead anywhere."""

    def check(self, url: str, where: str) -> None:
        """Refuse a URL that the server's flags do not allow.

        Raises:
            InputError: it is one.
        """
        schemes = ["data:"]
        if self.allowed_media_domains:
            schemes += ["http:", "https:"]
        if self.allowed_local_media_path:
            schemes += ["file:"]
        if not url[:6].lower().startswith(tuple(schemes)):
            expected = f"a URL that starts with {' or '.join(schemes)}"
            remedy = "Send a data URL, or start the server with --allowed-media-domains."
            raise InputError(where, expected, url[:40], remedy)

    @override
    def load_from_url(self, url: str, *args: Any, **kwargs: Any) -> Any:
        self.check(url, "url")
        return super().load_from_url(url, *args, **kwargs)

    @override
    async def load_from_url_async(self, url: str, *args: Any, **kwargs: Any) -> Any:
        self.check(url, "url")
        return await super().load_from_url_async(url, *args, **kwargs)

    @classmethod
    def install(cls) -> None:
        """Make vLLM's own routes load media by this loader. Can be called again."""
        REGISTRY.register("http")(cls)
        os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")


class Engine:
    """vLLM's engine client, serving a model of ours.

    Attributes:
        plan: the spec, bound to the model.
        max_model_len: positions of a sequence.
        has_tokenizer: whether prompts may be texts.
        trust_kwargs: whether requests may bring `mm_processor_kwargs`.

    Args:
        client: vLLM's.
        processor: that of the model.
        chat: vLLM's settings of its chat route, with the chat template.
        trust_kwargs: see above.
    """

    def __init__(
        self, client: Any, processor: CommonProcessor, chat: Any, *, trust_kwargs: bool
    ) -> None:
        self._client, self._processor, self._chat = client, processor, chat
        self.trust_kwargs = trust_kwargs
        self._renderer = client.renderer
        config = client.model_config
        self.plan: Plan = processor.plan
        self.max_model_len: int = config.max_model_len
        self._vocab_size: int = config.get_vocab_size()
        self.has_tokenizer = client.renderer.tokenizer is not None
        self._generates: bool = config.runner_type == "generate"
        self._defaults: dict[str, Any] = config.get_diff_sampling_param()
        multimodal = config.multimodal_config
        self._media = Connector(
            media_io_kwargs=multimodal.media_io_kwargs,
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )

    @property
    def dead(self) -> bool:
        """Whether the engine has failed, or was shut down."""
        return bool(self._client.errored)

    @property
    def spare_sessions(self) -> int:
        """Sessions that leave each copy of the model half of its sequences and of its KV cache."""
        config, copies = self._client.vllm_config, self._copies
        # vLLM adds up the blocks of all copies
        blocks = (config.cache_config.num_gpu_blocks or 0) // copies
        tokens = blocks * (config.cache_config.block_size or 1)
        most: int = config.scheduler_config.max_num_seqs // 2
        each = max(1, min(most, tokens // (2 * self.max_model_len)) if tokens else most)
        return each * copies

    @property
    def _copies(self) -> int:
        """Copies of the model over which vLLM spreads the requests of this address."""
        config = self._client.vllm_config.parallel_config
        local: int = config.data_parallel_size_local
        copies: int = config.data_parallel_size
        return local if config.local_engines_only else copies

    @property
    def encodes_only(self) -> bool:
        """Whether the language model is another server's, to which vLLM hands encoded items."""
        transfer = getattr(self._client.vllm_config, "ec_transfer_config", None)
        return transfer is not None and transfer.is_ec_producer and not transfer.is_ec_consumer

    def copy_of(self, place: int) -> int | None:
        """The copy of the model that computes a session, whose KV cache stays there; None if there
        is but one.

        Sessions are spread over the copies by their places, so that each has its share of them.
        """
        return place % self._copies if self._copies > 1 else None

    def copy_asked(self, asked: str | None) -> int | None:
        """The copy of the model that a request asks for; None for any.

        Raises:
            InputError: one that there is not.
        """
        if asked is not None and asked not in map(str, range(self._copies)):
            raise InputError(COPY, f"a copy from 0 to {self._copies - 1}", repr(asked[:20]))
        return None if asked is None else int(asked)

    @property
    def api_servers(self) -> tuple[int, int]:
        """The number of this API server, and of all that share its address."""
        config = self._client.vllm_config.parallel_config
        count = getattr(config, "_api_process_count", 1)
        return max(0, getattr(config, "_api_process_rank", 0)), max(1, count)

    def limits(self) -> Mapping[str, int]:
        """The most items of each modality in one request."""
        allowed: Mapping[str, int] = self._processor.info.allowed_mm_limits
        return allowed

    # -- requests ----------------------------------------------------------------------------------

    def sampling(
        self,
        sent: Mapping[str, Raw],
        limits: Limits,
        *,
        output: BoundOutput | None = None,
        stream: bool,
    ) -> Any:
        """vLLM's sampling parameters of a request.

        Args:
            sent: what `chosen` gives.
            limits: of which `constraint` holds for `structured_outputs`.
            output: of the spec, that is asked for.
            stream: whether the answer comes as it grows.

        Raises:
            InputError: what vLLM refuses, what contradicts the output, or an id that the model
                lacks.
            TooLarge: a constraint that is beyond the limit.
        """
        if not self._generates:
            remedy = "Ask /v1/mm/pooling."
            raise InputError("model", "one that generates", "a pooling model", remedy)
        plain = {name: raw for name, raw in sent.items() if name != "structured_outputs"}
        parse = partial(decoded, SamplingParams, msgspec.json.encode(plain), _PARAMS)
        params = _made(parse, {}, _PARAMS)
        options = {name: getattr(params, name) for name in plain}
        for name in _OF_IDS:
            for token in options.get(name) or ():
                if not 0 <= token < self._vocab_size:
                    expected = f"ids from 0 to {self._vocab_size - 1}"
                    raise InputError(f"{_PARAMS}.{name}", expected, str(token))
        for name, bound in _BOUNDS.items():
            if not -bound <= (options.get(name) or 0) < bound:
                expected = f"a number from {-bound} to {bound - 1}"
                raise InputError(f"{_PARAMS}.{name}", expected, "one beyond it")
        if options.get("stop") and not self.has_tokenizer:
            expected = "stop_token_ids, since the server has no tokenizer"
            raise InputError(f"{_PARAMS}.stop", expected, "texts")
        asked = {
            "max_tokens": None,
            **self._defaults,
            **options,
            "structured_outputs": self._constraint(sent.get("structured_outputs"), limits),
            "detokenize": self.has_tokenizer,
            "output_kind": RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        }
        if output is None:
            return _made(SamplingParams, asked, _PARAMS)
        asked["max_tokens"] = options.get("max_tokens")
        return _made(partial(sampling_params, output, self._client), asked, _PARAMS)

    def _constraint(self, raw: Raw | None, limits: Limits) -> Any:
        """vLLM's parameters of what the text must be, None for any text."""
        where = f"{_PARAMS}.structured_outputs"
        if raw is None or bytes(memoryview(raw)[:4]) == b"null":
            return None
        if not self.has_tokenizer:
            raise InputError(where, "none, since the server has no tokenizer", "a constraint")
        if len(memoryview(raw)) > limits.constraint:
            raise limits.too_large(where, "constraint", "bytes")
        kinds = named(raw, _CONSTRAINTS, where, Any)
        kinds = {name: value for name, value in kinds.items() if value is not None}
        if len(kinds) != 1:
            expected = f"exactly one of {', '.join(_CONSTRAINTS)}"
            raise InputError(where, expected, " and ".join(kinds) or "none")
        return _made(StructuredOutputsParams, kinds, where)

    async def loaded(self, value: Any, where: str) -> Any:
        """The value of one item, or of a modality's items, with media parts loaded by vLLM.

        Raises:
            InputError: a URL that vLLM's settings do not allow, or content that is none.
        """
        if isinstance(value, list):
            return [await self.loaded(part, f"{where}[{i}]") for i, part in enumerate(value)]
        if isinstance(value, dict):
            return {
                name: await self.loaded(part, f"{where}.{name}") for name, part in value.items()
            }
        if not isinstance(value, Media):
            return value
        self._media.check(value.url, where)
        fetch = getattr(self._media, f"fetch_{value.kind}_async")
        try:
            return await fetch(value.url)
        except Exception as error:
            text = re.sub(r" <\S+ object at 0x[0-9a-f]+>", "", f"{type(error).__name__}: {error}")
            got = text[:200].rstrip(".")
            raise InputError(where, f"a URL with an item of kind {value.kind}", got) from None

    @property
    def frames(self) -> int:
        """The number of frames that vLLM takes of a video; negative for all."""
        options = self._media.media_io_kwargs.get("video", {})
        frames: int = options.get("num_frames", FRAMES)
        return frames

    async def ids(self, prompt: str | list[int]) -> list[int] | None:
        """The token ids of a prompt, as vLLM makes them before it looks at items; None if this vLLM
        does not tell."""
        if isinstance(prompt, list):
            return prompt
        if not hasattr(self._renderer, "tokenize_prompt_async"):
            return None
        # what is not empty stands for items: with them, the processor checks the placeholders
        with_items = {"prompt": prompt, "multi_modal_data": {"": ()}}
        parsed = parse_model_prompt(self._client.model_config, with_items)
        params = self._renderer.default_cmpl_tok_params
        tokenized = await self._renderer.tokenize_prompt_async(parsed, params)
        ids: list[int] = tokenized["prompt_token_ids"]
        return ids

    async def beside(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function on vLLM's own thread for items, where a spec's functions may
        run."""
        executor = getattr(self._renderer, "_mm_executor", None)
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    async def chat(
        self,
        messages: list[Any],
        options: Mapping[str, Any],
        sent: Sent,
        last: Sequence[int] = (),
    ) -> dict[str, Any]:
        """vLLM's prompt of messages, as its chat makes it: by the server's chat template.

        Args:
            messages: objects with a `role`.
            options: fields of vLLM's chat request that tell the template more.
            sent: the items of the messages.
            last: the last id of what the messages come after, if there is anything. The prompt is
                then what they add to it, and what ends the answer before them.

        Raises:
            InputError: messages that vLLM refuses.
            ValueError: the template does.
        """
        chat, tokenizer = self._chat, self._renderer.tokenizer
        request = _made(ChatCompletionRequest, {"messages": [], **options}, "messages")
        kwargs = request.chat_template_kwargs
        if chat.validate_chat_template(None, kwargs, chat.trust_request_chat_template) is not None:
            where, remedy = "chat_template_kwargs", "--trust-request-chat-template allows one."
            raise InputError(where, "no chat template", "one", remedy)
        to_ids = self._client.model_config.enable_prompt_embeds or is_mistral_tokenizer(tokenizer)
        params = request.build_chat_params(
            chat.chat_template, chat.chat_template_content_format
        ).with_defaults(
            {**chat.default_chat_template_kwargs, "tokenize": to_ids},
            default_media_io_kwargs=self._media.media_io_kwargs,
        )
        mark = uuid4().hex
        if last:
            before = [{"role": role, "content": mark} for role in ("user", "assistant")]
            messages = [*before, *messages]
        token = SENT.set(sent)
        try:
            _, prompt = await self._renderer.render_messages_async(messages, params)
        except (AttributeError, KeyError, TypeError, ValidationError) as error:
            got = f"{type(error).__name__}: {error}".partition(" [type=")[0].rstrip(".")
            raise InputError("messages", "messages that vLLM's chat takes", got) from None
        finally:
            SENT.reset(token)
        if last:
            prompt["prompt"] = self._after(prompt.get("prompt"), mark, last)
        return dict(prompt)

    def _after(self, text: Any, mark: str, last: Sequence[int]) -> str:
        """The text after an answer, without the end of it that stands there already."""
        parts = text.rsplit(mark, 1) if isinstance(text, str) else []
        if len(parts) != 2:
            expected = "a chat template that gives a text with the answers before"
            raise InputError("messages", expected, "another one", "Send a prompt.")
        tokenizer = self._renderer.tokenizer
        ended = last[0] in tokenizer.all_special_ids
        return parts[1].removeprefix(tokenizer.decode(list(last)) if ended else "")

    async def render(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt and its items as the engine takes them. The caller sends the result, or says
        `forget`.

        Args:
            prompt: vLLM's text or tokens prompt, and `tokenization_kwargs` of its own.

        Raises:
            ValueError: the request is refused.
        """
        prompt = dict(prompt)
        options = prompt.pop("tokenization_kwargs", {})
        params = self._renderer.default_cmpl_tok_params.with_kwargs(**options)
        parsed = parse_model_prompt(self._client.model_config, prompt)
        work = asyncio.ensure_future(self._renderer.render_cmpl_async([parsed], params))
        try:
            (rendered,) = await asyncio.shield(work)
        except asyncio.CancelledError:
            # the items would stay in the cache, and never reach the engine
            work.add_done_callback(self._dropped)
            raise
        return rendered  # type: ignore[no-any-return]

    def _dropped(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled() and work.exception() is None:
            self.forget(work.result()[0])

    def forget(self, rendered: Mapping[str, Any]) -> None:
        """Make vLLM send the items of a request again next time: the engine has not seen them."""
        cache = self._renderer.mm_processor_cache
        if cache is not None:
            for hashes in rendered.get("mm_hashes", {}).values():
                for item_hash in hashes:
                    cache.invalidate(item_hash)

    async def render_left(
        self, history: History, cut: int, rendered: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One prompt of the rest of a session whose window slides and of a new part after it.

        Its items are rendered again as they came: the engine may have let go of them.

        Args:
            history: of the session.
            cut: where the window begins.
            rendered: the new part.

        Raises:
            ValueError: an item is refused that was sent as null, since vLLM has let go of it, too.
        """
        parts = {history.end: rendered}
        try:
            for turn in history.turns:
                if any(history.position(place.start, cut) is not None for place in turn.places):
                    parts[turn.start] = await self.render(turn.prompt)
        except BaseException:
            for start in parts.keys() - {history.end}:
                self.forget(parts[start])
            raise
        left: list[_Item] = []
        new: dict[str, Any] = {}
        for start in sorted(parts):
            for item in _items(parts[start]):
                at = history.position(start + item.place.offset, cut)
                if item.data is not None:
                    new[item.hash] = item.data
                if at is not None:
                    left.append(item._replace(place=replace(item.place, offset=at)))
        sent = {item.hash for item in left}
        self.forget({"mm_hashes": {"": new.keys() - sent}})
        # where an item comes twice, vLLM gave its data only to the one that it rendered first
        left = [item._replace(data=new.get(item.hash, item.data)) for item in left]
        return _joined([*history.ids(cut), *rendered["prompt_token_ids"]], left, parts.values())

    async def generate(
        self, prompt: Mapping[str, Any], sampling: Any, request_id: str, copy: int | None = None
    ) -> AsyncIterator[tuple[Mapping[str, Any], Any]]:
        """The rendered prompt with each of vLLM's outputs for a request; `copy` is the copy of the
        model that computes it.

        Raises:
            ValueError: the request is refused.
            EngineDeadError, EngineGenerateError: vLLM failed.
        """
        constrained = sampling.structured_outputs is not None
        where = f"{_PARAMS}.structured_outputs"
        unfollowed = InputError(where, "a constraint that the model's tokens can follow", "another")
        for attempt in range(TRIES):
            rendered, begun = await self.render(prompt), False
            self._check_room(rendered, sampling)
            outputs = self._client.generate(
                rendered, sampling, f"{request_id}-{attempt}", data_parallel_rank=copy
            )
            try:
                async for output in outputs:
                    if not begun and is_lost(output):
                        break
                    begun = True
                    if constrained and any(p.finish_reason == "error" for p in output.outputs):
                        raise unfollowed
                    yield rendered, output
                else:
                    return
            except (ValueError, VLLMValidationError) as error:
                told = getattr(error, "where", None) or getattr(error, "parameter", None)
                if told or not constrained:
                    raise
                expected, got = "a constraint that vLLM takes", str(error).rstrip(".")
                raise InputError(where, expected, got) from None
            finally:
                if not begun:
                    self.forget(rendered)
                await outputs.aclose()
        raise unfollowed if constrained else Lost

    def _check_room(self, rendered: Mapping[str, Any], sampling: Any) -> None:
        """Refuse a prompt behind which an output would be cut off by the end of the context."""
        if EXTRA_ARG not in (sampling.extra_args or {}):
            return
        length, most = len(rendered["prompt_token_ids"]), self.max_model_len - sampling.max_tokens
        if length > most:
            self.forget(rendered)
            expected = f"at most {most} tokens before the {sampling.max_tokens} of the output"
            raise InputError("prompt", expected, str(length))

    async def pooling(self, task: str | None) -> Any:
        """vLLM's parameters of a pooling request.

        Raises:
            InputError: a task that the model does not have.
        """
        if self._generates:
            remedy = "Ask /v1/mm/generate."
            raise InputError("model", "a pooling model", "one that generates", remedy)
        known = await self._client.get_supported_tasks()
        task = task or self._client.model_config.get_pooling_task(known)
        if task not in known:
            raise InputError("task", f"one of {', '.join(known)}", repr(task))
        return PoolingParams(task=task)

    async def pool(self, prompt: Mapping[str, Any], params: Any, request_id: str) -> Any:
        """vLLM's output for a pooling request.

        Raises:
            ValueError: the request is refused.
            EngineDeadError, EngineGenerateError: vLLM failed.
        """
        rendered, outputs = await self.render(prompt), []
        try:
            outputs = [o async for o in self._client.encode(rendered, params, request_id)]
        finally:
            if not outputs:
                self.forget(rendered)
        return outputs[-1]

    def chunks(
        self,
        sampling: Any,
        request_id: str,
        feed: AsyncGenerator[Any, None],
        copy: int | None = None,
    ) -> AsyncGenerator[Any, None]:
        """vLLM's outputs for a request whose prompt comes in parts, as `part` makes them; `copy` is
        the copy of the model that computes it."""
        outputs: AsyncGenerator[Any, None] = self._client.generate(
            feed, sampling, request_id, data_parallel_rank=copy
        )
        return outputs


def chosen(sent: Raw) -> dict[str, Raw]:
    """The sampling parameters of a message, by name, still in JSON.

    Raises:
        InputError: no object, or a field that `SamplingParams` lacks or that is not the client's.
    """
    return named(sent, _TAKEN, _PARAMS)


def _made(kind: Callable[..., T], options: Mapping[str, Any], where: str) -> T:
    """Some of vLLM's parameters."""
    try:
        return kind(**options)
    except InputError:
        raise
    except Exception as error:  # vLLM's own kinds differ from version to version
        where = f"{where}.{getattr(error, 'parameter', None) or ''}".rstrip(".")
        got = str(error.args[0] if error.args else error).rstrip(".")
        raise InputError(where, "parameters that vLLM takes", got) from None


def part(rendered: Mapping[str, Any], sampling: Any) -> Any:
    """One part of the prompt of a resumable request."""
    return StreamingInput(prompt=rendered, sampling_params=sampling)


def tokens(ids: list[int]) -> dict[str, Any]:
    """Token ids as vLLM's renderer makes them."""
    return {"type": "token", "prompt_token_ids": ids}


def after(last: Sequence[int], rendered: Mapping[str, Any]) -> dict[str, Any]:
    """A rendered part with ids before it."""
    shifted = {
        name: [replace(place, offset=place.offset + len(last)) for place in places]
        for name, places in rendered.get("mm_placeholders", {}).items()
    }
    moved = {"mm_placeholders": shifted} if shifted else {}
    return {**rendered, **moved, "prompt_token_ids": [*last, *rendered["prompt_token_ids"]]}


class _Item(NamedTuple):
    """One processed item of a rendered prompt; its data is None where the engine has it."""

    name: str
    place: Any
    hash: str
    data: Any


def _items(rendered: Mapping[str, Any]) -> list[_Item]:
    """The items of a rendered prompt."""
    return [
        _Item(name, *parts)
        for name, places in rendered.get("mm_placeholders", {}).items()
        for parts in zip(
            places, rendered["mm_hashes"][name], rendered["mm_kwargs"][name], strict=True
        )
    ]


def _joined(
    ids: list[int], items: list[_Item], parts: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Ids and items as one rendered prompt; `parts` are those that they came from."""
    if not items:
        return tokens(ids)
    like = next(part for part in parts if part.get("mm_placeholders"))
    of: dict[str, list[_Item]] = {}
    for item in items:
        of.setdefault(item.name, []).append(item)
    whole = {
        **like,
        "prompt_token_ids": ids,
        "mm_kwargs": type(like["mm_kwargs"])({name: [i.data for i in of[name]] for name in of}),
        "mm_hashes": {name: [i.hash for i in of[name]] for name in of},
        "mm_placeholders": {name: [i.place for i in of[name]] for name in of},
    }
    whole.pop("prompt", None)  # the text of one part
    return whole


def is_lost(output: Any) -> bool:
    """Whether the engine gave a request up for an item that its cache lacks."""
    first = output.outputs[0] if output.outputs else None
    return first is not None and first.finish_reason == "error" and not first.token_ids
