"""Reinforcement learning in the way of GRPO: rollouts in vLLM, log probabilities and gradients in transformers.

``python -m examples.series.grpo CHECKPOINT`` goes on with a checkpoint of `examples.series.train`. The prompt that
vLLM expands and the one that is trained on are one prompt, id by id, or the loop ends with an error.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from mmkit.training import Collator

from .waves import ANSWER_WORDS, FIRST_TRAINING_SEED, PROMPT, Wave, make_wave

GROUP = 8
"""Rollouts of each prompt, which are judged against each other."""
PROMPTS = 32
LEARNING_RATE = 1e-3


class Step(NamedTuple):
    """What one step showed.

    Attributes:
        reward: share of right words, from 0 to 1, the mean of all rollouts.
        apart: the largest difference of a token's log probability between vLLM and transformers, before the update.
    """

    reward: float
    apart: float


def rollouts(llm: Any, waves: Sequence[Wave], seed: int) -> list[Any]:
    """vLLM's outputs, `GROUP` answers about each wave, with the log probability of each token."""
    from vllm import SamplingParams

    sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=ANSWER_WORDS, ignore_eos=True, logprobs=0, seed=seed)
    requests = [{"prompt": PROMPT, "multi_modal_data": {"series": wave.series}} for wave in waves]
    return llm.generate(requests, sampling, use_tqdm=False)  # type: ignore[no-any-return]


def log_probabilities(model: Any, collate: Collator, outputs: Sequence[Any], waves: Sequence[Wave]) -> Tensor:
    """Those of the answers in transformers: (prompts, GROUP, ANSWER_WORDS).

    Raises:
        RuntimeError: vLLM expanded a prompt otherwise than the processor that the model is trained with.
    """
    rows = []
    for output, wave in zip(outputs, waves, strict=True):
        samples = [{"text": PROMPT, "series": wave.series, "answer": list(one.token_ids)} for one in output.outputs]
        batch = collate(samples)
        expanded = batch["input_ids"][0, :-ANSWER_WORDS].tolist()
        if expanded != output.prompt_token_ids:
            raise RuntimeError(f"{PROMPT}: two expansions, {expanded} in training")
        answers = batch["input_ids"][:, -ANSWER_WORDS:]
        logits = model(**batch).logits[:, -ANSWER_WORDS - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0])
    return torch.stack(rows)


def sampled(answer: Any) -> list[float]:
    """The log probability of each token, as vLLM sampled it."""
    return [known[token].logprob for known, token in zip(answer.logprobs, answer.token_ids, strict=True)]


def reward(answer: str, wave: Wave) -> float:
    """The share of the words of the true answer that stand in their place."""
    words, right = answer.split(), wave.answer.split()
    return sum(map(str.__eq__, words, right)) / len(right)


def learn(llm: Any, model: Any, collate: Collator, steps: int, seed: int = 0) -> Iterator[Step]:
    """Train the model, and the engine with it, one update per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        first = FIRST_TRAINING_SEED + seed + step * PROMPTS
        waves = [make_wave(number) for number in range(first, first + PROMPTS)]
        outputs = rollouts(llm, waves, seed + step)
        theirs = torch.tensor([[sampled(answer) for answer in output.outputs] for output in outputs])
        ours = log_probabilities(model, collate, outputs, waves)
        texts = [collate.processor.tokenizer.batch_decode([a.token_ids for a in output.outputs]) for output in outputs]
        rewards = torch.tensor([[reward(t, wave) for t in group] for group, wave in zip(texts, waves, strict=True)])
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        loss = -(advantages[..., None] * (ours - ours.detach()).exp()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(llm, model)
        yield Step(rewards.mean().item(), (ours.detach() - theirs).abs().max().item())


def update(llm: Any, model: Any) -> None:
    """Give the engine the weights of the model; what it computed with others is forgotten."""
    weights = {name: weight.detach() for name, weight in model.state_dict().items()}
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    llm.reset_prefix_cache()


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of examples.series.train.")],
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 20,
) -> None:
    """Improve a checkpoint's answers, and show the reward of each step."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine takes weights from this process
    from transformers import AutoTokenizer

    from . import register
    from .offline import engine
    from .reference import WavesForCausalLM
    from .spec import WAVES

    register()
    model = WavesForCausalLM.from_pretrained(checkpoint)
    collate = Collator(WAVES.hf_processor(model.config, AutoTokenizer.from_pretrained(checkpoint)))
    with engine(checkpoint, seed=0) as llm:
        progress = tqdm(learn(llm, model, collate, steps), total=steps, desc="GRPO", unit="step")
        for step in progress:
            progress.set_postfix(reward=f"{step.reward:.3f}", apart=f"{step.apart:.1e}")


if __name__ == "__main__":
    typer.run(main)
