"""Every law that needs no model on the specs of two plugins in the field, on made-up checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.gallery.nemo_salm import NEMO_SALM
from examples.gallery.vibevoice import VIBEVOICE
from mmkit import ModelSpec
from mmkit.testing import LAWS, AudioSample, NotApplicable, Subject, check_law, of_spec
from tests.profiles import scaled

SPECIAL = ["<|AUDIO|>", "<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>", "<|audio|>"]
WORDS = ["<unk>", "</s>", *SPECIAL, *(f"w{i}" for i in range(300))]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

SPECS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "VibeVoice": (VIBEVOICE, {}),
    "NeMo": (NEMO_SALM, {"encoder_chunk_size_seconds": None}),
    "NeMo in chunks": (NEMO_SALM, {"encoder_chunk_size_seconds": 0.1}),
}
SAYS_NOTHING = {"embeds", "reference", "positions", "outputs"}
"""No embeddings, no Hugging Face processor, positions of one dimension, no outputs."""


@pytest.fixture(scope="module", params=SPECS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    spec, options = SPECS[request.param]
    folder = tmp_path_factory.mktemp("field")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.save_pretrained(folder)
    config = {"model_type": "qwen2", "vocab_size": len(WORDS), "max_position_embeddings": 512, **SIZES, **options}
    config |= {"num_key_value_heads": 2, "architectures": [f"{spec.name.title()}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    # of more rows than a request has items: the same token is written and stands for a row, so two of them beside one
    # item of two rows are an expanded prompt
    audio = st.builds(AudioSample, st.integers(0, 3), st.integers(8_000, 40_000), st.just(16_000))
    return of_spec(spec, folder, samples={"audio": audio} if spec is NEMO_SALM else None)


@pytest.mark.parametrize("law", [name for name, law in LAWS.items() if not law.needs_model])
def test_law(subject: Subject, law: str) -> None:
    if law in SAYS_NOTHING:
        with pytest.raises(NotApplicable):
            check_law(law, subject, examples=1)
    else:
        check_law(law, subject, examples=scaled(15))
