"""A tiny LLaVA checkpoint with random weights, made by transformers' own classes. Nothing is downloaded."""

from pathlib import Path
from typing import Any

SPECIAL = ["<unk>", "<s>", "</s>", "<image>"]
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""The tokenizer's alphabet: one token per character, so that any ASCII text can be read back."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | upper }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def make_checkpoint(folder: Path, *, seed: int = 0, strategy: str = "default") -> Path:
    """Write config, weights, tokenizer, chat template and image processor, with the published names of the weights.

    Args:
        folder: made if it does not exist.
        seed: of the weights.
        strategy: ``vision_feature_select_strategy``: "default" (16 rows per image) or "full" (17).

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    processor = make_processor(strategy)
    tokenizer = processor.tokenizer
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=56, patch_size=14, num_hidden_layers=3, **sizes),
        text_config=LlamaConfig(
            architectures=["LlamaForCausalLM"],  # as published checkpoints say; older vLLMs do not guess it
            vocab_size=len(tokenizer),
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=32,  # the smallest that vLLM's attention on CPUs takes
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **sizes,
        ),
        image_token_index=processor.image_token_id,
        image_seq_length=16,
        vision_feature_select_strategy=strategy,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # larger than transformers' own start: each image and character must count
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.lm_head.weight[: len(SPECIAL)] = 0.0  # answers are characters
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    # transformers 5 leaves "vision_model." out, which published checkpoints have and vLLM's own class wants
    weights = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(weights).items():
        tensors[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
    save_file(tensors, weights, {"format": "pt"})
    return folder


def make_processor(strategy: str = "default") -> Any:
    """Return a `transformers.LlavaProcessor`: images of any size to 56 x 56 pixels, text to characters."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlavaProcessor, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(SPECIAL + list(CHARACTERS))}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    # transformers 4 has this one only, under the plain name
    on_the_cpu = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    images = on_the_cpu(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,  # the class token
        chat_template=CHAT_TEMPLATE,
    )
