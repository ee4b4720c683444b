"""Serve language models of transformers with a new modality, and compare them with transformers.

``python -m tools.architectures --help``. Each language model is tiny and of random weights, with
the encoder of examples/series beside it, as one class that vLLM runs. The page is
docs/data/architectures.md.
"""

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from tools.shared import QUIET_VARIABLES, ROOT, format_table, print_result, run_module

STORED = ROOT / "docs" / "data" / "architectures.json"
PAGE = ROOT / "docs" / "data" / "architectures.md"
TEMPLATE = Path(__file__).with_suffix(".md.template")

LOG = Path("out", "architectures.log")

SECONDS = 120
"""For one language model."""

NUM_REQUESTS = 10
NUM_TOKENS = 12

LIMIT = 1e-4
"""The largest difference of log probabilities that counts as equal."""

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "initializer_range": 0.2,
}
"""What all configs state, where they have it."""

HEAD = {"head_dim": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "Arcee": {},
    "Bloom": {"hidden_size": 128, "num_attention_heads": 4},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {"logit_scale": 0.25, **HEAD},
    "Ernie4_5": HEAD,
    "Exaone4": {},
    "Falcon": {"ffn_hidden_size": 192},
    "Gemma": HEAD,
    "Gemma2": {"query_pre_attn_scalar": 32, **HEAD},
    "Gemma3Text": {"query_pre_attn_scalar": 32, **HEAD},
    "Glm": {"partial_rotary_factor": 0.5, **HEAD},
    "Glm4": {"partial_rotary_factor": 0.5, **HEAD},
    "GPT2": {"n_embd": 96, "n_head": 3, "n_layer": 3, "n_positions": 256},
    "GPTNeoX": {},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, **HEAD},
    "Granite": {
        "logits_scaling": 4.0,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "Helium": HEAD,
    "Llama": {},
    "Mamba": {"state_size": 16, "expand": 2},
    "Mistral": HEAD,
    "Mixtral": {"num_local_experts": 4},
    "Nemotron": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {},
    "OPT": {"ffn_dim": 192, "word_embed_proj_dim": 96},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {},
    "Qwen2": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 64, **EXPERTS},
    "Qwen3": HEAD,
    "Qwen3Moe": {**EXPERTS, **HEAD},
    "SeedOss": HEAD,
    "SmolLM3": {},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Starcoder2": {},
}
"""What the config of each states besides. The name is that of the config's class."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="By default all.")] = None,
) -> None:
    """Serve each language model, and write the page; a run of some changes these alone."""
    results: dict[str, dict[str, Any]] = {}
    if STORED.exists():
        results = json.loads(STORED.read_text())
    results.update(run_in_processes(names or list(LANGUAGE_MODELS)))
    STORED.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(write_page(results))


def run_in_processes(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the results of language models.

    They share a process; those that it leaves out get one each.
    """
    results = run_in_process(names)
    for name in names:
        if name not in results:
            results.update(run_in_process([name]))
            results.setdefault(name, {"error": f"the process ended, see {LOG}"})
    return results


def run_in_process(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the results that a process prints for these language models, by their names."""
    variables = {**QUIET_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MMKIT_MODULES": ""}
    seconds = SECONDS * len(names)
    arguments = ("tools.architectures", "--run", *names)
    results, _ = run_module(*arguments, log=LOG, seconds=seconds, variables=variables)
    by_name: dict[str, dict[str, Any]] = {}
    for result in results:
        by_name[result.pop("name")] = result
    return by_name


def compare(name: str) -> dict[str, Any]:
    """Serve a language model, and compare its ids and log probabilities with transformers.

    Returns:
        `ids`, the number of requests with equal ids; `distinct`, the number of answers;
        `difference`, the largest of log probabilities. Or `error`, a sentence.
    """
    with TemporaryDirectory() as folder:
        try:
            return _compare(name, folder)
        except Exception as error:
            return {"error": " ".join(str(error).split())}


def make_classes(name: str) -> tuple[Any, Any]:
    """Return the class of the config and of the model, with an encoder of series."""
    import transformers

    from examples.series.encoder import PatchEncoder
    from examples.series.spec import WAVES
    from mmkit.training import MultiModalMixin

    base_config = getattr(transformers, f"{name}Config")
    base_name = f"{name.removesuffix('Text')}ForCausalLM"
    if name == "GPT2":
        base_name = "GPT2LMHeadModel"
    base = getattr(transformers, base_name)

    sizes = {"channels": 1, "max_steps": 64, "steps_per_token": 4}
    annotations = dict.fromkeys(sizes, int)
    members = {"model_type": f"{name.lower()}_waves", **sizes, "__annotations__": annotations}
    config = type(f"{name}WavesConfig", (base_config,), {**members, "__module__": __name__})

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.encoder = PatchEncoder(config)
        self.post_init()

    def embed_series(self: Any, series: Any) -> list[Any]:
        return [self.encoder(item) for item in series]

    members = {"mm_spec": WAVES, "config_class": config, "__init__": __init__}
    members |= {"embed_series": embed_series, "__module__": __name__}
    model = type(f"{name}WavesForCausalLM", (MultiModalMixin, base), members)
    for cls in (config, model):
        setattr(sys.modules[__name__], cls.__name__, cls)
    return config, model


def _compare(name: str, folder: str) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    from examples.series.spec import WAVES
    from examples.series.untrained import make_tokenizer
    from examples.series.waves import FIRST_TEST_SEED, PROMPT, make_wave
    from mmkit import serve_transformers

    config_class, model_class = make_classes(name)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model_class(config_class(**{**SIZES, **LANGUAGE_MODELS[name]})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    serve_transformers(model_class, config_class)

    # the attention of transformers that does all that a config says
    model = model_class.from_pretrained(folder, attn_implementation="eager").eval()
    processor = WAVES.hf_processor(model.config, tokenizer)
    model.generation_config.suppress_tokens = sorted(processor.plan.embed_ids)
    lengths = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    all_series = []
    expected_ids = []
    expected_logprobs = []
    for seed in range(FIRST_TEST_SEED, FIRST_TEST_SEED + NUM_REQUESTS):
        series = make_wave(seed).series
        inputs = processor(PROMPT, series=[series])
        ids = model.generate(**inputs, **lengths, do_sample=False)
        with torch.inference_mode():
            logits = model(**inputs).logits[0, -1].float()
        all_series.append(series)
        expected_ids.append(ids[0, inputs["input_ids"].shape[1] :].tolist())
        expected_logprobs.append(logits.log_softmax(-1).tolist())

    options = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    llm = LLM(folder, **options, distributed_executor_backend="uni")
    sampling = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, logprobs=5
    )
    requests = []
    for series in all_series:
        requests.append({"prompt": PROMPT, "multi_modal_data": {"series": [series]}})
    num_equal = 0
    differences = []
    results = llm.generate(requests, sampling, use_tqdm=False)
    for result, ids, logprobs in zip(results, expected_ids, expected_logprobs, strict=True):
        output = result.outputs[0]
        num_equal += list(output.token_ids) == ids
        for token, entry in output.logprobs[0].items():
            differences.append(abs(entry.logprob - logprobs[token]))
    distinct = len(set(map(tuple, expected_ids)))
    del llm
    gc.collect()
    return {"ids": num_equal, "distinct": distinct, "difference": max(differences)}


# -- the page --------------------------------------------------------------------------------------


def is_right(result: dict[str, Any]) -> bool:
    """Return whether ids and log probabilities are those of transformers."""
    return "error" not in result and result["ids"] == NUM_REQUESTS and result["difference"] <= LIMIT


def write_page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    import transformers
    import vllm

    rows: list[Sequence[str]] = []
    num_right = 0
    for name in sorted(results):
        result = results[name]
        if is_right(result):
            num_right += 1
        if "error" in result:
            rows.append((name, "refused", "", result["error"].replace("|", "\\|")))
        else:
            ids = f"{result['ids']} of {NUM_REQUESTS}"
            rows.append((name, ids, f"{result['difference']:.1g}", ""))
    head = ("language model", "ids", "log probabilities differ by", "sentence")
    values = {
        "num_models": len(results),
        "num_right": num_right,
        "num_requests": NUM_REQUESTS,
        "num_tokens": NUM_TOKENS,
        "limit": f"{LIMIT:g}",
        "transformers": transformers.__version__,
        "vllm": vllm.__version__.partition("+")[0],
        "table": format_table(head, rows),
    }
    return Template(TEMPLATE.read_text()).substitute(values)


def print_results(names: Sequence[str]) -> None:
    """Compare language models, and print a result of each."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for name in names:
        print_result({"name": name, **compare(name)})
        cleanup_dist_env_and_memory()
    os._exit(0)  # an engine in this process may wait for others


if __name__ == "__main__":
    if "--run" in sys.argv:
        # the classes below have this module's name in the processes of vLLM, too
        sys.modules["tools.architectures"] = sys.modules["__main__"]
        print_results(sys.argv[sys.argv.index("--run") + 1 :])
    else:
        typer.run(main)
