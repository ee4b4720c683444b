"""The paths of a request of a drawn spec, without an engine: HTTP ends where vLLM's renderer hands over to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from vllm import SamplingParams

from mmkit import InputError, MultiModalModel
from mmkit.generate import Classes
from mmkit.serve.client import build_request
from mmkit.serve.engine import Engine
from mmkit.serve.limits import ServerLimits
from mmkit.serve.protocol import GenerateRequest
from mmkit.testing import vllm_path
from mmkit.testing.vllm_path import Caches, Outcome
from mmkit.vllm_api import DummyInputs, ProcessingInfo, Processor, checkpoint_processors
from tests.path.serve_app import serve
from tests.path.test_random_specs import make_class
from tests.wild.serve import encode_chat
from tools.survey.doors import Doors

from .words import DrawnSpec

Messages = list[dict[str, Any]]


class RequestPaths:
    """The paths of the requests of one spec.

    Args:
        drawn: the spec.

    Attributes:
        processor: vLLM's.
        plan: the spec, bound.
        transformers: the processor for transformers.
        caches: vLLM's processor cache in one process, and in two.
        http: a client of a server; set by `open_paths`.
    """

    def __init__(self, drawn: DrawnSpec) -> None:
        checkpoint_processors.register_stand_in(["MmkitWords"])
        config = checkpoint_processors.load_model_config(drawn.checkpoint.folder)
        bases = (ProcessingInfo, DummyInputs, Processor)
        classes = Classes(*[make_class(base, drawn.spec) for base in bases])
        self.processor = checkpoint_processors.make_processor(classes, config)
        self.plan = self.processor.info.plan
        self.transformers = drawn.spec.hf_processor(config.hf_config, drawn.checkpoint.tokenizer, dtype="float32")
        self.caches = [Caches(self.processor, 1.0, pair=pair) for pair in (False, True)]
        self.http: Any = None
        self._template = drawn.make_template()
        self._doors = Doors(self.processor)
        self._arrived: Any = None
        model_class: Any = self._doors.model_class
        model_class.mm_spec = drawn.spec
        get_placeholder_str: Any = MultiModalModel.get_placeholder_str
        model_class.get_placeholder_str = classmethod(get_placeholder_str.__func__)

    def run(self, prompt: Any, data: Any, caches: Caches | None = None) -> Outcome:
        """Return what vLLM's processor makes of a request."""
        return vllm_path.run(self.processor, prompt, data, caches=caches)

    def train_on_chat(self, messages: Messages) -> list[int]:
        """Return the ids that the processor for transformers makes of a chat."""
        batch = self.transformers.apply_chat_template(
            messages, tokenize=True, return_dict=True, chat_template=self._template
        )
        ids: list[int] = batch["input_ids"][0].tolist()
        return ids

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Any, data: Any) -> Outcome | str:
        """Return what `POST /v1/mm/generate` hands to the engine, or the sentence of a refusal."""
        try:
            body = build_request(GenerateRequest, prompt, data, {"max_tokens": 1})
        except InputError as error:
            return str(error)
        return self._read_answer(self.http.post("/v1/mm/generate", content=body))

    def chat(self, messages: Messages) -> Outcome | str:
        """Return what a chat by HTTP hands to the engine, or the sentence of a refusal."""
        try:
            encoded = encode_chat(messages)
        except InputError as error:
            return str(error)
        body = {"model": "words", "messages": encoded}
        return self._read_answer(self.http.post("/v1/chat/completions", content=json.dumps(body)))

    def _read_answer(self, answer: Any) -> Outcome | str:
        if answer.status_code == 200:
            return self._collect()
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    def _collect(self) -> Outcome:
        if "mm_placeholders" in self._arrived:
            return vllm_path.collect_outcome(self._arrived)
        return Outcome(list(self._arrived["prompt_token_ids"]), {}, {}, {}, {})

    @contextmanager
    def serve(self) -> Iterator[TestClient]:
        """Serve the routes of mmkit, and a chat that vLLM renders, before an engine that takes requests."""
        renderer = self._doors.llm.renderer
        client = SimpleNamespace(
            renderer=renderer, model_config=renderer.model_config, generate=self._take_from_generate
        )
        engine = Engine(client, self.processor, trust_kwargs=False)
        with serve(ServerLimits(), engine=engine, handlers={"/v1/chat/completions": self._handle_chat}) as http:
            yield http

    async def _take_from_generate(self, rendered: Any, *sampling: Any, **options: Any) -> Any:
        self._arrived = rendered
        part = SimpleNamespace(index=0, token_ids=[0], text="", finish_reason="length", stop_reason=None, logprobs=None)
        ids = rendered["prompt_token_ids"]
        yield SimpleNamespace(outputs=[part], prompt_token_ids=ids, finished=True, num_cached_tokens=0)

    async def _handle_chat(self, request: Request) -> Response:
        messages = json.loads(await request.body())["messages"]
        await asyncio.to_thread(self._render_chat, messages)
        return Response("{}")

    def _render_chat(self, messages: Messages) -> None:
        with self._doors.use_model_class():
            self._doors.llm.chat(
                [messages],
                SamplingParams(),
                use_tqdm=False,
                chat_template=self._template,
                chat_template_content_format="openai",
            )
        self._arrived = self._doors.last_prompt


@contextmanager
def open_paths(drawn: DrawnSpec) -> Iterator[RequestPaths]:
    """Bind a spec, and serve it within the block."""
    paths = RequestPaths(drawn)
    with paths.serve() as paths.http:
        yield paths
