"""vLLM's `bench serve`, with requests that are drawn from the model's spec:
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
from mmkit.testing import Request, Subject, of_spec, processors

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
    """Drawn requests in place of vLLM's data set, for its parsed command line."""
    from vllm.benchmarks.datasets import SampleRequest

    config = processors.load_model_config(args.model)
    spec = processors.make_registered_processor(config).spec
    # the server may have other options, and takes requests without any
    subject = of_spec(spec, args.model, kwargs=st.just({}), enable_mm_embeds=False)
    output = args.output_len or _OUTPUT
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
    options["stream"] = True
    body = build_request(GenerateRequest, request.prompt, request.multi_modal_content, options)
    key = os.environ.get("OPENAI_API_KEY")  # vLLM's benchmark reads it, too
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    output.start_time = last = time.perf_counter()
    async with session.post(request.api_url, data=body, headers=headers) as response:
        async for line in response.content:
            now = time.perf_counter()
            if response.status != 200 or line.startswith(b'data: {"error"'):
                output.error += line.decode()
            elif line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:], type=Generation)
                if tokens := len(event.choices[0].token_ids):
                    output.itl += [now - last] if output.output_tokens else []
                    output.ttft = output.ttft or now - output.start_time
                    output.output_tokens += tokens
                    last = now
    output.latency, output.success = time.perf_counter() - output.start_time, not output.error
    if pbar:
        pbar.update(1)
    return output


def main() -> None:
    """Run vLLM's command."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS
    from vllm.entrypoints.cli.main import main as vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ASYNC_REQUEST_FUNCS["mmkit"] = sent
    serve.get_samples = drawn
    sys.argv[1:] = ["bench", *sys.argv[1:], "--backend", "mmkit", "--endpoint", _ROUTE]
    vllm()


if __name__ == "__main__":
    main()
