"""Tiny checkpoints of models that vLLM knows, without weights.

They are configuration, tokenizer and processor files.

`ZOO` names them, `checkpoint` writes one into a temporary folder, once per process, and `subject`
is the processor that vLLM makes of it, with small random items. All sizes are tiny, so that a
processor call takes milliseconds.

A maker returns what goes into the folder: configurations, tokenizers and processors save
themselves, a mapping names further files.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as hf
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from vllm.model_executor.models import registry

from mmkit.testing import AudioSample, ImageSample, Sample, Subject, VideoSample, of_registered
from tests.oracles import FOLDER


@dataclass(frozen=True)
class Entry:
    """One checkpoint, and the requests that are worth making; bounds are included.

    Attributes:
        architecture: the model class that its config names.
        make: returns what goes into the folder; or the folder, if it is a stored one.
        modalities: that are drawn.
        side: of images and of frames, in pixels.
        frames: of videos.
        metadata: videos come with metadata: a pair of the frames and a mapping.
        samples: of an audio, at 16 kHz.
        kwargs: request options (mm_processor_kwargs) that are worth varying, each valid by itself.
        options: of vLLM's ModelConfig.
    """

    architecture: str
    make: Callable[[], Sequence[Any]] | Path
    modalities: Sequence[str]
    side: tuple[int, int] = (28, 112)
    frames: tuple[int, int] = (2, 4)
    metadata: bool = False
    samples: tuple[int, int] = (1600, 16000)
    kwargs: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, modality: str) -> SearchStrategy[Sample]:
        """Return the strategy of one modality's items. It shrinks towards the smallest."""
        seeds = st.integers(0, 3)
        side = _draw_within(self.side)
        if modality == "audio":
            return st.builds(AudioSample, seeds, _draw_within(self.samples), st.just(16000))
        if modality == "image":
            return st.builds(ImageSample, seeds, side, side)
        return st.builds(
            VideoSample, seeds, _draw_within(self.frames), side, side, st.just(self.metadata)
        )


def _draw_within(bounds: tuple[int, int]) -> SearchStrategy[int]:
    """Return the strategy of numbers within bounds, with each bound often."""
    return st.sampled_from(bounds) | st.integers(*bounds)


ZOO: dict[str, Entry] = {}


def maker(
    architecture: str, *modalities: str, **options: Any
) -> Callable[[Callable[[], Sequence[Any]]], Any]:
    """Add a function to `ZOO` under its name, as a decorator."""

    def enter(make: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
        ZOO[make.__name__] = Entry(architecture, make, modalities, **options)
        return make

    return enter


def add_stored(name: str, architecture: str, *modalities: str, **options: Any) -> None:
    """Add a stored checkpoint of the tests to `ZOO`."""
    ZOO[name] = Entry(architecture, FOLDER / name / "checkpoint", modalities, **options)


@functools.cache
def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, which is written at the first call."""
    entry = ZOO[name]
    if isinstance(entry.make, Path):
        return entry.make
    folder = Path(tempfile.mkdtemp(prefix=f"zoo-{Path(name).name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for part in entry.make():
        if isinstance(part, Mapping):
            _write_files(folder, part, entry.architecture)
        else:
            if isinstance(part, hf.PretrainedConfig):
                part.architectures = [entry.architecture]
            part.save_pretrained(folder)
    return folder


def _write_files(folder: Path, files: Mapping[str, Any], architecture: str) -> None:
    """Write files whose contents are texts, or mappings that become JSON."""
    for file, content in files.items():
        if isinstance(content, str):
            text = content
        elif file == "config.json":
            text = json.dumps({**content, "architectures": [architecture]}, indent=1)
        else:
            text = json.dumps(content, indent=1)
        (folder / file).write_text(text)


@functools.cache
def subject(name: str) -> Subject:
    """Return the processor that vLLM makes of a checkpoint, and requests for it."""
    entry = ZOO[name]
    kwargs = st.sampled_from([{}, *entry.kwargs])
    samples = {modality: entry.draw(modality) for modality in entry.modalities}
    options = {"trust_remote_code": True, "enable_mm_embeds": True, "max_model_len": 2048}

    def run_here(call: Callable[[], Any]) -> Any:
        return call()

    # a process of its own takes 15 s per model class
    with mock.patch.object(registry, "_run_in_subprocess", run_here):
        return of_registered(
            checkpoint(name), kwargs=kwargs, samples=samples, **options | entry.options
        )


# --- Parts that the makers share

LENGTH = 4096
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = {
    **LAYERS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}
ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_max_length": LENGTH,
}
VISION = {**LAYERS, "image_size": 56, "patch_size": 14}
GRID = [[56, 112], [112, 56], [112, 112]]


def make_tokenizer(*special: str, named: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Return a tokenizer with a token per byte, after <pad>, <s>, </s>, <unk> and special tokens.

    Special tokens that are `named` become attributes.
    """
    named = named or {}
    tokens = list(dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *special, *named.values()]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(tokens + alphabet)}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(named),
        **{**ROLES, **options},
    )


def find_ids(text: Any, **tokens: str) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens, under the names that a config has for them."""
    return {name: text.convert_tokens_to_ids(token) for name, token in tokens.items()}


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def make_whisper_features() -> Any:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2)


# --- Stored checkpoints

add_stored("llava", "LlavaForConditionalGeneration", "image")
add_stored("llava_next", "LlavaNextForConditionalGeneration", "image")
add_stored("blip2", "Blip2ForConditionalGeneration", "image")
add_stored("molmo", "MolmoForCausalLM", "image", side=(28, 280), kwargs=[{"max_crops": 2}])
add_stored("deepseek_vl2", "DeepseekVLV2ForCausalLM", "image")
TILE_OPTIONS = [{"max_dynamic_patch": 2}, {"dynamic_image_size": False}]
add_stored("internvl2", "InternVLChatModel", "image", kwargs=TILE_OPTIONS)


add_stored("paligemma", "PaliGemmaForConditionalGeneration", "image")
add_stored("qwen2_audio", "Qwen2AudioForConditionalGeneration", "audio")
add_stored("ultravox", "UltravoxModel", "audio", samples=(1600, 64000))
add_stored("phi3v", "Phi3VForCausalLM", "image", kwargs=[{"num_crops": 2}])
SLICES = [{"max_slice_nums": 2}]
add_stored("minicpmv", "MiniCPMV", "image", "video", kwargs=SLICES)
LONGEST = [{"size": {"longest_edge": 56}}]
OF_PATCHES = [{"size": {"longest_edge": 64}}]
add_stored("pixtral_hf", "LlavaForConditionalGeneration", "image", kwargs=OF_PATCHES)
add_stored("idefics3", "Idefics3ForConditionalGeneration", "image", kwargs=LONGEST)
PAN_AND_SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 28}
add_stored("gemma3", "Gemma3ForConditionalGeneration", "image", kwargs=[PAN_AND_SCAN])


def read_stored(name: str) -> dict[str, Any]:
    """Return the texts of a stored checkpoint's files."""
    return {path.name: path.read_text() for path in (FOLDER / name / "checkpoint").iterdir()}


@maker("LlavaOnevisionForConditionalGeneration", "image", "video")
def llava_onevision() -> Sequence[Any]:
    """With three sizes of the stored grid, none of which is as large as vLLM's largest image."""
    files = read_stored("llava_onevision")
    config = json.loads(files["config.json"])
    config["image_grid_pinpoints"] = GRID
    processor = json.loads(files["processor_config.json"])
    processor["image_processor"]["image_grid_pinpoints"] = GRID
    return [files | {"config.json": config, "processor_config.json": processor}]


@maker("Mistral3ForConditionalGeneration", "image", kwargs=OF_PATCHES)
def mistral3() -> Sequence[Any]:
    files = read_stored("pixtral_hf")
    config = json.loads(files["config.json"])
    config["model_type"] = "mistral3"
    config["spatial_merge_size"] = 2
    processor = json.loads(files["processor_config.json"])
    processor["spatial_merge_size"] = 2
    return [files | {"config.json": config, "processor_config.json": processor}]


# --- LLaVA and what follows it


@maker("LlavaNextVideoForConditionalGeneration", "video")
def llava_next_video() -> Sequence[Any]:
    text = make_tokenizer("<image>", "<video>")
    sizes = {"size": {"shortest_edge": 56}, "crop_size": square(56)}
    config = hf.LlavaNextVideoConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**TEXT),
        image_grid_pinpoints=GRID,
        **find_ids(text, image_token_index="<image>", video_token_index="<video>"),
    )
    return config, hf.LlavaNextVideoProcessor(
        hf.LlavaNextVideoVideoProcessor(**sizes),
        hf.LlavaNextImageProcessor(**sizes, image_grid_pinpoints=GRID),
        text,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


@maker("AriaForConditionalGeneration", "image")
def aria() -> Sequence[Any]:
    text = make_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", named={"image_token": "<|img|>"})
    config = hf.AriaConfig(
        vision_config=hf.Idefics3VisionConfig(**{**VISION, "image_size": 980}),
        text_config=hf.AriaTextConfig(**TEXT),
        projector_patch_to_query_dict={1225: 8, 4900: 16},
        **find_ids(text, image_token_index="<|img|>"),
    )
    images = hf.AriaImageProcessor()
    return config, hf.AriaProcessor(images, text, size_conversion={490: 8, 980: 16})


# --- Qwen


def _qwen_vl(
    family: str, vision: Mapping[str, Any], video: Any = hf.Qwen2VLVideoProcessor
) -> Sequence[Any]:
    """Return a checkpoint of the classes whose names begin with a family."""
    text = make_tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    token_ids = find_ids(
        text,
        image_token_id="<|image_pad|>",
        video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>",
        vision_end_token_id="<|vision_end|>",
    )
    make_config = getattr(hf, f"{family}Config")
    config = make_config(vision_config=vision, text_config=QWEN_TEXT, **token_ids)
    shape = {
        "patch_size": vision["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
    }
    make_processor = getattr(hf, f"{family}Processor")
    return config, make_processor(hf.Qwen2VLImageProcessor(**shape), text, video(**shape))


QWEN_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_TEXT = {**TEXT, "rope_parameters": QWEN_ROPE}
HEADS = {"depth": 2, "hidden_size": 32, "num_heads": 2}
QWEN_VISION = {**HEADS, "intermediate_size": 64, "out_hidden_size": 32, "patch_size": 14}
QWEN3_VISION = {**QWEN_VISION, "patch_size": 16, "deepstack_visual_indexes": [0]}
PIXELS = [
    {"min_pixels": 56 * 56},
    {"max_pixels": 56 * 56},
    {"size": {"shortest_edge": 784, "longest_edge": 6272}},
]


@maker("Qwen2VLForConditionalGeneration", "image", "video", kwargs=PIXELS)
def qwen2_vl() -> Sequence[Any]:
    return _qwen_vl("Qwen2VL", {**HEADS, "embed_dim": 32, "patch_size": 14})


@maker("Qwen2_5_VLForConditionalGeneration", "image", "video", metadata=True, kwargs=PIXELS)
def qwen2_5_vl() -> Sequence[Any]:
    return _qwen_vl("Qwen2_5_VL", QWEN_VISION)


SAMPLED = {"fps": 1.0, "do_sample_frames": True}
OF_QWEN3 = {"frames": (2, 12), "metadata": True, "kwargs": [*PIXELS, SAMPLED]}


@maker("Qwen3VLForConditionalGeneration", "image", "video", **OF_QWEN3)
def qwen3_vl() -> Sequence[Any]:
    return _qwen_vl("Qwen3VL", QWEN3_VISION, hf.Qwen3VLVideoProcessor)


# --- Google


GEMMA_TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "audio_token": "<audio_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
GEMMA_TEXT = {**TEXT, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0}


@maker("Gemma3nForConditionalGeneration", "image", "audio")
def gemma3n() -> Sequence[Any]:
    text = make_tokenizer("\n", "\n\n", "\n\n\n", "\n\n\n\n", named=GEMMA_TOKENS)
    vocabulary = {"hidden_size": 32, "vocab_size": 8}
    config = hf.Gemma3nConfig(
        vision_config={**vocabulary, "vocab_offset": 600},
        audio_config={**vocabulary, "vocab_offset": 608, "conf_num_hidden_layers": 2},
        text_config={**GEMMA_TEXT, "laurel_rank": 4},
        audio_soft_tokens_per_image=8,
        vision_soft_tokens_per_image=4,
        **find_ids(text, **{f"{key}_id": token for key, token in GEMMA_TOKENS.items()}),
    )
    images = hf.SiglipImageProcessor(size=square(56))
    return config, hf.Gemma3nProcessor(
        hf.Gemma3nAudioFeatureExtractor(), images, text, audio_seq_length=8, image_seq_length=4
    )


OF_GEMMA4 = {"metadata": True, "kwargs": [{"max_soft_tokens": 140}]}


@maker("Gemma4ForConditionalGeneration", "image", "video", "audio", **OF_GEMMA4)
def gemma4() -> Sequence[Any]:
    named = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    }
    text = make_tokenizer(named=named)
    shape = {"patch_size": 4, "pooling_kernel_size": 3}
    # a name that does not end as the other ones
    tokens = {"eoa_token_index": "<audio|>"}
    for key, token in named.items():
        if key != "eoa_token":
            tokens[f"{key}_id"] = token
    config = hf.Gemma4Config(
        vision_config={**LAYERS, **shape, "default_output_length": 70},
        audio_config={"hidden_size": 32, "num_hidden_layers": 2},
        text_config=GEMMA_TEXT,
        **find_ids(text, **tokens),
    )
    return config, hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(),
        hf.Gemma4ImageProcessor(**shape, max_soft_tokens=70),
        text,
        hf.Gemma4VideoProcessor(**shape),
        image_seq_length=70,
    )


# --- Idefics and others whose images become tiles


@maker("Cohere2VisionForConditionalGeneration", "image", kwargs=[{"max_patches": 2}])
def cohere2_vision() -> Sequence[Any]:
    text = make_tokenizer(
        named={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        }
    )
    config = hf.Cohere2VisionConfig(
        vision_config=hf.SiglipVisionConfig(**{**VISION, "image_size": 32, "patch_size": 4}),
        text_config=hf.Cohere2Config(**TEXT),
        image_token_id=text.image_token_id,
        downsample_factor=2,
    )
    # A tile has patch_size ** 2 tokens, which is right where the tile's side is downsample_factor *
    # patch_size ** 2.
    shape = {"size": square(32), "patch_size": 4, "downsample_factor": 2}
    images = hf.Cohere2VisionImageProcessor(**shape, min_patches=1, max_patches=4)
    return config, hf.Cohere2VisionProcessor(images, text)


@maker("Llama4ForConditionalGeneration", "image", kwargs=[{"max_patches": 2}])
def llama4() -> Sequence[Any]:
    text = make_tokenizer(
        "<|image|>",
        "<|patch|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )
    vision = hf.Llama4VisionConfig(**VISION, pixel_shuffle_ratio=0.5, vision_output_dim=32)
    token_ids = find_ids(
        text,
        image_token_index="<|patch|>",
        boi_token_index="<|image_start|>",
        eoi_token_index="<|image_end|>",
    )
    config = hf.Llama4Config(
        vision_config=vision,
        text_config=hf.Llama4TextConfig(**TEXT, intermediate_size_mlp=64, num_local_experts=2),
        **token_ids,
    )
    images = hf.Llama4ImageProcessor(size=square(56), max_patches=4)
    return config, hf.Llama4Processor(images, text, patch_size=14, pixel_shuffle_ratio=0.5)


PATCHES = [{"max_patches": 2}, {"crop_to_patches": False}]


@maker("InternVLForConditionalGeneration", "image", "video", kwargs=PATCHES)
def internvl_hf() -> Sequence[Any]:
    text = make_tokenizer(
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    )
    vision = {**VISION, "image_size": [56, 56], "patch_size": [14, 14]}
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**vision),
        text_config=hf.Qwen2Config(**TEXT),
        image_token_id=text.context_image_token_id,
        downsample_ratio=0.5,
    )
    images = hf.GotOcr2ImageProcessor(
        size=square(56), crop_to_patches=True, min_patches=1, max_patches=4
    )
    videos = hf.InternVLVideoProcessor(size=square(56))
    return config, hf.InternVLProcessor(images, text, videos, image_seq_length=4)


SPLITTING = [{"max_image_tokens": 8}, {"do_image_splitting": False}, {"use_thumbnail": False}]


@maker("Lfm2VlForConditionalGeneration", "image", side=(28, 280), kwargs=SPLITTING)
def lfm2_vl() -> Sequence[Any]:
    cells = []
    for row in range(1, 5):
        for column in range(1, 5):
            cells.append(f"<|img_row_{row}_col_{column}|>")
    named = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }
    text = make_tokenizer(*cells, named=named)
    tiles = {
        "min_tiles": 2,
        "max_tiles": 4,
        "tile_size": 64,
        "use_thumbnail": True,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "do_image_splitting": True,
        "downsample_factor": 2,
        "encoder_patch_size": 16,
        "max_num_patches": 64,
    }
    vision = {"model_type": "siglip2_vision_model", **LAYERS, "patch_size": 16, "num_patches": 16}
    layers = ["conv", "full_attention"]
    config = hf.Lfm2VlConfig(
        vision_config=vision,
        text_config={"model_type": "lfm2", **TEXT, "layer_types": layers},
        image_token_id=text.image_token_id,
        **tiles,
    )
    return config, hf.Lfm2VlProcessor(hf.Lfm2VlImageProcessor(**tiles), text)


@maker("Glm4vForConditionalGeneration", "image", "video", metadata=True, kwargs=PIXELS[2:])
def glm4v() -> Sequence[Any]:
    marks = {
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    named = {"image_token": "<|image|>", "video_token": "<|video|>"}
    text = make_tokenizer(*marks.values(), named=named)
    size = {"image_size": 112, "patch_size": 14, "out_hidden_size": 32}
    config = hf.Glm4vConfig(
        vision_config={**LAYERS, **HEADS, **size},
        text_config=QWEN_TEXT,
        **find_ids(text, **marks, image_token_id="<|image|>", video_token_id="<|video|>"),
    )
    shape = {
        "patch_size": 14,
        "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112 * 2},
    }
    images = hf.Glm4vImageProcessor(**shape)
    videos = hf.Glm4vVideoProcessor(**shape)
    return config, hf.Glm4vProcessor(images, text, videos)


# --- Speech


def _omni(
    family: str, vision: Mapping[str, Any], pads: Sequence[str], ends: Mapping[str, str]
) -> Sequence[Any]:
    """Return a checkpoint of the classes whose names begin with a family.

    Args:
        pads: names of the tokens of images, audios and videos.
        ends: what the tokens around vision and audio end with, by "bos" and "eos".
    """
    kinds = ("image", "audio", "video")
    named = {f"{kind}_token": f"<|{pad}|>" for kind, pad in zip(kinds, pads, strict=True)}
    for kind in ("vision", "audio"):
        for end, suffix in ends.items():
            named[f"{kind}_{end}_token"] = f"<|{kind}_{suffix}|>"
    text = make_tokenizer(named=named)
    audio = {
        "num_mel_bins": 16,
        "d_model": 32,
        "output_dim": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
    }
    thinker = {"vision_config": vision, "audio_config": audio, "text_config": QWEN_TEXT}
    for kind in kinds:
        token_id = text.convert_tokens_to_ids(named[f"{kind}_token"])
        thinker[f"{kind}_token_index"] = token_id
        thinker[f"{kind}_token_id"] = token_id
    for kind in ("vision", "audio"):
        thinker[f"{kind}_start_token_id"] = getattr(text, f"{kind}_bos_token_id")
        thinker[f"{kind}_end_token_id"] = getattr(text, f"{kind}_eos_token_id")
    token = (2 * vision["patch_size"]) ** 2
    # of videos, whatever the checkpoint says
    shape = {
        "size": {"shortest_edge": 128 * token, "longest_edge": 768 * token},
        "patch_size": vision["patch_size"],
    }
    make_config = getattr(hf, f"{family}Config")
    config = make_config(thinker_config=thinker, enable_audio_output=False)
    images = hf.Qwen2VLImageProcessor(**shape)
    videos = hf.Qwen2VLVideoProcessor(**shape)
    make_processor = getattr(hf, f"{family}Processor")
    return config, make_processor(images, videos, make_whisper_features(), text)


# the last: as many audios as videos, at the same places
OMNI_OPTIONS = [*PIXELS, {"use_audio_in_video": True}]


@maker("Qwen2_5OmniModel", "image", "video", "audio", kwargs=OMNI_OPTIONS)
def qwen2_5_omni() -> Sequence[Any]:
    pads, ends = ["IMAGE", "AUDIO", "VIDEO"], {"bos": "bos", "eos": "eos"}
    return _omni("Qwen2_5Omni", QWEN_VISION, pads, ends)


@maker("Qwen3OmniMoeForConditionalGeneration", "image", "video", "audio", kwargs=OMNI_OPTIONS)
def qwen3_omni() -> Sequence[Any]:
    pads, ends = ["image_pad", "audio_pad", "video_pad"], {"bos": "start", "eos": "end"}
    return _omni("Qwen3OmniMoe", QWEN3_VISION, pads, ends)


@maker("WhisperForConditionalGeneration", "audio", options={"max_model_len": 64})
def whisper() -> Sequence[Any]:
    text = make_tokenizer("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
    config = hf.WhisperConfig(
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        vocab_size=512,
        d_model=32,
        num_mel_bins=16,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **find_ids(text, decoder_start_token_id="<|startoftranscript|>"),
    )
    return config, hf.WhisperProcessor(make_whisper_features(), text)


@maker("AudioFlamingo3ForConditionalGeneration", "audio")
def audioflamingo3() -> Sequence[Any]:
    text = make_tokenizer("<sound>")
    config = hf.AudioFlamingo3Config(
        audio_config={**LAYERS, "num_mel_bins": 16},
        text_config={"model_type": "qwen2", **TEXT},
        **find_ids(text, audio_token_id="<sound>"),
    )
    return config, hf.AudioFlamingo3Processor(make_whisper_features(), text, max_audio_len=6)


# --- vLLM's own processors: the checkpoint names a configuration class of its own


class ChatConfig(hf.PretrainedConfig):
    """What remote configurations have in common: parts, one of which is the language model's."""

    model_type = "zoo"

    def __init__(self, **fields):  # type: ignore[no-untyped-def]
        parts = {}
        for key in list(fields):
            if key.endswith("_config"):
                parts[key] = dict(fields.pop(key))
        super().__init__(**fields)
        for key, part in parts.items():
            if part.get("model_type") in CONFIG_MAPPING:
                setattr(self, key, AutoConfig.for_model(**part))
            else:
                setattr(self, key, hf.PretrainedConfig(**part))
        self.text_config = getattr(self, "llm_config", getattr(self, "text_config", None))


def _copy_class(module: str, auto: str, cls: type) -> tuple[dict[str, str], dict[str, str]]:
    """Return a class of this module as a file of the checkpoint, and its entry of auto_map."""
    head = (
        "import transformers as hf\nfrom transformers import AutoConfig\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n\n\n"
    )
    return {f"{module}.py": head + inspect.getsource(cls)}, {auto: f"{module}.{cls.__name__}"}


def _chat(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return the files of a remote configuration."""
    files, auto = _copy_class("configuration_zoo", "AutoConfig", ChatConfig)
    config = {"model_type": model_type, "auto_map": auto, "torch_dtype": "float32"} | fields
    return {**files, "config.json": config}


QWEN2 = {"model_type": "qwen2", **TEXT}
TILES = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 56,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 4,
    "use_thumbnail": True,
    "vision_config": {"model_type": "intern_vit_6b", **VISION},
}


@maker("H2OVLChatModel", "image", kwargs=TILE_OPTIONS)
def h2ovl() -> Sequence[Any]:
    text = make_tokenizer("<img>", "</img>", "<IMG_CONTEXT>")
    return _chat("h2ovl_chat", **TILES, use_msac=True, llm_config=QWEN2), text


@maker("SkyworkR1VChatModel", "image", kwargs=TILE_OPTIONS)
def skywork_r1v() -> Sequence[Any]:
    text = make_tokenizer("<img>", "</img>", "<IMG_CONTEXT>")
    return _chat("skywork_chat", **TILES, llm_config=QWEN2), text


@maker("NVLM_D", "image", kwargs=TILE_OPTIONS)
def nvlm_d() -> Sequence[Any]:
    text = make_tokenizer("<|vision_pad|>", "</Image>")
    return _chat("NVLM_D", **TILES, llm_config=QWEN2), text


@maker("Ovis", "image", kwargs=[{"max_partition": 4}])
def ovis() -> Sequence[Any]:
    text = make_tokenizer("<image>", "<|image_pad|>")
    visual_tokenizer = {
        "model_type": "siglip_visual_tokenizer",
        "hidden_stride": 2,
        "vocab_size": 64,
        "backbone_config": {"model_type": "siglip_vision_model", **VISION},
    }
    config = {
        "model_type": "ovis",
        "hidden_size": 32,
        "llm_config": QWEN2,
        "visual_tokenizer_config": visual_tokenizer,
    }
    return {"config.json": config}, text, hf.SiglipImageProcessor(size=square(56))


@maker("Ovis2_5", "image", "video")
def ovis2_5() -> Sequence[Any]:
    # min_pixels and max_pixels, which the processor takes, cannot be asked for: they are dropped,
    # or, in images_kwargs, refused, as Ovis2_5ProcessorKwargs does not declare them.
    vision = {**VISION, "hidden_stride": 2, "temporal_patch_size": 1}
    text = make_tokenizer("<image>", "<video>", "<|image_pad|>")
    parts = {"vit_config": vision, "llm_config": {**QWEN2, "model_type": "qwen3"}}
    return _chat("ovis2_5", visual_vocab_size=64, **parts), text, hf.SiglipImageProcessor()


@maker("IsaacForConditionalGeneration", "image", kwargs=[{"vision_min_num_patches": 16}])
def isaac() -> Sequence[Any]:
    # vLLM's image processor has these limits whatever the configuration says.
    config = {
        "model_type": "isaac",
        "vision_max_num_patches": 6144,
        "vision_min_num_patches": 256,
        "pixel_shuffle_scale": 2,
        "vision_config": {**VISION, "patch_size": 16, "num_patches": 64},
        "text_config": TEXT,
    }
    return {"config.json": config}, make_tokenizer("<image>", "<|image_pad|>")


@maker("Step3VLForConditionalGeneration", "image", side=(56, 800), kwargs=[{"enable_patch": False}])
def step3_vl() -> Sequence[Any]:
    text = make_tokenizer(
        "<im_start>",
        "<im_end>",
        "<patch_start>",
        "<patch_end>",
        "<patch_newline>",
        named={"image_token": "<im_patch>"},
    )
    config = {"model_type": "step3_vl", "vision_config": VISION, "text_config": TEXT}
    return {"config.json": {**config, "image_token_id": text.image_token_id}}, text


@maker("DeepseekOCRForCausalLM", "image")
def deepseek_ocr() -> Sequence[Any]:
    config = json.loads((FOLDER / "deepseek_vl2" / "checkpoint" / "config.json").read_text())
    processor = {"processor_class": "DeepseekOCRProcessor"}
    text = make_tokenizer("<image>", pad_token="<｜▁pad▁｜>")
    return {"config.json": config, "processor_config.json": processor}, text


# --- MiniCPM: a reduced image processor of theirs, which lives in the checkpoint


class MiniCPMOProcessor(hf.ProcessorMixin):
    """vLLM takes its parts and makes a processor of its own of them."""

    attributes = ("image_processor", "feature_extractor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    feature_extractor_class = "WhisperFeatureExtractor"
    tokenizer_class = "AutoTokenizer"


@maker("MiniCPMO", "image", "video", "audio", kwargs=SLICES)
def minicpmo() -> Sequence[Any]:
    """MiniCPM-V with a feature extractor, and a tokenizer that names its marks without "_token"."""
    named = {
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "audio_start": "<|audio_start|>",
        "audio_end": "<|audio_end|>",
        "spk_start": "<|spk_bos|>",
        "spk_end": "<|spk_eos|>",
    }
    files = read_stored("minicpmv")
    config = json.loads(files["config.json"])
    config["architectures"] = ["MiniCPMO"]
    config["audio_config"] = {"model_type": "whisper", "num_mel_bins": 16}
    config["audio_chunk_length"] = 1.0
    config["audio_pool_step"] = 2
    source, auto = _copy_class("processing_zoo", "AutoProcessor", MiniCPMOProcessor)
    images = json.loads(files["preprocessor_config.json"])
    images["feature_extractor_type"] = "WhisperFeatureExtractor"
    images["feature_size"] = 16
    images["processor_class"] = "MiniCPMOProcessor"
    images["auto_map"] |= auto
    text = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES, "extra_special_tokens": named}
    # each part overwrites files of the one before it
    changes = {"preprocessor_config.json": images, "tokenizer_config.json": text}
    stored_files = files | {"config.json": config}
    return [stored_files, make_tokenizer(named=named), source | changes]


SLICE_OPTIONS = [{"max_slice_nums": 1}, {"downsample_mode": "4x"}]


@maker("MiniCPMV4_6ForConditionalGeneration", "image", "video", kwargs=SLICE_OPTIONS)
def minicpmv4_6() -> Sequence[Any]:
    named = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    }
    text = make_tokenizer(named=named)
    config = hf.MiniCPMV4_6Config(
        vision_config={**VISION, "insert_layer_id": 0},
        text_config={"model_type": "qwen3", **TEXT},
        image_size=56,
        **find_ids(text, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
    )
    shape = {"max_slice_nums": 4, "scale_resolution": 56, "patch_size": 14}
    images = hf.MiniCPMV4_6ImageProcessor(**shape)
    videos = hf.MiniCPMV4_6VideoProcessor(**shape)
    return config, hf.MiniCPMV4_6Processor(images, videos, text)


# --- vLLM's Transformers modelling backend

REFUSED = ("whisper", "blip2", "gemma3n", "qwen3_omni")
"""What that backend does not serve, and says so: an encoder with a decoder, and processors of
transformers that do not tell where their placeholders are."""

SERVED: list[str] = []
"""What that backend serves."""

for name, entry in list(ZOO.items()):
    if hasattr(hf, entry.architecture) and name not in REFUSED:
        SERVED.append(name)
        options = {**entry.options, "model_impl": "transformers"}
        ZOO[f"transformers/{name}"] = replace(entry, options=options)
