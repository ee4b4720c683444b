"""The calls of vLLM that the routes make."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
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
from ..vllm_api.incoming import TooManyPixels, inherit_context
from ..vllm_api.processor import CommonProcessor
from .decoding import decode_fields, starts_with
from .protocol import NULL, Limits, TooLarge
from .wire import Media

__all__ = ["Engine", "EngineDeadError", "EngineGenerateError", "LostItem"]

parse_model_prompt = find("renderers.inputs.preprocess:parse_model_prompt")
MediaConnector: Any = find("multimodal.media:MediaConnector")

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""The most times that a request is sent whose items the engine's cache lacks although vLLM's front
end assumed them."""

NO_MEDIA_HOST = "none, unless --allowed-media-domains names them"
"""Stands among the hosts from which vLLM loads media, where its flag names none: vLLM would follow
every URL."""

_PARAMS, _CONSTRAINT = "sampling_params", "structured_outputs"
_OURS = (
    *("detokenize", "extra_args", "flat_logprobs", "output_kind", "output_text_buffer_length"),
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "skip_clone"),
)
"""Fields of `SamplingParams` that the routes set, or whose answer they do not give."""
SAMPLING_NAMES = tuple(of.name for of in structs.fields(SamplingParams))
"""What vLLM's own routes take beside a prompt, among other fields."""
_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")

_INT32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_INT64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def _kinds(known: Mapping[str, Any], **narrower: Any) -> dict[str, Any]:
    """The fields of one of vLLM's parameters that a request may have, and their types: vLLM's, or
    narrower ones, within what the engine has room for."""
    own = {name: narrower.get(name, kind) for name, kind in known.items() if name[0] != "_"}
    return {name: kind for name, kind in own.items() if name not in _OURS}


_KINDS = _kinds(get_type_hints(StructuredOutputsParams))


class Stopped(EngineDeadError):
    """The server has the order to stop: it answers what is under way, if it has the time for it,
    and nothing else."""

    def __str__(self) -> str:
        return "The server stops. Send the request to another one."


class LostItem(Exception):
    """The engine does not have an item that vLLM believed to be cached there. Rendering again sends
    it."""


class Engine:
    """vLLM's engine client, serving a model of ours.

    Attributes:
        plan: the spec, bound to the model.
        max_model_len: positions of a sequence.
        has_tokenizer: whether prompts may be texts.
        trust_kwargs: whether requests may bring `mm_processor_kwargs`.
        most_items: the most items of each modality in one request.

    Args:
        client: vLLM's.
        processor: that of the model.
        trust_kwargs: see above.
    """

    def __init__(self, client: Any, processor: CommonProcessor, *, trust_kwargs: bool) -> None:
        self._client, self._renderer, self.trust_kwargs = client, client.renderer, trust_kwargs
        self.plan: Plan = processor.plan
        self.most_items: Mapping[str, int] = processor.info.allowed_mm_limits
        config = client.model_config
        self.max_model_len: int = config.max_model_len
        self.has_tokenizer = client.renderer.tokenizer is not None
        self._defaults: dict[str, Any] = config.get_diff_sampling_param()
        token = Annotated[int, Meta(ge=0, lt=config.get_vocab_size())]
        self._sampling = _kinds(
            {of.name: of.type for of in structs.fields(SamplingParams)},
            seed=_INT64 | None,
            top_k=_INT32,
            min_tokens=_INT32,
            max_tokens=_INT32 | None,
            **dict.fromkeys(_ID_LISTS, list[token] | None),
            logit_bias=dict[token, float] | None,
            structured_outputs=Raw,
        )
        config.allowed_media_domains = config.allowed_media_domains or [NO_MEDIA_HOST]
        self._media = MediaConnector(
            media_io_kwargs=config.multimodal_config.media_io_kwargs,
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )
        self._turns = count()
        executor = getattr(client.renderer, "_executor", None)
        if executor is not None:
            inherit_context(executor)

    # -- the server --------------------------------------------------------------------------------

    def call_before_shutdown(self, begins: Callable[[], None]) -> None:
        """Call a function before vLLM lets go of what serves new requests, its first step after
        SIGTERM. What is still under way after its last step ends with an error, rather than
        unanswered when the connections are cut.

        Args:
            begins: may be called in any thread, and more than once.
        """
        shut_down, loop = self._client.shutdown, asyncio.get_running_loop()

        def stop(*args: Any, **kwargs: Any) -> None:
            begins()
            shut_down(*args, **kwargs)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end)

        self._client.shutdown = stop

    def _end(self) -> None:
        """End every request with an error, as vLLM does when its engine dies."""
        outputs = getattr(self._client, "output_processor", None)
        if outputs is not None:
            outputs.propagate_error(Stopped())

    def next_data_parallel_rank(self) -> int | None:
        """The copy of the model that computes the next session, whose prefix cache has it; None if
        there is but one at this address."""
        config = self._client.vllm_config.parallel_config
        of_all, here = config.data_parallel_size, config.data_parallel_size_local
        copies = here if config.local_engines_only else of_all
        return next(self._turns) % copies if copies > 1 else None

    async def run_on_item_thread(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function on vLLM's own thread for items, where a spec's functions may
        run."""
        executor = getattr(self._renderer, "_mm_executor", None)
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    # -- requests ----------------------------------------------------------------------------------

    def parse_sampling_params(self, sent: Raw, limits: Limits) -> dict[str, Any]:
        """The sampling parameters of a message, by name.

        Args:
            sent: their JSON.
            limits: of which `constraint` holds for `structured_outputs`.

        Raises:
            InputError: a field that vLLM lacks or that is not the client's, or another type.
            TooLarge: a constraint that is beyond the limit.
        """
        where = f"{_PARAMS}.{_CONSTRAINT}"
        options = decode_fields(sent, self._sampling, _PARAMS)
        raw = options.pop(_CONSTRAINT, NULL)
        if len(memoryview(raw)) > limits.constraint:
            raise limits.make_error(where, "constraint", "bytes")
        if starts_with(raw, b"n"):
            return options
        asked = decode_fields(raw, _KINDS, where)
        return {**options, _CONSTRAINT: _made(where, StructuredOutputsParams, **asked)}

    def make_sampling_params(
        self, options: Mapping[str, Any], *, output: BoundOutput | None = None, stream: bool
    ) -> Any:
        """vLLM's sampling parameters of a request.

        Args:
            options: what `parse_sampling_params` gives.
            output: of the spec, that is asked for.
            stream: whether the answer comes as it grows.

        Raises:
            InputError: what vLLM refuses, or what contradicts the output.
        """
        if options.get("stop") and not self.has_tokenizer:
            expected = "stop_token_ids, since the server has no tokenizer"
            raise InputError(f"{_PARAMS}.stop", expected, "texts")
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        ours = {"detokenize": self.has_tokenizer, "output_kind": kind}
        asked = {"max_tokens": None, **self._defaults, **options, **ours}
        if output is None:
            return _made(_PARAMS, SamplingParams, **asked)
        asked["max_tokens"] = options.get("max_tokens")
        return _made(_PARAMS, sampling_params, output, self._client, **asked)

    async def load_media(self, value: Any, where: str) -> Any:
        """The value of one item, or of a modality's items, with media parts loaded by vLLM.

        Raises:
            InputError: a URL that vLLM's settings do not allow, or content that is none.
            TooLarge: more pixels than the server decodes for one request.
        """
        if isinstance(value, list):
            return [await self._part(one, f"{where}[{i}]") for i, one in enumerate(value)]
        return await self._part(value, where)

    async def _part(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return {name: await self._part(p, f"{where}.{name}") for name, p in value.items()}
        if not isinstance(value, Media):
            return value
        fetch = getattr(self._media, f"fetch_{value.kind}_async")
        try:
            return await fetch(value.url)
        except TooManyPixels as error:
            refusal = TooLarge(where + str(error).removeprefix(error.where))
            refusal.where = where
            raise refusal from None
        except InputError as error:
            raise relocate(error, where) from None
        except Exception as error:
            text = re.sub(r" <\S+ object at 0x[0-9a-f]+>", "", f"{type(error).__name__}: {error}")
            got = text[:200].rstrip(".")
            raise InputError(where, f"a URL with an item of kind {value.kind}", got) from None

    async def tokenize(
        self, prompt: str | list[int], *, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a prompt, as vLLM makes them before it looks at items.

        Args:
            prompt: a text, or the ids.
            add_special_tokens: whether a text gets special tokens.
        """
        if isinstance(prompt, list):
            return prompt
        # what is not empty stands for items: with them, the processor checks the placeholders
        with_items = {"prompt": prompt, "multi_modal_data": {"": ()}}
        parsed = parse_model_prompt(self._client.model_config, with_items)
        options = {} if add_special_tokens else {"add_special_tokens": False}
        params = self._renderer.default_cmpl_tok_params.with_kwargs(**options)
        tokenized = await self._renderer.tokenize_prompt_async(parsed, params)
        ids: list[int] = tokenized["prompt_token_ids"]
        return ids

    async def render(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt and its items as the engine takes them. Nothing changes before it gets them.

        Args:
            prompt: vLLM's text or tokens prompt.

        Raises:
            ValueError: the request is refused.
        """
        parsed = parse_model_prompt(self._client.model_config, dict(prompt))
        params = self._renderer.default_cmpl_tok_params
        (rendered,) = await self._renderer.render_cmpl_async([parsed], params)
        return rendered  # type: ignore[no-any-return]

    def _forget_items(self) -> None:
        """Make vLLM send all items again, where the engine lacks one and does not tell which."""
        if not TELLS_MISSES and self._renderer.mm_processor_cache is not None:
            # all of them: without one alone, the halves of the cache would evict different items
            self._renderer.mm_processor_cache.clear_cache()

    # -- answers -----------------------------------------------------------------------------------

    async def generate(
        self, prompt: Mapping[str, Any], sampling: Any, name: str, copy: int | None, *, fits: bool
    ) -> AsyncGenerator[tuple[Mapping[str, Any], Any], None]:
        """The rendered prompt with each of vLLM's outputs for a request.

        Args:
            prompt: as for `render`.
            sampling: vLLM's parameters.
            name: a new one.
            copy: the copy of the model that is to compute it; None for any.
            fits: whether a prompt is refused behind which the answer would be cut off by the end of
                the context.

        Raises:
            ValueError: the request is refused.
            EngineDeadError, EngineGenerateError: vLLM failed.
        """
        where, expected = f"{_PARAMS}.{_CONSTRAINT}", "one that the model's tokens can follow"
        constrained = sampling.structured_outputs is not None
        failed = InputError(where, expected, "another") if constrained else LostItem()
        for attempt in range(MAX_ATTEMPTS):
            rendered, begun = await self.render(prompt), False
            length = len(rendered["prompt_token_ids"])
            if fits and length > (most := self.max_model_len - sampling.max_tokens):
                expected = f"at most {most} tokens before the {sampling.max_tokens} that follow"
                raise InputError("prompt", expected, str(length))
            own = f"{name}-{attempt}"
            made = self._client.generate(rendered, sampling, own, data_parallel_rank=copy)
            async with aclosing(made) as outputs:
                async for output in outputs:
                    first = output.outputs[0]
                    if not begun and first.finish_reason == "error" and not first.token_ids:
                        self._forget_items()  # the engine's cache lacks one
                        break
                    begun = True
                    reasons = {part.finish_reason for part in output.outputs}
                    if "abort" in reasons:
                        raise EngineDeadError  # by nobody but a server that stops
                    if "error" in reasons:
                        raise failed if constrained else EngineGenerateError
                    yield rendered, output
                else:
                    return
        raise failed


def _made(where: str, kind: Callable[..., T], *args: Any, **options: Any) -> T:
    """Some of vLLM's parameters."""
    try:
        return kind(*args, **options)
    except InputError:
        raise
    except Exception as error:  # vLLM's own kinds differ from version to version
        where = f"{where}.{getattr(error, 'parameter', None) or ''}".rstrip(".")
        got = str(error.args[0] if error.args else error).rstrip(".")
        raise InputError(where, "parameters that vLLM takes", got) from None
