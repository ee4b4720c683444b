"""``python -m benchmarks.vllm_bench serve|mm-processor --model DIR ...``: vLLM's benchmark of that
name, with requests that are drawn from the model's spec.

The data sets of ``vllm bench`` hold texts, images, videos and audio, and `mm-processor` takes
random images or those of a hub. Here items of any modality are drawn, as for the laws
(`mmkit.testing`), from the same seed the same ones; for a class of vLLM without a spec images,
videos and audio.

vLLM has no door for other data sets: what makes its requests is replaced. `serve` sends them to
``POST /v1/mm/generate``, where items of any modality have a form; all else is vLLM's, options too.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmkit.errors import MmkitError, VllmApiError
from mmkit.serve import AsyncClient
from mmkit.testing import Request, Subject, of_registered, of_spec, vllm_path

_OUTPUT = 16
"""Tokens that are generated for a request, unless ``--output-len`` says otherwise."""

_ROUTE = "/v1/mm/generate"

_DRAWS = 8
"""Draws per request that is wanted: some come twice, or do not fit into the context."""


def requests(subject: Subject, count: int, seed: int, room: int) -> list[tuple[Request, int]]:
    """Requests of a subject, each with the length of its prompt in the engine; different ones as
    far as that many are found.

    Args:
        subject: whose requests.
        count: how many.
        seed: from the same one come the same requests.
        room: the most tokens of a prompt.

    Raises:
        MmkitError: none is found.
    """
    found: dict[str, tuple[Request, int]] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=_DRAWS * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(subject.requests())
    def draw(request: Request) -> None:
        if len(found) < count and repr(request) not in found:
            length = len(subject.run(request).ids)
            if length <= room:
                found[repr(request)] = request, length

    draw()
    if not found:
        expected = f"requests of at most {room} tokens"
        raise MmkitError(str(subject.model_dir), expected, f"none in {_DRAWS * count} draws")
    different = list(found.values())
    return [different[i % len(different)] for i in range(count)]


def drawn(args: Any, tokenizer: Any = None) -> list[Any]:
    """Drawn requests in place of vLLM's data set, for its parsed command line.

    Raises:
        MmkitError: the command line names no model folder, or no request is found.
    """
    from vllm.benchmarks.datasets import SampleRequest

    if not args.model:
        remedy = "State the folder that the server serves."
        raise MmkitError("vllm bench", "--model DIR, whose requests are drawn", "none", remedy)
    config = vllm_path.model_config(args.model)
    spec = getattr(vllm_path.registered(config), "spec", None)
    # the server may have other options, and takes requests without any
    none = st.just({})
    subject = (
        of_registered(args.model, kwargs=none)
        if spec is None
        else of_spec(spec, args.model, kwargs=none, enable_mm_embeds=False)
    )
    output = getattr(args, "output_len", None) or _OUTPUT
    known = requests(subject, args.num_prompts, args.seed or 0, config.max_model_len - output)
    return [
        SampleRequest(list(request.prompt), length, output, request.data(), request_id=str(i))
        for i, (request, length) in enumerate(known)
    ]


async def sent(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
    """One request of `serve` and its timing: vLLM's `RequestFunc`."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    request = request_func_input
    output = RequestFuncOutput(prompt_len=request.prompt_len)
    options = {"max_tokens": request.output_len, "ignore_eos": True, **(request.extra_body or {})}
    url, items = request.api_url.removesuffix(_ROUTE), request.multi_modal_content
    key = os.environ.get("OPENAI_API_KEY")  # vLLM's benchmark reads it, too
    async with AsyncClient(url, api_key=key, timeout=None) as client:
        output.start_time = last = time.perf_counter()
        try:
            async for event in client.stream(request.prompt, items, **options):
                now = time.perf_counter()
                if tokens := len(event.choices[0].token_ids):
                    output.itl += [now - last] if output.output_tokens else []
                    output.ttft = output.ttft or now - output.start_time
                    output.output_tokens += tokens
                    last = now
            output.latency, output.success = time.perf_counter() - output.start_time, True
        except MmkitError as error:
            output.error = str(error)
    if pbar:
        pbar.update(1)
    return output


def _instead(module: Any, name: str, value: Any) -> None:
    """Put something in place of a name in one of vLLM's modules.

    Raises:
        VllmApiError: this vLLM has no such name.
    """
    if not hasattr(module, name):
        raise VllmApiError(module.__name__, f"a function {name}", "none")
    setattr(module, name, value)


def _processor() -> list[str]:
    """Prepare `mm-processor`, and its arguments."""
    import vllm
    from vllm.benchmarks import mm_processor

    class LLM(vllm.LLM):
        """Takes prompts where the benchmark has messages, of models without a tokenizer too."""

        def get_tokenizer(self) -> Any:
            return None if self.model_config.skip_tokenizer_init else super().get_tokenizer()

        def chat(self, messages: Any, sampling_params: Any = None, **options: Any) -> Any:
            for params in sampling_params:
                params.detokenize = not self.model_config.skip_tokenizer_init
            return self.generate(messages, sampling_params, use_tqdm=options["use_tqdm"])

    def prompts(args: Any, tokenizer: Any) -> list[Any]:
        made = drawn(args)
        for request in made:
            request.prompt = {
                "prompt_token_ids": request.prompt,
                "multi_modal_data": request.multi_modal_data,
            }
        return made

    _instead(vllm, "LLM", LLM)
    _instead(mm_processor, "get_requests", prompts)
    return []


def _serve() -> list[str]:
    """Prepare `serve`, and its arguments."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

    ASYNC_REQUEST_FUNCS["mmkit"] = sent
    _instead(serve, "get_samples", drawn)
    return ["--backend", "mmkit", "--endpoint", _ROUTE]


_KINDS = {"mm-processor": _processor, "serve": _serve}


def main() -> None:
    """Run vLLM's command."""
    kind, *options = sys.argv[1:] or [""]
    if kind not in _KINDS:
        sys.exit(
            f"python -m benchmarks.vllm_bench: expected one of {', '.join(_KINDS)}, got {kind!r}."
        )
    from vllm.entrypoints.cli.main import main as vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    sys.argv[1:] = ["bench", kind, *_KINDS[kind](), *options]
    try:
        vllm()
    except MmkitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
