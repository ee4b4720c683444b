"""The calls of vLLM that the routes make."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta, Raw, structs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from ..errors import InputError, relocate
from ..model.sampling import sampling_params
from ..plan.output import BoundOutput
from ..plan.plan import Plan
from ..vllm_api.compat import TELLS_MISSES, find
from ..vllm_api.errors import TooManyPixels
from ..vllm_api.processor import Processor
from ..vllm_api.server_request import inherit_context
from ..wire.decoding import SAMPLING_FIELD, decode_fields, starts_with
from ..wire.items import Media, MediaPart
from ..wire.limits import Limits, TooLarge
from .protocol import NULL

__all__ = ["Engine", "EngineDeadError", "EngineGenerateError", "LostItem"]

parse_model_prompt = find("renderers.inputs.preprocess:parse_model_prompt")
MediaConnector: Any = find("multimodal.media:MediaConnector")
get_video_processor_cls_name: Any = find(
    "transformers_utils.processor:get_video_processor_cls_name", default=None
)

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""How often a request is sent to the engine if its cache lacks an item that vLLM's front end
assumed there."""

MAX_PROBLEM_CHARS = 200
"""Characters of an error of vLLM's media loader that a refusal shows."""

NO_MEDIA_HOST = "none, unless --allowed-media-domains names them"
"""The only host from which vLLM loads media if its flag names none. With no host it would follow
every URL."""

SAMPLING_NAMES = tuple(param.name for param in structs.fields(SamplingParams))
"""Fields of `SamplingParams`, which bodies of vLLM's own routes have beside a prompt."""

_CONSTRAINT_FIELD = "structured_outputs"
_CONSTRAINT_PATH = f"{SAMPLING_FIELD}.{_CONSTRAINT_FIELD}"

_RESERVED_FIELDS = frozenset(
    {
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "skip_clone",
    }
)
"""Fields of `SamplingParams` that the routes set, or whose result they do not send."""

_INT32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_INT64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Stopped(EngineDeadError):
    """The server has the order to stop.

    It finishes current requests if it has the time for it, and takes no new ones.
    """

    def __str__(self) -> str:
        return "The server stops. Send the request to another one."


class LostItem(Exception):
    """The engine lacks an item that vLLM believed to be cached there, after several attempts."""


class _CacheMiss(Exception):
    """The engine's cache lacks an item of a request that has no token yet.

    If the request is rendered again, the item is sent.
    """


class Engine:
    """vLLM's engine client, serving a model with a spec.

    Args:
        client: vLLM's.
        processor: the processor of the model.
        trust_kwargs: whether requests may bring `mm_processor_kwargs`.
        has_render_processes: whether other processes process the items of requests.

    Attributes:
        plan: the spec, bound to the model.
        max_model_len: positions of a sequence.
        has_tokenizer: whether prompts may be texts.
        trust_kwargs: see above.
        has_render_processes: see above.
        most_items: the most items of each modality in one request.
        is_encode_only: whether the engine encodes items for other engines, and generates nothing.
    """

    def __init__(
        self,
        client: Any,
        processor: Processor,
        *,
        trust_kwargs: bool,
        has_render_processes: bool = False,
    ) -> None:
        self._client = client
        self._renderer = client.renderer
        self.trust_kwargs = trust_kwargs
        self.has_render_processes = has_render_processes
        self.plan: Plan = processor.plan
        self.most_items: Mapping[str, int] = processor.info.allowed_mm_limits
        config = client.model_config
        self.is_encode_only = _is_encode_only(client.vllm_config)
        self.max_model_len: int = config.max_model_len
        self.has_tokenizer = client.renderer.tokenizer is not None
        self._default_params: dict[str, Any] = config.get_diff_sampling_param()
        self._param_types = _list_param_types(config.get_vocab_size())
        self._media = _make_media_connector(config)
        # vLLM's chat reads a video by the loader that belongs to the model's video processor, which
        # chooses other frames than the plain one
        self._video_options: dict[str, Any] = {}
        if get_video_processor_cls_name is not None:
            self._video_options = {"video_processor": get_video_processor_cls_name(config)}
        self._session_numbers = count()
        executor = getattr(client.renderer, "_executor", None)
        if executor is not None:
            inherit_context(executor)

    # -- the server --------------------------------------------------------------------------------

    @property
    def has_died(self) -> bool:
        """Whether vLLM's engine ended although nobody stopped it."""
        return bool(self._client.errored)

    def call_before_shutdown(self, function: Callable[[], None]) -> None:
        """Call a function before vLLM releases what serves new requests.

        That is vLLM's first step after SIGTERM. Requests that run after its last step end with an
        error, rather than without an answer when their connections are cut.

        Args:
            function: may be called in any thread, and more than once.
        """
        shutdown = self._client.shutdown
        loop = asyncio.get_running_loop()

        def stop(*args: Any, **kwargs: Any) -> None:
            function()
            shutdown(*args, **kwargs)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._fail_requests)

        self._client.shutdown = stop

    def _fail_requests(self) -> None:
        """End every request with an error, as vLLM does when its engine dies."""
        output_processor = getattr(self._client, "output_processor", None)
        if output_processor is not None:
            output_processor.propagate_error(Stopped())

    def next_data_parallel_rank(self) -> int | None:
        """Return the rank that computes the next session, since its prefix cache is only there.

        Returns:
            Each rank in turn; None if there is one only at this address.
        """
        config = self._client.vllm_config.parallel_config
        num_ranks: int = config.data_parallel_size
        if config.local_engines_only:
            num_ranks = config.data_parallel_size_local
        number = next(self._session_numbers)
        if num_ranks <= 1:
            return None
        return number % num_ranks

    async def run_on_item_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on vLLM's own thread for items, where functions of a spec may run."""
        executor = getattr(self._renderer, "_mm_executor", None)
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    # -- sampling parameters -----------------------------------------------------------------------

    def parse_sampling_params(self, raw: Raw, limits: Limits) -> dict[str, Any]:
        """Return the sampling parameters of a message, by name.

        Args:
            raw: their JSON.
            limits: of which `constraint` holds for `structured_outputs`.

        Raises:
            InputError: a field that vLLM lacks, that clients may not set, or of another type.
            TooLarge: a constraint that is beyond the limit.
        """
        options = decode_fields(raw, self._param_types, SAMPLING_FIELD)
        constraint = options.pop(_CONSTRAINT_FIELD, NULL)
        if len(memoryview(constraint)) > limits.constraint:
            raise limits.make_error(_CONSTRAINT_PATH, "constraint", "bytes")
        if not starts_with(constraint, b"n"):  # null
            fields = decode_fields(constraint, _CONSTRAINT_TYPES, _CONSTRAINT_PATH)
            params = _build_params(_CONSTRAINT_PATH, StructuredOutputsParams, **fields)
            options[_CONSTRAINT_FIELD] = params
        return options

    def make_sampling_params(
        self, options: Mapping[str, Any], *, output: BoundOutput | None = None, stream: bool
    ) -> Any:
        """Return vLLM's sampling parameters of a request.

        Args:
            options: what `parse_sampling_params` returns.
            output: the output of the spec that the request asks for, if any.
            stream: whether the answer comes as it grows.

        Raises:
            InputError: vLLM refuses them, or they contradict the output.
        """
        if options.get("stop") and not self.has_tokenizer:
            expected = "stop_token_ids, since the server has no tokenizer"
            raise InputError(f"{SAMPLING_FIELD}.stop", expected, "texts")
        params: dict[str, Any] = {"max_tokens": None}
        params.update(self._default_params)
        params.update(options)
        params["detokenize"] = self.has_tokenizer
        params["output_kind"] = RequestOutputKind.FINAL_ONLY
        if stream:
            params["output_kind"] = RequestOutputKind.DELTA
        if output is None:
            return _build_params(SAMPLING_FIELD, SamplingParams, **params)
        if output.after is None:
            # the output says how many tokens it has, whatever the model's default is
            params["max_tokens"] = options.get("max_tokens")
        return _build_params(SAMPLING_FIELD, sampling_params, output, self._client, **params)

    # -- prompts and items -------------------------------------------------------------------------

    async def load_media(self, parts: Sequence[MediaPart]) -> None:
        """Put what vLLM loads in the place of media among items.

        Args:
            parts: the media, as `mmkit.wire.items.find_media` returns them.

        Raises:
            InputError: a URL that vLLM's settings do not allow, or content of another kind.
            TooLarge: more pixels than the server decodes for one request.
        """
        for part in parts:
            part.holder[part.key] = await self._fetch(part.media, part.where)

    async def _fetch(self, media: Media, where: str) -> Any:
        """Return what vLLM's loader reads at a URL."""
        fetch = getattr(self._media, f"fetch_{media.kind}_async")
        options = self._video_options if media.kind == "video" else {}
        try:
            return await fetch(media.url, **options)
        except TooManyPixels as error:
            # its sentence names the body, which has no part for this item
            refusal = TooLarge(where + str(error).removeprefix(error.where))
            refusal.where = where
            raise refusal from None
        except InputError as error:
            raise relocate(error, where) from None
        except Exception as error:
            # as PIL says it: cannot identify image file <_io.BytesIO object at 0x7f...>
            text = f"{type(error).__name__}: {error}"
            text = re.sub(r" <\S+ object at 0x[0-9a-f]+>", "", text)
            got = text[:MAX_PROBLEM_CHARS].rstrip(".")
            raise InputError(where, f"a URL with an item of kind {media.kind}", got) from None

    async def tokenize(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt, as vLLM makes them before it looks at items.

        Args:
            prompt: a text, or the ids.
            add_special_tokens: whether to add special tokens to a text.
        """
        if isinstance(prompt, list):
            return prompt
        # Data that is not empty stands for items: vLLM then leaves the length to the processor.
        with_items = {"prompt": prompt, "multi_modal_data": {"": ()}}
        parsed = parse_model_prompt(self._client.model_config, with_items)
        params = self._renderer.default_cmpl_tok_params
        if not add_special_tokens:
            params = params.with_kwargs(add_special_tokens=False)
        tokenized = await self._renderer.tokenize_prompt_async(parsed, params)
        ids: list[int] = tokenized["prompt_token_ids"]
        return ids

    async def render(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Return a prompt and its items in the form that the engine takes.

        vLLM's caches change when the result is sent to the engine, not before.

        Args:
            prompt: vLLM's text or tokens prompt.

        Raises:
            ValueError: the request is refused.
        """
        parsed = parse_model_prompt(self._client.model_config, dict(prompt))
        params = self._renderer.default_cmpl_tok_params
        (rendered,) = await self._renderer.render_cmpl_async([parsed], params)
        return rendered  # type: ignore[no-any-return]

    # -- answers -----------------------------------------------------------------------------------

    def decode_text(self, ids: list[int], before: list[int], sampling: Any) -> str:
        """Return the text of ids, as it stands in a longer text.

        Args:
            ids: the ids.
            before: the ids before them in that text.
            sampling: vLLM's parameters, which say whether special tokens have a text.
        """
        tokenizer = self._renderer.tokenizer
        skips = sampling.skip_special_tokens
        text_before: str = tokenizer.decode(before, skip_special_tokens=skips)
        text: str = tokenizer.decode([*before, *ids], skip_special_tokens=skips)
        return text[len(text_before) :]

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling: Any,
        request_id: str,
        *,
        data_parallel_rank: int | None,
        must_fit: bool,
        on_rendered: Callable[[], None] | None = None,
    ) -> AsyncGenerator[tuple[Mapping[str, Any], Any], None]:
        """Yield the rendered prompt with each of vLLM's outputs for a request.

        If the engine's cache lacks an item, the request is rendered and sent again.

        Args:
            prompt: as for `render`.
            sampling: vLLM's parameters.
            request_id: a new one.
            data_parallel_rank: of the engine that is to compute it; None for any.
            must_fit: whether to refuse a prompt after which the end of the context would cut the
                answer off.
            on_rendered: called each time that the request is rendered, before it is sent.

        Raises:
            ValueError: the request is refused.
            EngineDeadError, EngineGenerateError: vLLM failed.
            LostItem: the engine's cache lacked an item at each attempt.
        """
        for attempt in range(MAX_ATTEMPTS):
            rendered = await self.render(prompt)
            if must_fit:
                self._check_length(rendered, sampling)
            if on_rendered is not None:
                on_rendered()
            outputs = self._generate_once(
                rendered, sampling, f"{request_id}-{attempt}", data_parallel_rank
            )
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        yield rendered, output
                return
            except _CacheMiss:
                continue
        # vLLM reports a constraint that it cannot compile in the same way as a missing item
        if sampling.structured_outputs is not None:
            raise _make_constraint_error()
        raise LostItem

    async def _generate_once(
        self, rendered: Mapping[str, Any], sampling: Any, request_id: str, rank: int | None
    ) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs for a rendered request.

        Raises:
            _CacheMiss: the first output is an error without a token.
        """
        has_begun = False
        generated = self._client.generate(rendered, sampling, request_id, data_parallel_rank=rank)
        async with aclosing(generated) as outputs:
            async for output in outputs:
                first = output.outputs[0]
                if not has_begun and first.finish_reason == "error" and not first.token_ids:
                    self._forget_cached_items()
                    raise _CacheMiss
                has_begun = True
                finish_reasons = {completion.finish_reason for completion in output.outputs}
                if "abort" in finish_reasons:
                    raise EngineDeadError  # only a server that stops aborts requests
                if "error" in finish_reasons and sampling.structured_outputs is not None:
                    raise _make_constraint_error()
                if "error" in finish_reasons:
                    raise EngineGenerateError
                yield output

    def _check_length(self, rendered: Mapping[str, Any], sampling: Any) -> None:
        """Refuse a prompt after which the end of the context would cut the answer off."""
        length = len(rendered["prompt_token_ids"])
        max_length = self.max_model_len - sampling.max_tokens
        if length > max_length:
            expected = f"at most {max_length} tokens before the {sampling.max_tokens} that follow"
            raise InputError("prompt", expected, str(length))

    def _forget_cached_items(self) -> None:
        """Make vLLM send all items again, if the engine does not say which of them it lacks.

        All of them: without a single one, the two halves of the cache would evict different items.
        """
        cache = self._renderer.mm_processor_cache
        if not TELLS_MISSES and cache is not None:
            cache.clear_cache()


def _make_constraint_error() -> InputError:
    expected = "one that the model's tokens can follow"
    return InputError(_CONSTRAINT_PATH, expected, "another")


# -- vLLM's parameters -----------------------------------------------------------------------------


def _select_types(types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the fields that a request may set, by name."""
    selected = {}
    for name, kind in types.items():
        if not name.startswith("_") and name not in _RESERVED_FIELDS:
            selected[name] = kind
    return selected


_CONSTRAINT_TYPES = _select_types(get_type_hints(StructuredOutputsParams))
"""The types of the fields of a constraint."""


def _list_param_types(vocab_size: int) -> dict[str, Any]:
    """Return the types of the sampling parameters that a request may set, by name.

    They are vLLM's, or narrower ones: vLLM accepts numbers for which its engine has no room.
    """
    token = Annotated[int, Meta(ge=0, lt=vocab_size)]
    types = {param.name: param.type for param in structs.fields(SamplingParams)}
    narrower_types = {
        "seed": _INT64 | None,
        "top_k": _INT32,
        "min_tokens": _INT32,
        "max_tokens": _INT32 | None,
        "stop_token_ids": list[token] | None,
        "allowed_token_ids": list[token] | None,
        "logprob_token_ids": list[token] | None,
        "logit_bias": dict[token, float] | None,
        _CONSTRAINT_FIELD: Raw,
    }
    for name, kind in narrower_types.items():
        if name in types:  # releases differ
            types[name] = kind
    return _select_types(types)


def _build_params(where: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return vLLM's parameters.

    Args:
        where: their path in the request.
        function: makes them of the other arguments.
        args: for `function`.
        options: for `function`.

    Raises:
        InputError: vLLM refuses them.
    """
    try:
        return function(*args, **options)
    except InputError:
        raise
    except Exception as error:  # vLLM's kinds of errors differ from release to release
        parameter = getattr(error, "parameter", None)
        if parameter:
            where = f"{where}.{parameter}"
        reason = error.args[0] if error.args else error
        raise InputError(where, "parameters that vLLM takes", str(reason).rstrip(".")) from None


def _is_encode_only(vllm_config: Any) -> bool:
    """Return whether an engine only encodes items, as vLLM's role ``ec_producer`` says."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)  # a recent option of vLLM
    if transfer is None:
        return False
    return bool(transfer.is_ec_producer and not transfer.is_ec_consumer)


def _make_media_connector(config: Any) -> Any:
    """Return vLLM's loader of media with the settings of a model config.

    vLLM's own routes read the allowed hosts from the config, so a server without any gets
    `NO_MEDIA_HOST` there, too.
    """
    config.allowed_media_domains = config.allowed_media_domains or [NO_MEDIA_HOST]
    return MediaConnector(
        media_io_kwargs=config.multimodal_config.media_io_kwargs,
        allowed_local_media_path=config.allowed_local_media_path,
        allowed_media_domains=config.allowed_media_domains,
    )
