"""vLLM's `bench serve`, with requests that are drawn from the model's spec.

``python -m benchmarks.vllm_bench serve --model DIR ...``.

The data sets of ``vllm bench`` hold texts, images, videos and audio. Here items of any modality are
drawn, as for the laws (`mmkit.testing`), from the same seed the same ones, and are sent to
``POST /v1/mm/generate``. vLLM has no door for other data sets: what makes its requests is replaced.
All else is vLLM's, options too.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmkit.errors import MmkitError
from mmkit.serve.client import build_request
from mmkit.serve.protocol import GenerateRequest, Generation
from mmkit.testing import Request, Subject, of_spec
from mmkit.vllm_api import checkpoint_processors

_OUTPUT_LENGTH = 16
"""Tokens that are generated for a request, unless ``--output-len`` says otherwise."""

_ROUTE = "/v1/mm/generate"

_DRAWS_PER_REQUEST = 8
"""Some requests are drawn twice, or do not fit into the context."""


def main() -> None:
    """Run vLLM's command."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.entrypoints.cli.main import main as run_vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ASYNC_REQUEST_FUNCS["mmkit"] = send_request
    serve.get_samples = get_samples
    sys.argv.insert(1, "bench")
    sys.argv.extend(("--backend", "mmkit", "--endpoint", _ROUTE))
    run_vllm()


def get_samples(args: Any, tokenizer: Any = None) -> list[Any]:
    """Return drawn requests in place of vLLM's data set, for its parsed command line."""
    from vllm.benchmarks.datasets import SampleRequest

    config = checkpoint_processors.load_model_config(args.model)
    spec = checkpoint_processors.make_registered_processor(config).spec
    # the server may have other options, and takes requests without any
    subject = of_spec(spec, args.model, kwargs=st.just({}), enable_mm_embeds=False)
    output_length = args.output_len or _OUTPUT_LENGTH
    room = config.max_model_len - output_length
    samples = []
    for request, length in draw_requests(subject, args.num_prompts, args.seed or 0, room):
        sample = SampleRequest(
            list(request.prompt),
            length,
            output_length,
            request.data(),
            request_id=str(len(samples)),
        )
        samples.append(sample)
    return samples


def draw_requests(subject: Subject, count: int, seed: int, room: int) -> list[tuple[Request, int]]:
    """Return requests of a subject, each with the length of its prompt in the engine.

    They are different as far as so many are found, and come again otherwise.

    Args:
        subject: whose requests.
        count: how many.
        seed: of the draws: equal seeds give equal requests.
        room: the most tokens of a prompt.

    Raises:
        MmkitError: none is found.
    """
    by_text: dict[str, tuple[Request, int]] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=_DRAWS_PER_REQUEST * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(subject.requests())
    def draw(request: Request) -> None:
        text = repr(request)
        if len(by_text) < count and text not in by_text:
            length = len(subject.run(request).ids)
            if length <= room:
                by_text[text] = request, length

    draw()
    if not by_text:
        expected = f"requests of at most {room} tokens"
        num_draws = _DRAWS_PER_REQUEST * count
        raise MmkitError(str(subject.model_dir), expected, f"none in {num_draws} draws")
    different = list(by_text.values())
    return [different[i % len(different)] for i in range(count)]


async def send_request(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
    """Send one request, and return its times: a `RequestFunc` of vLLM."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    request = request_func_input
    output = RequestFuncOutput(prompt_len=request.prompt_len)
    options = {"max_tokens": request.output_len, "ignore_eos": True}
    options |= request.extra_body or {}
    options["stream"] = True
    body = build_request(GenerateRequest, request.prompt, request.multi_modal_content, options)
    headers = {}
    key = os.environ.get("OPENAI_API_KEY")  # vLLM's benchmark reads it, too
    if key:
        headers["Authorization"] = f"Bearer {key}"
    output.start_time = time.perf_counter()
    last = output.start_time
    async with session.post(request.api_url, data=body, headers=headers) as response:
        async for line in response.content:
            now = time.perf_counter()
            if response.status != 200 or line.startswith(b'data: {"error"'):
                output.error += line.decode()
                continue
            if not line.startswith(b"data: {"):
                continue
            event = msgspec.json.decode(line[6:], type=Generation)
            num_tokens = len(event.choices[0].token_ids)
            if not num_tokens:
                continue
            if output.output_tokens:
                output.itl.append(now - last)
            else:
                output.ttft = now - output.start_time
            output.output_tokens += num_tokens
            last = now
    output.latency = time.perf_counter() - output.start_time
    output.success = not output.error
    if pbar:
        pbar.update(1)
    return output


if __name__ == "__main__":
    main()
