"""An engine in this process, beside the class of transformers that it runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..plugin import find_claim
from .law import NotApplicable
from .strategies import Request
from .subject import Subject
from .vllm_model import batch_items
from .vllm_path import Outcome

MAX_LENGTH = 2048
"""The most positions of a prompt: a config may state more than this machine has memory for."""

NUM_LOGPROBS = 20
"""The most tokens whose log probabilities vLLM returns, unless it is told otherwise."""

ANSWER_TOKENS = 3
"""How many tokens are generated after a prompt. The first one comes of the prompt alone; the others
have a position each and read the KV cache."""

# Options that are copied from the config of the processor to the engine.
_COPIED_OPTIONS = ("trust_remote_code", "skip_tokenizer_init", "hf_overrides")


def has_both(subject: Subject) -> bool:
    """Return whether vLLM runs a class of transformers as it is, of which there are weights."""
    return _find_module(subject) is not None and _has_weights(subject)


@contextmanager
def open_both(subject: Subject) -> Iterator[Both]:
    """Run a checkpoint in an engine of this process, and in transformers, for a `with` block.

    Raises:
        NotApplicable: its class is none that `serve_transformers` has registered, or it has no
            weights.
    """
    from vllm import LLM, distributed

    module = _find_module(subject)
    if module is None:
        raise NotApplicable("the model is no class of transformers that vLLM runs as it is")
    if not _has_weights(subject):
        raise NotApplicable("the checkpoint has no weights")
    plan = subject.plan
    assert plan is not None
    if any(modality.grid for modality in plan.modalities.values()):
        raise NotApplicable("positions have several dimensions")
    vllm_class = getattr(importlib.import_module(module), module.rpartition(".")[2])
    folder = str(subject.model_dir)
    # the attention that does all that a config says: others leave out caps of its scores
    settings = {"attn_implementation": "eager", "dtype": torch.float32}
    hf_model = vllm_class.hf_class.from_pretrained(folder, **settings).eval()

    config = subject.processor.info.ctx.model_config
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
    options["max_model_len"] = min(config.max_model_len, MAX_LENGTH)
    for name in _COPIED_OPTIONS:
        options[name] = getattr(config, name)
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    with patch.dict(os.environ, variables):
        llm = LLM(folder, **options)
        try:
            yield Both(llm, hf_model, subject)
        finally:
            llm.llm_engine.engine_core.shutdown()
            distributed.cleanup_dist_env_and_memory()


class Answer(NamedTuple):
    """The tokens that vLLM generates after a prompt.

    Attributes:
        ids: the likeliest token of each step.
        logprobs: of each step, the log probabilities of the likeliest tokens.
    """

    ids: list[int]
    logprobs: list[dict[int, float]]


class Both:
    """A model in vLLM's engine and in transformers.

    Args:
        llm: vLLM's.
        hf_model: of the class of transformers, on the CPU.
        subject: the processor.
    """

    def __init__(self, llm: Any, hf_model: Any, subject: Subject) -> None:
        self.max_prompt_length: int = llm.llm_engine.model_config.max_model_len - ANSWER_TOKENS
        self._llm = llm
        self._hf_model = hf_model
        self._subject = subject

    def answer_by_vllm(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers to requests, which the engine computes in one batch."""
        from vllm import SamplingParams

        prompts = []
        for request in requests:
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
            data = request.data()
            if data:
                prompt["multi_modal_data"] = data
                prompt["mm_processor_kwargs"] = dict(request.kwargs)
            prompts.append(prompt)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=ANSWER_TOKENS,
            ignore_eos=True,
            logprobs=min(NUM_LOGPROBS, self._subject.vocabulary_size),
        )
        answers = []
        for result in self._llm.generate(prompts, sampling, use_tqdm=False):
            (output,) = result.outputs
            logprobs = []
            for entries in output.logprobs:
                logprobs.append({token: entry.logprob for token, entry in entries.items()})
            answers.append(Answer(list(output.token_ids), logprobs))
        return answers

    @torch.inference_mode()
    def compute_by_transformers(self, outcome: Outcome, answer_ids: list[int]) -> torch.Tensor:
        """Return the log probabilities of all tokens at each step of an answer.

        Args:
            outcome: the prompt with its items.
            answer_ids: the tokens of the answer: each step follows those before it.

        Returns:
            float32 (steps, vocabulary).
        """
        model = self._hf_model
        ids = [*outcome.ids, *answer_ids[:-1]]
        embeds = model.get_input_embeddings()(torch.tensor([ids]))
        for name, items in outcome.items.items():
            rows = self._encode(name, items)
            for item_rows, (offset, _, mask) in zip(rows, outcome.ranges[name], strict=True):
                positions = [offset + index for index, is_embed in enumerate(mask) if is_embed]
                embeds[0, positions] = item_rows.to(embeds)
        all_positions = torch.arange(len(ids))[None]
        result = model(inputs_embeds=embeds, position_ids=all_positions, use_cache=False)
        logits: torch.Tensor = result.logits[0, -len(answer_ids) :].float()
        return logits.log_softmax(-1)

    def _encode(self, name: str, items: Any) -> list[torch.Tensor]:
        """Return the encoder rows of items of one modality, (rows, hidden_size) of each."""
        plan = self._subject.plan
        assert plan is not None
        names = plan.modalities[name].fields
        rows: list[torch.Tensor] = []
        for kwargs in batch_items(items):
            fields = {key: value for key, value in kwargs.items() if key in names}
            rows += list(getattr(self._hf_model, f"embed_{name}")(**fields))
        return rows


def _find_module(subject: Subject) -> str | None:
    """Return the module of vLLM's class, if it is one of a class of transformers."""
    if subject.plan is None:
        return None
    config = subject.processor.info.ctx.model_config.hf_config
    return find_claim(config.architectures or [])


def _has_weights(subject: Subject) -> bool:
    folder = Path(subject.model_dir)
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return bool(weights)
