"""What the models share: a request as their own code expands it, tokenizers, and texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from mmkit import ModelSpec

Message = dict[str, Any]
"""A message of a chat; its content is a list of parts."""

FRAGMENTS = ("a", "b", " ", "  ", "\n", ".", ",", ":", "'s", "1", "<", ">", "(", "é", "USER: ", " graph", "is", "x y")
"""What texts are drawn from."""


@dataclass
class Expansion:
    """A prompt as the code of a model makes it.

    Attributes:
        ids: token ids; at the position of a row any id.
        sources: for each position the modality and the index of the item whose row stands there, or None.
        fields: by modality, what the encoder receives of each item.
    """

    ids: list[int] = field(default_factory=list)
    sources: list[tuple[str, int] | None] = field(default_factory=list)
    fields: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add_ids(self, ids: Sequence[int]) -> None:
        """Append the ids of a text."""
        self.ids += ids
        self.sources += [None] * len(ids)

    def add_rows(self, count: int, token: int, modality: str = "") -> None:
        """Append rows of the item whose fields were added last.

        Args:
            count: their number.
            token: the id that stands there.
            modality: of the item; may be left out where there is one.
        """
        name = modality or next(iter(self.fields))
        self.ids += [token] * count
        self.sources += [(name, len(self.fields[name]) - 1)] * count

    def add_tokens(self, ids: Sequence[int], row: int) -> None:
        """Append the ids of a text, in which one id stands for a row of the item whose fields were added last."""
        for token in ids:
            if token == row:
                self.add_rows(1, row)
            else:
                self.add_ids([token])

    def add_item(self, modality: str, **fields: Any) -> None:
        """Append what the encoder receives of an item."""
        self.fields.setdefault(modality, []).append(fields)


class WildModel(NamedTuple):
    """A public model.

    Attributes:
        spec: of examples/wild.
        architecture: the class that transformers and vLLM run, in the module of the model.
        make_tokenizer: returns a tokenizer with the construction of the published one, and a chat template.
        make_config: returns a config with the names of the published one, for a size of the vocabulary.
        draw: draws a chat.
        expand: what the public code makes of a chat, given the tokenizer and the config.
    """

    spec: ModelSpec
    architecture: str
    make_tokenizer: Callable[[], Any]
    make_config: Callable[[int], Any]
    draw: Callable[[random.Random], list[Message]]
    expand: Callable[[Any, Any, list[Message]], Expansion]


# -- requests ----------------------------------------------------------------------------------------------------------


def draw_text(rng: random.Random, most: int = 6) -> str:
    """Return a text of at most so many fragments; it may be empty."""
    return "".join(rng.choices(FRAGMENTS, k=rng.randint(0, most)))


def make_text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def make_item_part(modality: str, item: Any) -> dict[str, Any]:
    return {"type": modality, modality: item}


def make_message(role: str, *parts: dict[str, Any]) -> Message:
    return {"role": role, "content": list(parts)}


def collect_items(messages: Sequence[Message]) -> dict[str, list[Any]]:
    """Return the items of a chat by modality, as `multi_modal_data` has them."""
    items: dict[str, list[Any]] = {}
    for message in messages:
        for part in message["content"]:
            if part["type"] != "text":
                items.setdefault(part["type"], []).append(part[part["type"]])
    return items


def join_parts(message: Message, marks: Mapping[str, str]) -> str:
    """Return the text of a message, with a mark for each item of a modality."""
    texts = []
    for part in message["content"]:
        texts.append(part["text"] if part["type"] == "text" else marks[part["type"]])
    return "".join(texts)


# -- the conversations of Qwen and Vicuna, which many models have ------------------------------------------------------


def make_qwen_template(part: str) -> str:
    """Return Qwen's conversation in Jinja, without its tools.

    Args:
        part: an expression for what stands for a part that is no text.
    """
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% for part in message.content %}"
        "{{ part.text if part.type == 'text' else " + part + " }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


ASSISTANT = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def make_vicuna_template(system: str, part: str) -> str:
    """Return the conversation in Jinja.

    Args:
        system: what stands before the turns.
        part: an expression for what stands for a part that is no text.
    """
    return (
        "{{ bos_token }}" + system + " {% for message in messages %}"
        "{{ 'USER: ' if message.role == 'user' else 'ASSISTANT: ' }}"
        "{% for part in message.content %}{{ part.text if part.type == 'text' else " + part + " }}{% endfor %}"
        "{{ ' ' if message.role == 'user' else '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )


def write_vicuna(system: str, messages: Sequence[Message], marks: Mapping[str, str]) -> str:
    """Write a conversation that goes on with an answer.

    Args:
        system: what stands before the turns.
        messages: questions, and answers but for the last.
        marks: what stands for an item, by modality.
    """
    prompt = system + " "
    for message in messages:
        text = join_parts(message, marks)
        prompt += f"USER: {text} " if message["role"] == "user" else f"ASSISTANT: {text}</s>"
    return prompt + "ASSISTANT:"


# -- tokenizers --------------------------------------------------------------------------------------------------------

CORPUS = ["a graph of 12 nodes, as a user's (small) network: <b>x</b>", "USER: what is it? It is a graph.", "a\n\nb  c"]


def make_byte_tokenizer(special: Sequence[str], chat_template: str, bos: str = "", eos: str = "") -> Any:
    """Return a byte-level BPE, as of GPT-2, Qwen and Llama 3.

    Args:
        special: added tokens.
        chat_template: in Jinja.
        bos: the token that begins every text; without it none does.
        eos: the token that ends an answer.
    """
    model = Tokenizer.from_str(train_bpe("bytes"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=bos or None,
        eos_token=eos or special[0],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
    add_special(tokenizer, special)
    if bos:
        number = tokenizer.convert_tokens_to_ids(bos)
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def make_llama_tokenizer(special: Sequence[str], chat_template: str, bos: str = "<s>") -> Any:
    """Return a tokenizer like Llama 2's and Vicuna's, in which a text behind a special token begins with a space.

    Args:
        special: added tokens.
        chat_template: in Jinja.
        bos: the token that begins every text.
    """
    bpe = json.loads(train_bpe("pieces"))["model"]
    merges = [tuple(merge) for merge in bpe["merges"]]
    tokenizer = LlamaTokenizer(
        vocab=bpe["vocab"],
        merges=merges,
        bos_token=bos,
        legacy=True,
        add_bos_token=True,
        chat_template=chat_template,
    )
    # transformers 5 saves a tokenizer without this argument, and loads it as one that is not legacy
    tokenizer.init_kwargs["legacy"] = True
    add_special(tokenizer, special)
    return tokenizer


def add_special(tokenizer: Any, texts: Sequence[str]) -> None:
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=True) for text in texts])


@cache
def train_bpe(kind: str) -> str:
    """Return a BPE model of bytes, or of characters in which ▁ is a space, as JSON."""
    if kind == "bytes":
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = []
    else:
        model = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
        special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 60,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    model.train_from_iterator(CORPUS * 20, trainer)
    return str(model.to_str())


# -- language models ---------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""Of the configs of tiny language models."""
