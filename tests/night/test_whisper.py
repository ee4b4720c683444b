"""Whisper with its spec in place of vLLM's processor: an encoder-decoder model in a real engine."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoProcessor
from transformers import WhisperForConditionalGeneration as PlainWhisper
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

from examples.gallery.whisper import WHISPER
from tests.engine.processes import engines_in_this_process
from tests.oracles import SYSTEMS

pytestmark = pytest.mark.timeout(600)

START = "<|startoftranscript|>"
TASK = f"{START}<|en|><|transcribe|><|notimestamps|>"
TEXTS = [START, TASK, f"<pad>before{TASK}"]  # <pad> has the id of the encoder's positions
AUDIO = [np.random.RandomState(n).randn(n).astype(np.float32) for n in (1, 400, 16000, 32000)]
TOKENS = 8
SAMPLING = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@WHISPER.register
class Generated(WhisperForConditionalGeneration):
    """vLLM's own class keeps its own processor."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = shutil.copytree(SYSTEMS["whisper"].checkpoint, tmp_path_factory.mktemp("whisper"), dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(folder, d_model=64, dtype="float32")
    torch.manual_seed(0)
    model = PlainWhisper(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed_positions" not in name:  # each audio must count
            torch.nn.init.normal_(weight, std=1.5 * weight[0].numel() ** -0.5)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def ask(checkpoint):
    """Gives a function of several requests at once."""
    with pytest.MonkeyPatch.context() as patch, engines_in_this_process() as engines:
        patch.setenv("MMKIT_MODULES", __name__)  # for the processes of these tests alone
        ModelRegistry.register_model("GeneratedWhisper", Generated)
        options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8}
        llm = LLM(str(checkpoint[0]), hf_overrides={"architectures": ["GeneratedWhisper"]}, **options)
        assert isinstance(llm.llm_engine.renderer.mm_processor, WHISPER.classes.processor)
        engines.callback(llm.llm_engine.engine_core.shutdown)
        yield lambda requests: [
            list(result.outputs[0].token_ids) for result in llm.generate(requests, SAMPLING, use_tqdm=False)
        ]


def test_same_ids_as_transformers(ask, checkpoint):
    """Whether the prompt is the decoder's, or either has its own."""
    folder, model = checkpoint
    processor = AutoProcessor.from_pretrained(folder)
    plain, apart, expected = [], [], []
    for text in TEXTS:
        for audio in AUDIO:
            plain.append({"prompt": text, "multi_modal_data": {"audio": audio}})
            of_encoder = {"prompt": "", "multi_modal_data": {"audio": audio}}
            apart.append({"encoder_prompt": of_encoder, "decoder_prompt": text})
            features = processor.feature_extractor(audio, sampling_rate=16000, return_tensors="pt").input_features
            # vLLM puts the start in front of a decoder's prompt that begins otherwise
            whole = text if text.startswith(START) else START + text
            prompt = ids = torch.tensor([processor.tokenizer.encode(whole, add_special_tokens=False)])
            for _ in range(TOKENS):
                with torch.inference_mode():
                    logits = model(input_features=features, decoder_input_ids=ids).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            expected.append(ids[0, prompt.shape[1] :].tolist())
    assert len(set(map(tuple, expected))) > len(TEXTS) + len(AUDIO)
    assert ask(plain) == expected
    assert ask(apart) == expected
