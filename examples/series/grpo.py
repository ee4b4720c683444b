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
        difference: the largest difference of a token's log probability between vLLM and transformers, before the
            update.
    """

    reward: float
    difference: float


def generate_rollouts(llm: Any, waves: Sequence[Wave], seed: int) -> list[Any]:
    """Return vLLM's outputs, `GROUP` answers about each wave, with the log probability of each token."""
    from vllm import SamplingParams

    sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=ANSWER_WORDS, ignore_eos=True, logprobs=0, seed=seed)
    requests = [{"prompt": PROMPT, "multi_modal_data": {"series": wave.series}} for wave in waves]
    return llm.generate(requests, sampling, use_tqdm=False)  # type: ignore[no-any-return]


def log_probabilities(model: Any, collate: Collator, outputs: Sequence[Any], waves: Sequence[Wave]) -> Tensor:
    """Return the log probabilities of the answers in transformers: (prompts, GROUP, ANSWER_WORDS).

    Raises:
        RuntimeError: vLLM expanded a prompt otherwise than the processor that the model is trained with.
    """
    rows = []
    for output, wave in zip(outputs, waves, strict=True):
        samples = []
        for answer in output.outputs:
            samples.append({"text": PROMPT, "series": wave.series, "answer": list(answer.token_ids)})
        batch = collate(samples)
        expanded = batch["input_ids"][0, :-ANSWER_WORDS].tolist()
        if expanded != output.prompt_token_ids:
            raise RuntimeError(f"{PROMPT}: two expansions, {expanded} in training")
        answers = batch["input_ids"][:, -ANSWER_WORDS:]
        logits = model(**batch).logits[:, -ANSWER_WORDS - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0])
    return torch.stack(rows)


def rollout_log_probabilities(outputs: Sequence[Any]) -> Tensor:
    """Return the log probabilities of the answers as vLLM sampled them: (prompts, GROUP, ANSWER_WORDS)."""
    rows = []
    for output in outputs:
        for answer in output.outputs:
            row = [logprobs[token].logprob for logprobs, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            rows.append(row)
    return torch.tensor(rows).view(len(outputs), GROUP, ANSWER_WORDS)


def compute_rewards(tokenizer: Any, outputs: Sequence[Any], waves: Sequence[Wave]) -> Tensor:
    """Return the reward of each answer: (prompts, GROUP)."""
    rewards = []
    for output, wave in zip(outputs, waves, strict=True):
        texts = tokenizer.batch_decode([answer.token_ids for answer in output.outputs])
        rewards.append([reward(text, wave) for text in texts])
    return torch.tensor(rewards)


def reward(answer: str, wave: Wave) -> float:
    """Return the share of the words of the true answer that stand in their place."""
    true_words = wave.answer.split()
    num_right = 0
    for word, true_word in zip(answer.split(), true_words, strict=False):
        num_right += word == true_word
    return num_right / len(true_words)


def learn(llm: Any, model: Any, collate: Collator, steps: int, seed: int = 0) -> Iterator[Step]:
    """Train the model, and the engine with it, one update per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        first = FIRST_TRAINING_SEED + seed + step * PROMPTS
        waves = [make_wave(number) for number in range(first, first + PROMPTS)]
        outputs = generate_rollouts(llm, waves, seed + step)
        in_vllm = rollout_log_probabilities(outputs)
        in_transformers = log_probabilities(model, collate, outputs, waves)
        rewards = compute_rewards(collate.processor.tokenizer, outputs, waves)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        # the ratio is 1, and its gradient that of the log probability: one update per rollout
        ratios = (in_transformers - in_transformers.detach()).exp()
        loss = -(advantages[..., None] * ratios).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(llm, model)
        difference = (in_transformers.detach() - in_vllm).abs().max()
        yield Step(rewards.mean().item(), difference.item())


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
            progress.set_postfix(reward=f"{step.reward:.3f}", difference=f"{step.difference:.1e}")


if __name__ == "__main__":
    typer.run(main)
