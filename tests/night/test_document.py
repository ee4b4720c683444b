"""A checkpoint with the document of a spec, in an engine that has no package of its author."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from examples.llava_like.cases import make_cases
from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE

ANSWER = """
import json, sys

import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams

folder, requests_file = sys.argv[1:]
arrays = np.load(requests_file)
requests = []
for name in sorted(arrays.files, reverse=True):  # the prompts come first
    kind, number, *_ = name.split("_")
    if kind == "prompt":
        requests.insert(0, {"prompt": str(arrays[name])})
for name in sorted(arrays.files):
    kind, number, *_ = name.split("_")
    if kind == "image":
        data = requests[int(number)].setdefault("multi_modal_data", {"image": []})
        data["image"].append(Image.fromarray(arrays[name]))
if __name__ == "__main__":
    options = {"trust_remote_code": True} if "auto_map" in open(folder + "/config.json").read() else {}
    llm = LLM(folder, dtype="float32", enforce_eager=True, block_size=32, seed=0, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = [list(output.outputs[0].token_ids) for output in llm.generate(requests, sampling, use_tqdm=False)]
    try:
        llm.generate({"prompt": "look", "multi_modal_data": {"image": [Image.new("RGB", (9, 9))]}}, sampling)
        refusal = ""
    except Exception as error:
        refusal = str(error)
    processor = type(llm.llm_engine.renderer.mm_processor)
    model = type(llm.llm_engine.model_executor.driver_worker.worker.get_model())
    assert "examples" not in sys.modules
    print("RESULT" + json.dumps([answers, refusal, processor.__module__, model.__module__]))
"""


def write_requests(folder: Path) -> Path:
    """Return a file with the prompts and pictures of 24 requests."""
    arrays = {}
    cases = make_cases(AutoTokenizer.from_pretrained(folder), 48)
    texts = [case for case in cases if isinstance(case.prompt, str)][:24]
    for number, case in enumerate(texts):
        arrays[f"prompt_{number:02}"] = np.array(case.prompt)
        for position, image in enumerate(case.images):
            arrays[f"image_{number:02}_{position}"] = np.asarray(image)
    file = folder / "requests.npz"
    np.savez(file, **arrays)
    return file


def answer(folder: Path, requests_file: Path) -> Any:
    """Return the answers of an engine in a process of its own, with the plugin of mmkit alone."""
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "mmkit",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # the code of a folder is copied there
        "HF_MODULES_CACHE": str(folder / "modules"),
        # other tests of this process announce their models there
        "MMKIT_MODULES": "",
    }
    script = folder / "answer.py"
    script.write_text(ANSWER)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(requests_file)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))


CODE = """
import torch
from mmkit.training import MultiModalMixin
from transformers import LlavaForConditionalGeneration


class FolderLlavaForConditionalGeneration(MultiModalMixin, LlavaForConditionalGeneration):
    def embed_image(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        return list(self.model.get_image_features(pixel_values=pixel_values).pooler_output)
"""


def write_class(folder: Path) -> None:
    """Write the class of transformers that runs a checkpoint into its folder. It states no spec: the document does."""
    (folder / "modeling_folder.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    name = "FolderLlavaForConditionalGeneration"
    config |= {"architectures": [name], "auto_map": {"AutoModelForImageTextToText": f"modeling_folder.{name}"}}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_checkpoint_with_a_document_is_served_without_the_package_of_its_author(tmp_path: Path) -> None:
    """By vLLM's own class, and by the class of transformers that the folder brings as code."""
    folder = make_checkpoint(tmp_path)
    requests_file = write_requests(folder)
    expected, _, module_of_processor, module_of_model = answer(folder, requests_file)
    assert module_of_processor.startswith("vllm.")
    (folder / "mmkit.json").write_text(json.dumps(LLAVA_LIKE.to_document()))
    answers, refusal, module_of_processor, model = answer(folder, requests_file)
    assert len(answers) == 24
    assert answers == expected
    assert refusal.startswith("llava_like.image: expected")
    assert module_of_processor.startswith("mmkit.generated.")
    assert model == module_of_model
    write_class(folder)
    answers, refusal, module_of_processor, model = answer(folder, requests_file)
    assert answers == expected
    assert refusal.startswith("llava_like.image: expected")
    assert module_of_processor.startswith("mmkit.generated.")
    assert model.startswith("mmkit.model.generated.transformers_modules.")
