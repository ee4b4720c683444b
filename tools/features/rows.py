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
from tools.shared import print_result

from . import parts


@dataclass
class Side:
    """One checkpoint, run by this repository's model or by vLLM's own class."""

    use_vllm_class: bool
    folder: Path
    stack: ExitStack

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
        """Start an engine that lives as long as the side.

        The first engine that ends would take down what all of a process share.
        """
        default = {"enforce_eager": True, "seed": 0, "max_model_len": 512, "max_num_seqs": 16}
        # vLLM's class takes floats; the bytes of ours are normalised by another order of operations
        default["mm_device_do_normalize"] = False
        return self.stack.enter_context(
            engine(
                checkpoint or self.checkpoint,
                use_vllm_class=self.use_vllm_class,
                **default | options,
            )
        )

    def answers(self, checkpoint: Path | None = None, **options: Any) -> list[list[int]]:
        """Return the greedy answers of an engine with these options."""
        return answer(self.engine(checkpoint, **options), self.requests)


Run = Callable[[Side], Any]


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
        name: as the page shows it.
        run: returns the answers of a side; both sides should give the same.
        processes: whether its engines run in processes of their own.
    """

    name: str
    run: Run
    processes: bool = False


FEATURES: list[Feature] = []


def feature(name: str, *, processes: bool = False) -> Callable[[Run], Run]:
    """Add a function to `FEATURES`, as a decorator."""

    def add(run: Run) -> Run:
        FEATURES.append(Feature(name, run, processes))
        return run

    return add


def add_option(name: str, *, processes: bool = False, **engine_options: Any) -> None:
    """Add a feature that is one or more options of the engine."""

    @feature(name, processes=processes)
    def _(side: Side) -> Any:
        return side.answers(**engine_options)


def generate(llm: Any, requests: Any, lora: Any = None, **options: Any) -> Any:
    """Return vLLM's results, greedy unless options say otherwise."""
    from vllm import SamplingParams

    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    sampling = SamplingParams(**greedy | options)
    return llm.generate(requests, sampling, use_tqdm=False, lora_request=lora)


def read_ids(results: Any) -> list[list[int]]:
    """Return the ids of vLLM's results."""
    return [list(result.outputs[0].token_ids) for result in results]


def check_effect(without: Any, answers: Any) -> Any:
    """Return the answers with a feature, which have to differ from those without it.

    Raises:
        ValueError: they are equal.
    """
    if without == answers:
        raise ValueError("it changes nothing")
    return answers


add_option("greedy answers")


@feature("prefix caching")
def _(side: Side) -> Any:
    llm = side.engine(enable_prefix_caching=True)
    first = answer(llm, side.requests)
    results = generate(llm, side.requests)
    second = read_ids(results)
    num_cached = [result.num_cached_tokens for result in results]
    check_effect([0] * len(results), num_cached)
    return second, num_cached, first == second


SMALL = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "enable_prefix_caching": False}
WHOLE = {"max_num_batched_tokens": 32, "disable_chunked_mm_input": True}
add_option("chunked prefill, 8 tokens at a time", **SMALL)
add_option("chunked prefill that does not split an item", **WHOLE)
add_option("no cache of processed items", mm_processor_cache_gb=0)
add_option("`async_scheduling`", async_scheduling=True)


@feature("structured outputs: a choice, a pattern, JSON")
def _(side: Side) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    llm = side.engine()
    schema = {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"]}
    forms = ({"choice": ["circle", "square"]}, {"regex": "[0-9]{3}"}, {"json": schema})
    texts = []
    for form in forms:
        results = generate(
            llm,
            side.requests[:4],
            max_tokens=24,
            structured_outputs=StructuredOutputsParams(**form),
            ignore_eos=False,
        )
        texts.extend(result.outputs[0].text for result in results)
    return texts


@feature("beam search")
def _(side: Side) -> Any:
    from vllm.sampling_params import BeamSearchParams

    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    answers = []
    for result in side.engine().beam_search(side.requests[:4], beams):
        answers.append([list(sequence.tokens) for sequence in result.sequences])
    return answers


@feature("log probabilities")
def _(side: Side) -> Any:
    results = generate(
        side.engine(), side.requests[:6], max_tokens=4, logprobs=3, prompt_logprobs=1
    )
    answers = []
    for result in results:
        of_prompt = [read_logprobs(step) for step in result.prompt_logprobs]
        of_output = [read_logprobs(step) for step in result.outputs[0].logprobs]
        answers.append((of_output, of_prompt))
    return answers


def read_logprobs(step: Any) -> dict[int, float] | None:
    """Return the log probabilities at a token; the first of a prompt has None."""
    if step is None:
        return None
    return {token: logprob.logprob for token, logprob in step.items()}


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
    requests = []
    for case in side.cases:
        if case.images:
            requests.append(case.request(torch.stack(reference.embed(case.images))))
    return answer(side.engine(), requests)


@feature("`language_model_only`")
def _(side: Side) -> Any:
    llm = side.engine(language_model_only=True)
    without_images = [case.request() for case in side.cases if not case.images]
    return answer(llm, without_images)


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
add_option("ngram drafts", speculative_config=NGRAMS)


def add_draft(name: str, kind: str) -> None:
    """Add a feature that is a draft of some kind."""

    @feature(name)
    def _(side: Side) -> Any:
        model = parts.write_draft(side.folder / kind, side.checkpoint, kind)
        config = {"method": kind, "model": str(model), "num_speculative_tokens": 2}
        return side.answers(speculative_config=config)


add_draft("a draft model", "draft_model")
add_draft("EAGLE", "eagle")
add_draft("EAGLE-3", "eagle3")


LORA = {"enable_lora": True, "max_lora_rank": 8}


def make_lora(side: Side, *prefixes: str) -> Any:
    """Return an adapter for layers with some prefixes, as requests have it."""
    from vllm.lora.request import LoRARequest

    path = parts.write_adapter(side.folder / "adapter", side.checkpoint, *prefixes)
    return LoRARequest("a", 1, str(path))


@feature("LoRA, mixed with requests without")
def _(side: Side) -> Any:
    llm = side.engine(**LORA)
    adapters: list[Any] = [None] * len(side.requests)
    adapters[1::2] = [make_lora(side, "language_model.")] * len(adapters[1::2])
    results = generate(llm, side.requests, adapters)
    return check_effect(answer(llm, side.requests), read_ids(results))


@feature("`default_mm_loras`")
def _(side: Side) -> Any:
    default = {"image": make_lora(side, "language_model.").lora_path}
    return check_effect(side.answers(), side.answers(**LORA, default_mm_loras=default))


@feature("LoRA on the tower and the connector, loaded once")
def _(side: Side) -> Any:
    llm = side.engine(**LORA, enable_tower_connector_lora=True)
    adapter = make_lora(side, "language_model.", "vision_tower.")
    results = generate(llm, side.requests, [adapter] * len(side.requests))
    return check_effect(answer(llm, side.requests), read_ids(results))


@feature("pooling: `embed`")
def _(side: Side) -> Any:
    llm = side.engine(runner="pooling", convert="embed")
    return [result.outputs.embedding for result in llm.embed(side.requests, use_tqdm=False)]


@feature("classification: `classify`")
def _(side: Side) -> Any:
    folder = parts.write_classifier(side.folder / "head", side.checkpoint)
    llm = side.engine(folder, runner="pooling", convert="classify")
    return [result.outputs.probs for result in llm.classify(side.requests, use_tqdm=False)]


@feature("int8 weights and activations, compressed-tensors")
def _(side: Side) -> Any:
    folder = parts.quantise(side.folder / "int8", side.checkpoint)
    return check_effect(side.answers(), side.answers(folder))


add_option("two processes per layer, TP", tensor_parallel_size=2, processes=True)
add_option("two stages, PP", pipeline_parallel_size=2, processes=True)
DATA = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
add_option("`mm_encoder_tp_mode=data`", **DATA, processes=True)


@feature("an encoder's process and a language model's, EPD", processes=True)
def _(side: Side) -> Any:
    storage = side.folder / "encoded"
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    encoder = side.engine(
        ec_transfer_config=config | {"ec_role": "ec_producer"}, enable_prefix_caching=False
    )
    answer(encoder, side.requests, max_tokens=1)
    num_encoded = len(list(storage.rglob("*.safetensors")))
    return num_encoded, side.answers(ec_transfer_config=config | {"ec_role": "ec_consumer"})


@feature("`reload_weights`")
def _(side: Side) -> Any:
    llm = side.engine()
    llm.collective_rpc("reload_weights")
    return answer(llm, side.requests)


def main(name: str, folder: Path, use_vllm_class: bool = False) -> None:
    """Print the outcome of a feature on a side, as an `answer` or an `error`."""
    from examples.llava_like import register

    register()
    by_name = {feature.name: feature for feature in FEATURES}
    with ExitStack() as stack:
        try:
            answers = by_name[name].run(Side(use_vllm_class, folder, stack))
            print_result({"answer": answers})
        except Exception as error:
            print_result({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    typer.run(main)
