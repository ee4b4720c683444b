"""Ask a tiny model in transformers, by the account of its own code, and in vLLM, by its spec."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from examples.server import Server
from mmkit import serve_transformers
from mmkit.serve import content_part
from mmkit.testing import Report, check

from .common import Expansion, Message, collect_items
from .compare import OpenModel, compare_chat, draw_chat, open_model, render

ANSWER_TOKENS = 12


class Counts(NamedTuple):
    """What was compared.

    Attributes:
        chats: drawn chats that spec and account expand alike; every difference is an error.
        requests: chats that were sent to an engine.
        offline: of these, the answers of `LLM.generate` that are the account's.
        chat: of these, the answers of `LLM.chat` that are the account's.
        served: chats that were sent to a server.
        http: of these, the answers that are the account's.
        distinct: different answers among them.
        laws: laws that hold.
    """

    chats: int
    requests: int
    offline: int
    chat: int
    served: int
    http: int
    distinct: int
    laws: int


def compare_chats(name: str, count: int) -> None:
    """Compare so many drawn chats of a model with its account.

    Raises:
        AssertionError: one differs.
    """
    opened = open_model(name)
    for number in range(count):
        compare_chat(opened, draw_chat(opened, number))


def measure(name: str, folder: Path, *, chats: int, requests: int, served: int, examples: int) -> Counts:
    """Compare chats of a model with its account, ask an engine and a server, and check the laws.

    Args:
        name: of the model.
        folder: where its checkpoint goes.
        chats: how many are expanded.
        requests: how many of these are sent to an engine.
        served: how many of those are sent to a server as well.
        examples: for each law.

    Raises:
        AssertionError: a chat is expanded otherwise, the server rejects one, or a law is violated.
    """
    compare_chats(name, chats)
    opened = open_model(name)
    model = make_checkpoint(opened, name, folder)
    messages = [draw_chat(opened, number) for number in range(requests)]
    expected = [answer_by_account(opened, model, messages_of_chat) for messages_of_chat in messages]
    offline, chat = answer_by_engine(opened, folder, messages)
    http = answer_by_server(opened, folder, messages[:served])
    return Counts(
        chats=chats,
        requests=requests,
        offline=count_equal(offline, expected),
        chat=count_equal(chat, expected),
        served=served,
        http=count_equal(http, expected[:served]),
        distinct=len(set(map(tuple, expected))),
        laws=count_laws(check(opened.model.spec, folder, examples=examples)),
    )


def count_equal(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> int:
    return sum(answer == ids for answer, ids in zip(answers, expected, strict=True))


def count_laws(report: Report) -> int:
    """Return how many laws hold.

    Raises:
        AssertionError: one is violated, or failed.
    """
    assert report, report
    return sum(result.status == "holds" for result in report.results)


def register(name: str) -> Any:
    """Tell transformers and vLLM about a model, and return its class."""
    module = import_module(f"tests.wild.{name}")
    model_class = getattr(module, module.MODEL.architecture)
    serve_transformers(f"{module.__name__}:{model_class.__name__}", model_class.config_class)
    return model_class


def make_checkpoint(opened: OpenModel, name: str, folder: Path) -> Any:
    """Write the checkpoint of a model with a name, with random weights, and return its model."""
    return write_checkpoint(opened, register(name), folder)


def write_checkpoint(opened: OpenModel, model_class: Any, folder: Path) -> Any:
    """Write a checkpoint of a class that vLLM knows, with random weights, and return its model."""
    torch.manual_seed(0)
    opened.config.eos_token_id = opened.tokenizer.eos_token_id  # vLLM reads the tokenizer's, transformers the config's
    model = model_class(opened.config).eval()
    model.generation_config.suppress_tokens = sorted(opened.plan.embed_ids)  # as vLLM does
    model.save_pretrained(folder)
    opened.tokenizer.save_pretrained(folder)
    return model


# -- the account in transformers ---------------------------------------------------------------------------------------


def answer_by_account(opened: OpenModel, model: Any, messages: list[Message]) -> list[int]:
    """Return greedy ids of transformers for a chat as the account expands it. Nothing of mmkit makes the prompt."""
    expansion = opened.model.expand(opened.tokenizer, opened.config, messages)
    with torch.inference_mode():
        embeds = embed_expansion(model, expansion)
        ids = model.generate(
            inputs_embeds=embeds[None],
            attention_mask=torch.ones(1, len(embeds), dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )
    answer: list[int] = ids[0].tolist()
    return answer


def embed_expansion(model: Any, expansion: Expansion) -> torch.Tensor:
    """Return the embeddings of a prompt (positions, hidden_size), each item encoded by itself."""
    ids = torch.tensor(expansion.ids)
    embeds = model.get_input_embeddings()(ids).clone()
    for modality, items in expansion.fields.items():
        encode = getattr(model, f"embed_{modality}", None)
        for index, fields in enumerate(items):
            positions = [position for position, source in enumerate(expansion.sources) if source == (modality, index)]
            if positions:
                (rows,) = encode(**{name: value[None] for name, value in fields.items()})
                embeds[positions] = rows
    return embeds


# -- vLLM --------------------------------------------------------------------------------------------------------------


def answer_by_engine(
    opened: OpenModel, folder: Path, chats: Sequence[list[Message]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return greedy ids of vLLM for chats: as texts with items, and as messages.

    Raises:
        AssertionError: the prompt of one is not the account's.
    """
    from vllm import LLM, SamplingParams

    options = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "use_tqdm_on_load": False}
    llm = LLM(str(folder), **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, min_tokens=ANSWER_TOKENS)
    requests = []
    for messages in chats:
        text = render(opened, messages).removeprefix(opened.tokenizer.bos_token or "")
        request: dict[str, Any] = {"prompt": text}
        items = collect_items(messages)
        if items:
            request["multi_modal_data"] = items
        requests.append(request)
    routes = {
        "generate": llm.generate(requests, sampling, use_tqdm=False),
        "chat": llm.chat(list(chats), sampling, use_tqdm=False),
    }
    llm.llm_engine.engine_core.shutdown()
    answers = {}
    for route, results in routes.items():
        for result, messages in zip(results, chats, strict=True):
            expected = opened.model.expand(opened.tokenizer, opened.config, messages).ids
            prompts = f"{opened.tokenizer.decode(result.prompt_token_ids)}\n{opened.tokenizer.decode(expected)}"
            assert result.prompt_token_ids == expected, f"{route}:\n{prompts}"
        answers[route] = [list(result.outputs[0].token_ids) for result in results]
    return answers["generate"], answers["chat"]


def answer_by_server(opened: OpenModel, folder: Path, chats: Sequence[list[Message]]) -> list[list[int]]:
    """Return greedy ids of vLLM's server for chats, which renders them by the chat template of the checkpoint.

    Raises:
        AssertionError: a chat is rejected, or its prompt is not the account's.
    """
    options = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "wild")
    # an engine of this process sets the second variable to 0, which is no way for a server
    environment = {"MMKIT_MODULES": "tests.wild.registered", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    answers = []
    with Server(folder, *options, environment=environment, log=folder / "server.log") as server:
        for messages in chats:
            body = {
                "model": "wild",
                "messages": encode_chat(messages),
                "temperature": 0.0,
                "max_tokens": ANSWER_TOKENS,
                "min_tokens": ANSWER_TOKENS,
                "return_token_ids": True,
            }
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert response.status_code == 200, response.text
            answer = response.json()
            expected = opened.model.expand(opened.tokenizer, opened.config, messages).ids
            assert answer["prompt_token_ids"] == expected
            answers.append(answer["choices"][0]["token_ids"])
    return answers


def encode_chat(messages: Sequence[Message]) -> list[Message]:
    """Return a chat as a client sends it in JSON."""
    encoded = []
    for message in messages:
        parts = []
        for part in message["content"]:
            kind = part["type"]
            parts.append(part if kind == "text" else content_part(kind, part[kind]))
        encoded.append({**message, "content": parts})
    return encoded
