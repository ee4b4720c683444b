"""Compare the specs of examples/wild with the code of their models, and write docs/data/wild.md.

``python -m tools.wild --help``. Chats are drawn and expanded by the spec and by a plain account of
the model's own code; a tiny model of the same shape answers some of them in vLLM, offline and over
HTTP, and, by the account, in transformers; the laws are checked. With the repositories at hand the
lines of their own code are counted as well.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Annotated, Any, NamedTuple

import typer

from tools.lines import count_code_lines
from tools.shared import QUIET_VARIABLES, ROOT, format_table, print_result, run_module

STORED = ROOT / "docs" / "data" / "wild.json"
PAGE = ROOT / "docs" / "data" / "wild.md"
TEMPLATE = Path(__file__).with_suffix(".md.template")
LOG = Path("out", "wild.log")

SECONDS = 300
"""For one model."""

CHATS = 400
REQUESTS = 10
SERVED = 5
EXAMPLES = 5
"""For each law."""


class Source(NamedTuple):
    """The public code of a model.

    Attributes:
        title: of the model.
        reads: what an item is.
        shows: what its spec is an example of.
        repository: on GitHub.
        commit: of what was read.
        functions: by file, the functions that put items into prompts and their rows into
            embeddings.
    """

    title: str
    reads: str
    shows: str
    repository: str
    commit: str
    functions: dict[str, list[str]]


SOURCES = {
    "pointllm": Source(
        "PointLLM",
        "a cloud of points",
        "a fixed number of rows, tokens around them if the config says so, normalised items",
        "OpenRobotLab/PointLLM",
        "77bf64cc703c70ea896b44326b96673ffed5af4e",
        {
            "pointllm/data/utils.py": ["preprocess_multimodal_point_cloud", "pc_norm"],
            "pointllm/model/pointllm.py": [
                "PointLLMLlamaModel.forward",
                "PointLLMLlamaForCausalLM.prepare_inputs_for_generation",
            ],
        },
    ),
    "llaga": Source(
        "LLaGA",
        "a graph around a node",
        "several parts, rows by a formula, -1 for a missing node, text in pieces",
        "VITA-Group/LLaGA",
        "288240f1d85e90d831470ae4813fc64cc1a04149",
        {
            "utils/utils.py": ["tokenizer_graph_token"],
            "model/llaga_arch.py": [
                "LlagaMetaForCausalLM.encode_graphs",
                "LlagaMetaForCausalLM.inject_special_token",
                "LlagaMetaForCausalLM.prepare_inputs_labels_for_multimodal",
            ],
        },
    ),
    "bioreason": Source(
        "BioReason",
        "DNA, as text",
        "the tokenizer of another model, a largest text",
        "bowang-lab/BioReason",
        "2e298be3525ad80c29317b7ed87bd31f4f57a867",
        {
            "bioreason/models/dl/processing_dl.py": [
                "DLProcessor.tokenize_dna_sequences",
                "DLProcessor.__call__",
            ],
            "bioreason/models/dna_llm.py": [
                "DNALLMModel.process_dna_embeddings",
                "DNALLMModel.forward",
                "DNALLMModel.generate",
            ],
        },
    ),
    "opentslm": Source(
        "OpenTSLM",
        "a time series with a text",
        "rows that depend on the other items of the request, the text of an item in the prompt",
        "StanfordBDHG/OpenTSLM",
        "559c59fd50aebba5846e089fc9062a070033096c",
        {
            "src/opentslm/model/llm/OpenTSLMSP.py": [
                "OpenTSLMSP.pad_and_apply_batch",
                "OpenTSLMSP.generate",
            ],
            "src/opentslm/time_series_datasets/util.py": [
                "extend_time_series_to_match_patch_size_and_aggregate"
            ],
        },
    ),
    "molca": Source(
        "MolCA",
        "a molecule: SMILES and graph",
        "letters of an item one by one, indices into another part, a Q-Former",
        "acharkq/MolCA",
        "f728a47fae09536b9418ad21571c1b44a4a54e82",
        {
            "data_provider/stage2_dm.py": [
                "_insert_split_marker",
                "smiles_handler",
                "escape_custom_split_sequence",
                "InferenceCollater.__call__",
            ],
            "model/blip2_opt.py": ["Blip2OPT.forward", "Blip2OPT.generate"],
        },
    ),
    "salmonn": Source(
        "SALMONN",
        "speech or a sound",
        "two encoders for one item, padding and cutting, windows, text in pieces",
        "bytedance/SALMONN",
        "a58bba799a2eec05df09df102553f5c623808c12",
        {
            "utils.py": ["prepare_one_sample"],
            "models/salmonn.py": [
                "SALMONN._encode_auditory_feature",
                "SALMONN.encode_speech",
                "SALMONN.prompt_wrap",
                "SALMONN.generate",
            ],
        },
    ),
    "itformer": Source(
        "ITFormer",
        "series of sensors, with the question",
        "an encoder that reads the question, a borrowed token",
        "Pandalin98/ITFormer-ICML25",
        "b80142fc8b6ab2be8f148f3bb7a7534bb32f318b",
        {
            "dataset/dataset.py": [
                "TsQaDataset._create_chat_input",
                "TsQaDataset._safe_tokenize",
                "TsQaDataset.__getitem__",
            ],
            "models/TimeLanguageModel.py": [
                "TLM.prepare_inputs_for_generation",
                "TLM.merge_input_ids_with_ts_features",
            ],
        },
    ),
    "graphgpt": Source(
        "GraphGPT",
        "a graph of nodes with features",
        "a row for each node, edges that name nodes",
        "HKUDS/GraphGPT",
        "db25a66fd23b861156e6d7324f9ee8bc91c6ce7c",
        {
            "graphgpt/train/train_graph.py": ["preprocess_graph", "preprocess_graph_LP"],
            "graphgpt/model/GraphLlama.py": [
                "GraphLlamaModel.forward",
                "GraphLlamaForCausalLM.prepare_inputs_for_generation",
            ],
        },
    ),
    "ecg_byte": Source(
        "ECG-Byte",
        "an electrocardiogram",
        "an item that becomes ids only, by a code book of sequences",
        "willxxy/ECG-Byte",
        "bfa165281d11d78413f270754f3a44a3c720a290",
        {
            "ecg_byte/utils/tokenizer_utils.py": ["normalize_all", "encode_text"],
            "ecg_byte/data_loader.py": [
                "create_attention_like_mask",
                "ECGTokenDataset.__getitem__",
                "ECGTokenDataset._prepare_inference",
            ],
        },
    ),
    "onerec": Source(
        "OpenOneRec",
        "a video, as three codes",
        "an item that becomes ids only, an output behind reasoning",
        "Kuaishou-OneRec/OpenOneRec",
        "1f4a99ea4708254c7236bb8a306fdfc82ecd0758",
        {
            "data/onerec_data/sft/video_rec.py": ["pids_to_sids", "build_messages"],
            "benchmarks/benchmark/tasks/v1_0/recommendation/utils.py": [
                "extract_ids_from_answer",
                "extract_first_id_from_answer",
                "extract_id_from_generation",
            ],
        },
    ),
    "molm_3d": Source(
        "3D-MoLM",
        "a molecule: atoms in space",
        "a prompt that holds the placeholders already, pairs of parts",
        "lsh0520/3D-MoLM",
        "fb03ba35c36ffb92e0b67520459501bb20b8248e",
        {
            "data_provider/stage2_dm.py": ["InferenceCollater.__call__"],
            "data_provider/unimol_dataset.py": ["D3Dataset_cid.__getitem__"],
            "model/blip2_llama.py": ["Blip2Llama.forward", "Blip2Llama.generate"],
        },
    ),
    "collm": Source(
        "CoLLM",
        "a user, his history, an item",
        "three modalities, rows with text between",
        "zyang1580/CoLLM",
        "48042b168bb5aa41b42e9c89e7582b718e301556",
        {
            "minigpt4/models/minigpt4rec_v2.py": [
                "MiniGPT4Rec_v2.encode_recdata_v2",
                "MiniGPT4Rec_v2.recprompt_wrap_v2",
                "MiniGPT4Rec_v2.prompt_based_encode_v2",
            ],
        },
    ),
}
"""By the name of the spec, in the order of the page."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help="By default all.")] = None,
    sources: Annotated[
        Path | None,
        typer.Option(help="Folder of clones, each under the name of its repository."),
    ] = None,
) -> None:
    """Compare specs with the code of their models, and write the page.

    A run of some models changes these alone. With --sources the lines are counted, and nothing
    else is done.
    """
    chosen = names or list(SOURCES)
    if sources is None:
        counts = measure_in_process(chosen)
    else:
        counts = {}
        for name in chosen:
            counts[name] = {"lines": count_source_lines(SOURCES[name], sources)}
    results = load_results()
    for name, counts_of_model in counts.items():
        results.setdefault(name, {}).update(counts_of_model)
    STORED.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(write_page(results))
    missing = [name for name in chosen if name not in counts]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: no result, see {LOG}")


def load_results() -> dict[str, dict[str, Any]]:
    """Return the stored results, by the name of the model."""
    if not STORED.exists():
        return {}
    results: dict[str, dict[str, Any]] = json.loads(STORED.read_text())
    return results


# -- chats, answers, laws --------------------------------------------------------------------------


def measure_in_process(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the counts of models by their names, measured in another process.

    Those are left out of which a chat is expanded otherwise, or a law is violated.
    """
    variables = {**QUIET_VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MMKIT_MODULES": ""}
    seconds = SECONDS * len(names)
    arguments = ("tools.wild", "--run", *names)
    results, _ = run_module(*arguments, log=LOG, seconds=seconds, variables=variables)
    counts = {}
    for result in results:
        counts[result.pop("name")] = result
    return counts


def print_counts(names: Sequence[str]) -> None:
    """Measure models, and print what was counted of each."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.wild.serve import measure

    for name in names:
        try:
            with TemporaryDirectory() as folder:
                counts = measure(
                    name,
                    Path(folder),
                    chats=CHATS,
                    requests=REQUESTS,
                    served=SERVED,
                    examples=EXAMPLES,
                )
            print_result({"name": name, **counts._asdict()})
        except Exception:
            traceback.print_exc()
        cleanup_dist_env_and_memory()
    os._exit(0)  # an engine in this process may wait for others


# -- lines -----------------------------------------------------------------------------------------


def count_source_lines(source: Source, folder: Path) -> int:
    """Return the lines of code of the functions of a model, in a clone of its repository."""
    repository = folder / source.repository.partition("/")[2]
    total = 0
    for path, functions in source.functions.items():
        command = ["git", "-C", str(repository), "show", f"{source.commit}:{path}"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name in functions:
            total += count_code_lines(find_function(text, name))
    return total


def find_function(text: str, name: str) -> str:
    """Return the source of a function, or of a method as "Class.method", as a module.

    Raises:
        LookupError: there is none.
    """
    nodes: Sequence[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        for node in nodes:
            if getattr(node, "name", None) == part:
                function: Any = node
                break
        else:
            raise LookupError(name)
        nodes = function.body
    lines = text.splitlines()[function.lineno - 1 : function.end_lineno]
    return dedent("\n".join(lines))


def count_spec_lines(name: str) -> int:
    """Return the lines of code of a spec, without imports."""
    text = (ROOT / "examples" / "wild" / f"{name}.py").read_text()
    return count_code_lines(text, imports=False)


# -- the page --------------------------------------------------------------------------------------


def write_page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    rows: list[Sequence[str]] = []
    for name, source in SOURCES.items():
        if "chats" not in results.get(name, {}):
            continue
        result = results[name]
        address = f"https://github.com/{source.repository}/tree/{source.commit}"
        rows.append(
            (
                f"[{source.title}](../../examples/wild/{name}.py)",
                source.reads,
                source.shows,
                str(count_spec_lines(name)),
                f"[{result['lines']}]({address})",
                f"{result['chats']}",
                f"{result['offline']} of {result['requests']}",
                f"{result['chat']} of {result['requests']}",
                f"{result['http']} of {result['served']}",
                str(result["laws"]),
            )
        )
    head = (
        "model",
        "an item",
        "what it shows",
        "spec",
        "own code",
        "chats",
        "`generate`",
        "`chat`",
        "HTTP",
        "laws",
    )
    values = {"table": format_table(head, rows), "chats": CHATS, "requests": REQUESTS}
    return Template(TEMPLATE.read_text()).substitute(values)


if __name__ == "__main__":
    if "--run" in sys.argv:
        print_counts(sys.argv[sys.argv.index("--run") + 1 :])
    else:
        typer.run(main)
