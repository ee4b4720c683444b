"""The features, a function each: it starts what it needs of one side, and returns the answers.

``python -m tools.features.rows NAME FOLDER`` runs one on one side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from examples.llava_like.cases import Case, draw_picture, make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.offline import answer, engine
from tools.shared import tell

from . import parts


@dataclass
class Side:
    """One checkpoint, run by this repository's model or by vLLM's own class."""

    own: bool
    folder: Path
    stack: ExitStack
    processes: bool = False

    @cached_property
    def checkpoint(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        return make_checkpoint(self.folder / "checkpoint")

    @cached_property
    def cases(self) -> list[Case]:
        from transformers import AutoTokenizer

        return make_cases(AutoTokenizer.from_pretrained(self.checkpoint), 12)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [case.request() for case in self.cases]

    def engine(self, checkpoint: Path | None = None, **options: Any) -> Any:
        """An engine, as long as the side lives: the first that ends takes down what all share."""
        default = {"enforce_eager": True, "seed": 0, "max_model_len": 512, "max_num_seqs": 16}
        started = engine(checkpoint or self.checkpoint, own=self.own, **default | options)
        return self.stack.enter_context(started)

    def answers(self, checkpoint: Path | None = None, **options: Any) -> list[list[int]]:
        """Greedy answers of an engine."""
        return answer(self.engine(checkpoint, **options), self.requests)


Run = Callable[[Side], Any]


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        name: as the page says it.
        run: what a side answers; equal answers are the point.
        processes: whether its engines run in processes of their own.
    """

    name: str
    run: Run
    processes: bool = False


FEATURES: list[Feature] = []


def feature(name: str, *, processes: bool = False) -> Callable[[Run], Run]:
    def declared(run: Run) -> Run:
        FEATURES.append(Feature(name, run, processes))
        return run

    return declared


def options(name: str, *, processes: bool = False, **given: Any) -> None:
    """A feature that is an option of the engine."""
    feature(name, processes=processes)(lambda side: side.answers(**given))


def ask(llm: Any, requests: Any, lora: Any = None, **options: Any) -> Any:
    """What vLLM tells of each request, greedy unless options say otherwise."""
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    sampling = SamplingParams(**greedy | options)
    return llm.generate(requests, sampling, use_tqdm=False, lora_request=lora)


def ids(results: Any) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in results]


def different(first: Any, second: Any) -> Any:
    """What a feature answers, if that is another answer than without it."""
    if first == second:
        raise ValueError("it changes nothing")
    return second


options("greedy answers")


@feature("prefix caching")
def _(side: Side) -> Any:
    llm = side.engine(enable_prefix_caching=True)
    first = answer(llm, side.requests)
    results = ask(llm, side.requests)
    cached = [result.num_cached_tokens for result in results]
    return ids(results), different([0] * len(results), cached), first == ids(results)


SMALL = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "enable_prefix_caching": False}
WHOLE = {"max_num_batched_tokens": 32, "disable_chunked_mm_input": True}
options("chunked prefill, 8 tokens at a time", **SMALL)
options("chunked prefill that does not split an item", **WHOLE)
options("no cache of processed items", mm_processor_cache_gb=0)
options("`async_scheduling`", async_scheduling=True)


@feature("structured outputs: a choice, a pattern, JSON")
def _(side: Side) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    llm = side.engine()
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    forms = ({"choice": ["circle", "square"]}, {"regex": "[0-9]{3}"}, {"json": schema})
    texts = []
    for form in forms:
        limits = {"structured_outputs": StructuredOutputsParams(**form), "ignore_eos": False}
        results = ask(llm, side.requests[:4], max_tokens=24, **limits)
        texts += [result.outputs[0].text for result in results]
    return texts


@feature("beam search")
def _(side: Side) -> Any:
    from vllm.sampling_params import BeamSearchParams

    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    results = side.engine().beam_search(side.requests[:4], beams)
    return [[list(sequence.tokens) for sequence in one.sequences] for one in results]


@feature("log probabilities")
def _(side: Side) -> Any:
    results = ask(side.engine(), side.requests[:6], max_tokens=4, logprobs=3, prompt_logprobs=1)

    def numbers(steps: Any) -> Any:
        return [one and {token: known.logprob for token, known in one.items()} for one in steps]

    return [(numbers(r.outputs[0].logprobs), numbers(r.prompt_logprobs)) for r in results]


@feature("chat, offline")
def _(side: Side) -> Any:
    from vllm import SamplingParams

    picture = {"type": "image_pil", "image_pil": draw_picture(0)}
    content = [{"type": "text", "text": "What is this?"}, picture]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (chat,) = side.engine().chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    return list(chat.prompt_token_ids), list(chat.outputs[0].token_ids)


@feature("precomputed embeddings of images")
def _(side: Side) -> Any:
    import torch

    from examples.llava_like.reference import Reference

    reference = Reference(side.checkpoint)
    rows = [(case, reference.embed(case.images)) for case in side.cases if case.images]
    return answer(side.engine(), [case.request(torch.stack(own)) for case, own in rows])


@feature("`language_model_only`")
def _(side: Side) -> Any:
    llm = side.engine(language_model_only=True)
    return answer(llm, [case.request() for case in side.cases if not case.images])


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
options("ngram drafts", speculative_config=NGRAMS)


def drafts(name: str, kind: str) -> None:
    @feature(name)
    def _(side: Side) -> Any:
        model = parts.draft(side.folder / kind, side.checkpoint, kind)
        config = {"method": kind, "model": str(model), "num_speculative_tokens": 2}
        return side.answers(speculative_config=config)


drafts("a draft model", "draft_model")
drafts("EAGLE", "eagle")
drafts("EAGLE-3", "eagle3")


LORA = {"enable_lora": True, "max_lora_rank": 8}


def lora(side: Side, *parts_of: str) -> Any:
    """An adapter, as requests have it."""
    from vllm.lora.request import LoRARequest

    path = parts.adapter(side.folder / "adapter", side.checkpoint, *parts_of)
    return LoRARequest("a", 1, str(path))


@feature("LoRA, mixed with requests without")
def _(side: Side) -> Any:
    llm, adapter = side.engine(**LORA), lora(side, "language_model.")
    mixed = [adapter if i % 2 else None for i in range(len(side.requests))]
    return different(answer(llm, side.requests), ids(ask(llm, side.requests, mixed)))


@feature("`default_mm_loras`")
def _(side: Side) -> Any:
    default = {"image": lora(side, "language_model.").lora_path}
    return different(side.answers(), side.answers(**LORA, default_mm_loras=default))


@feature("LoRA on the tower and the connector, loaded once")
def _(side: Side) -> Any:
    llm = side.engine(**LORA, enable_tower_connector_lora=True)
    adapter = lora(side, "language_model.", "vision_tower.")
    results = ask(llm, side.requests, [adapter] * len(side.requests))
    return different(answer(llm, side.requests), ids(results))


@feature("pooling: `embed`")
def _(side: Side) -> Any:
    llm = side.engine(runner="pooling", convert="embed")
    return [one.outputs.embedding for one in llm.embed(side.requests, use_tqdm=False)]


@feature("classification: `classify`")
def _(side: Side) -> Any:
    folder = parts.with_head(side.folder / "head", side.checkpoint)
    llm = side.engine(folder, runner="pooling", convert="classify")
    return [one.outputs.probs for one in llm.classify(side.requests, use_tqdm=False)]


@feature("int8 weights and activations, compressed-tensors")
def _(side: Side) -> Any:
    folder = parts.quantised(side.folder / "int8", side.checkpoint)
    return different(side.answers(), side.answers(folder))


options("two processes per layer, TP", tensor_parallel_size=2, processes=True)
options("two stages, PP", pipeline_parallel_size=2, processes=True)
DATA = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
options("`mm_encoder_tp_mode=data`", **DATA, processes=True)


@feature("an encoder's process and a language model's, EPD", processes=True)
def _(side: Side) -> Any:
    config = {"ec_connector": "ECExampleConnector"}
    config["ec_connector_extra_config"] = {"shared_storage_path": str(side.folder / "encoded")}
    producer, consumer = ({**config, "ec_role": role} for role in ("ec_producer", "ec_consumer"))
    encoder = side.engine(ec_transfer_config=producer, enable_prefix_caching=False)
    answer(encoder, side.requests, max_tokens=1)
    encoded = sum(1 for _ in (side.folder / "encoded").rglob("*.safetensors"))
    return encoded, side.answers(ec_transfer_config=consumer)


@feature("`reload_weights`")
def _(side: Side) -> Any:
    llm = side.engine()
    llm.collective_rpc("reload_weights")
    return answer(llm, side.requests)


def main(name: str, folder: Path, own: bool = False) -> None:
    """Tell what a side makes of a feature, as an `answer` or an `error`."""
    from examples.llava_like import register

    register()
    (chosen,) = (one for one in FEATURES if one.name == name)
    with ExitStack() as stack:
        try:
            tell({"answer": chosen.run(Side(own, folder, stack))})
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    typer.run(main)
