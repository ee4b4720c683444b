"""The chat of the processor for transformers beside that of vLLM: drawn conversations and templates."""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.model_executor.models.llama import LlamaForCausalLM

from mmkit import (
    Image,
    InputError,
    Modality,
    ModelSpec,
    MultiModalModel,
    Tensor,
    batched,
    between,
    embed,
    insert,
    item,
    replace,
    tok,
)
from mmkit.language.messages import PARTS
from mmkit.language.names import FORWARD_ARGUMENTS
from mmkit.testing import vllm_path
from mmkit.testing.differences import find_difference
from mmkit.training.template import detect_content_format
from mmkit.vllm_api import chat, checkpoint_processors
from mmkit.vllm_api.compat import find
from tests.profiles import scaled
from tools.survey.doors import Doors

NUMBERED = [f"<b_{i}>" for i in range(1, 30)]
TARGETS = ["<a>"] + NUMBERED + ["<image>", "<c>"]
SPECIAL = ["<unk>", "<s>", "</s>"] + TARGETS + ["<pa>", "<pb>", "<pi>", "<pc>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]

STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
TEMPLATES = {
    "texts": STRING + "{% if add_generation_prompt %}[assistant]{% endif %}",
    "texts, with tools that have a type": (
        "{% if tools %}{% for t in tools %}{{ t.type }}:{{ t['function']['name'] }} {% endfor %}{% endif %}" + STRING
    ),
    "chatml": (
        "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{%- if m['content'] is string %}{{ m['content'] }}{% else %}{%- for c in m['content'] %}"
        "{%- if c['type'] == 'text' %}{{ c['text'] }}{% elif c['type'] == 'b' %}{{ '<b_%d>' % loop.index }}"
        "{%- else %}{{ '<' + c['type'] + '>' }}{% endif %}{%- endfor %}{% endif %}"
        "{%- for t in m.tool_calls or [] %}<tool>{{ t['function'].name }}{{ t['function'].arguments | tojson }}"
        "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "items, then texts": (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'a') %}{{ '<a>' }}{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] ~ ' ' }}"
        "{% endfor %}"
        "{% endfor %}"
    ),
    "a counter": (
        "{% set count = namespace(value=0) %}{% for message in messages %}{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
        "{% if content['type'] == 'b' or 'b' in content %}{% set count.value = count.value + 1 %}"
        "{{ '<b_' ~ count.value ~ '>' }}{% elif content['type'] == 'image' %}Picture: <image>"
        "{% elif 'text' in content %}{{ content['text'] }}{% else %}<a>{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    ),
    "a macro": (
        "{% macro written(x) %}{% for c in x %}{% if c.type == 'text' %}{{ c.text }}"
        "{% else %}<{{ c.type }}>{% endif %}{% endfor %}{% endmacro %}"
        "{% for m in messages[0:] %}{{ m.role }}: {{ written(m.content) }}{% endfor %}"
    ),
    "text is defined": (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['text'] is defined %}{{ c['text'] }}{% else %}<a>{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    ),
    "get": (
        "{% set all = messages %}{% for m in all %}{% for c in m['content'] %}"
        "{% if c.get('type') == 'text' %}{{ c.text }}"
        "{% else %}<{{ c.get('type') }}>{% endif %}{% endfor %}{% endfor %}"
    ),
    "a comment": (
        "{# 'a' 'b' \"image\" .type #}{% for m in messages %}{{ m.name }}{% for c in m.content %}"
        "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    ),
    "content of its own": (
        "{% for m in messages %}{% set content = m.content %}{% if content is string %}{{ content }}{% else %}"
        "{% for c in content %}{{ c.text if c.type == 'text' else '<' ~ c.type ~ '>' }}{% endfor %}{% endif %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    ),
    "a loop of a tuple": (
        "{% for m, in messages | batch(1) %}{{ m.content }}{% for c in content %}{% endfor %}{% endfor %}"
    ),
    "a refusal": "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + STRING,
    "no template": "{% for m in messages %}",
}


def make_rows(name: str, target: Any, token: str, **options: Any) -> Modality:
    """Return a modality of up to four rows, or embeddings, with an embed() position each."""
    return Modality(
        name,
        item=Tensor((between(1, 4), 2)),
        layout=embed(tok[token]) * item.length,
        update=target,
        fields={name: batched()},
        embeds=embed(tok[token]) * item.rows,
        **options,
    )


def get_sizes(items: Any, scope: Any) -> dict[str, Any]:
    return {"x": [torch.tensor(picture.size) for picture in items]}


CHAT = ModelSpec(
    "chat",
    make_rows("a", replace(tok["<a>"]), "<pa>"),
    make_rows("b", replace(tok["<b_{}>", item.index + 1]), "<pb>"),
    Modality(
        "image",
        item=Image((8, 8)),
        layout=embed(tok["<pi>"]),
        update=replace(tok["<image>"]),
        fields={"x": batched()},
        process=get_sizes,
    ),
    make_rows("c", insert(at="start"), "<pc>"),
    make_rows("d", replace(5 + len(SPECIAL)), "<pc>", when=False),
)
"""Placeholders of one token, of one that counts, of vLLM's own kind of part, and none; and one that is absent."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has a token for each character, and two templates."""
    words = SPECIAL + CHARACTERS
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = {
        "default": TEMPLATES["chatml"],
        "tool_use": TEMPLATES["texts, with tools that have a type"],
    }
    return tokenizer


@functools.cache
def get_doors() -> Doors:
    """Return vLLM's, of a checkpoint with that tokenizer."""
    folder = Path(tempfile.mkdtemp())
    make_tokenizer().save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        architectures=["ChatTwo"],
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    config.save_pretrained(folder)
    model_config = checkpoint_processors.load_config_for_spec(folder, enable_mm_embeds=True)
    doors = Doors(checkpoint_processors.make_processor(CHAT.classes, model_config))
    doors.model_class.mm_spec = CHAT  # type: ignore[attr-defined]
    doors.model_class.get_placeholder_str = classmethod(MultiModalModel.get_placeholder_str.__func__)  # type: ignore[attr-defined]
    return doors


@functools.cache
def get_processor() -> Any:
    """Return the processor for transformers."""
    llm = get_doors().llm
    return CHAT.hf_processor(llm.model_config.hf_config, llm.renderer.tokenizer, dtype="float32")


@contextmanager
def set_interleaving(interleave: bool) -> Iterator[None]:
    multimodal = get_doors().llm.model_config.multimodal_config
    multimodal.interleave_mm_strings = interleave
    try:
        yield
    finally:
        multimodal.interleave_mm_strings = False


class Prompt(NamedTuple):
    """What comes of a conversation.

    Attributes:
        ids: of the expanded prompt.
        fields: of each item, by modality.
    """

    ids: list[int]
    fields: dict[str, Any]


def serve(messages: Any, interleave: bool, options: dict[str, Any], template_options: dict[str, Any]) -> Prompt:
    """Return what `LLM.chat` of vLLM makes of a conversation."""
    doors = get_doors()
    with set_interleaving(interleave), doors.use_model_class():
        doors.llm.chat([messages], SamplingParams(), use_tqdm=False, chat_template_kwargs=template_options, **options)
    arrived = doors.last_prompt
    if arrived["type"] == "token":
        return Prompt(list(arrived["prompt_token_ids"]), {})
    outcome = vllm_path.collect_outcome(arrived)
    return Prompt(outcome.ids, outcome.fields)


def train(messages: Any, interleave: bool, options: dict[str, Any], template_options: dict[str, Any]) -> Prompt:
    """Return what the processor for transformers makes of a conversation."""
    batch = get_processor().apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        interleave_mm_strings=interleave,
        **(options | template_options),
    )
    fields: dict[str, Any] = {}
    for name in {placeholder.modality for placeholder in batch["placeholders"][0]}:
        keys = [f"{name}_embeds"] + list(get_processor().plan.modalities[name].fields)
        columns = {key: batch[key] for key in keys if key in batch}
        (count,) = {len(column) for column in columns.values()}
        fields[name] = [{key: column[i] for key, column in columns.items()} for i in range(count)]
    return Prompt(batch["input_ids"][0].tolist(), fields)


# -- conversations -----------------------------------------------------------------------------------------------------

TYPED_TEXTS = ["", " "] + TARGETS[:4] + ["x<a>", "<a><a>", "<image>"]
TEXTS = st.text(st.sampled_from("ab <>\n{"), max_size=5) | st.sampled_from(TYPED_TEXTS)
LENGTHS = st.integers(1, 4)


def make_text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@st.composite
def item_parts(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(["a", "a", "b", "b", "c", "image"]))
    if name == "image":
        return {"type": name, name: PILImage.new("RGB", (draw(LENGTHS), 2))}
    rows = torch.full((draw(LENGTHS), 2), draw(st.sampled_from([0.5, 1.0])))
    if draw(st.integers(0, 9)) == 0:
        return {"type": name, name: {f"{name}_embeds": rows.repeat(1, 4)}}
    part = {"type": name, name: rows}
    if draw(st.booleans()):
        part["uuid"] = None
    return part


ODD_PARTS = st.sampled_from(
    [
        {"type": "text", "text": None},
        {"type": "refusal", "refusal": None},
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "so"},
        {"type": "input_text", "text": "in"},
        {"type": "text", "text": "more", "mark": 1},
        {"type": "wave", "wave": 1},
        {"type": "d", "d": torch.ones(1, 2)},
        {"type": "a"},
        {"text": "untyped"},
        "bare",
    ]
)
CONTENTS = st.lists(st.one_of(TEXTS.map(make_text_part), item_parts()), max_size=4)


@st.composite
def contents_with_an_odd_part(draw: Any) -> list[Any]:
    return draw(CONTENTS) + [draw(ODD_PARTS)] + draw(CONTENTS)


CALLS = st.sampled_from(
    [
        None,
        [],
        [{"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}],
        [{"function": {"name": "f", "arguments": {"y": "z"}}}, {"function": {"name": "g", "arguments": ""}}],
    ]
)
ROLES = ["user", "assistant", "system", "tool"]
ENTRIES = {
    "assistant": {"tool_calls": CALLS, "reasoning": st.none() | TEXTS},
    "tool": {"tool_call_id": st.none() | TEXTS},
}
"""What messages of a role have besides."""
ODD_ENTRIES = [
    {},
    {"name": "n"},
    {"name": 3},
    {"reasoning_content": "z"},
    {"weight": 1},
    {"tool_calls": [{"type": "custom", "custom": {}}]},
    {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
]


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    is_odd = draw(st.integers(0, 11)) == 11
    role = draw(st.sampled_from(ROLES + ["developer"] if is_odd else ROLES))
    contents = contents_with_an_odd_part() if is_odd else CONTENTS
    message = {"role": role, "content": draw(st.one_of(contents, contents, TEXTS, st.none()))}
    for key, values in ENTRIES.get(role, {}).items():
        if draw(st.booleans()):
            message[key] = draw(values)
    if is_odd:
        message |= draw(st.sampled_from(ODD_ENTRIES))
    return message


WORD_PARTS = st.sampled_from(["", "a", "b b", "\n"]).map(make_text_part)


@st.composite
def plain_conversations(draw: Any) -> list[dict[str, Any]]:
    """Nothing but what every template of texts takes: items of several modalities in turn, among texts."""
    content = []
    for _ in range(draw(st.integers(3, 6))):
        if draw(st.booleans()):
            content.append(draw(WORD_PARTS))
        else:
            name = draw(st.sampled_from("abc"))
            content.append({"type": name, name: torch.ones(2, 2)})
    return [{"role": "user", "content": content}]


CONVERSATIONS = plain_conversations() | st.lists(messages(), min_size=1, max_size=4)
TOOLS = st.sampled_from([None, None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
FORMS = st.sampled_from(["auto", "auto", "string", "openai"])
CHAT_TEMPLATES = st.sampled_from([None, "default", "tool_use"]) | st.sampled_from(list(TEMPLATES.values()))

STRICTER = (
    "Write a system message.",  # a release of vLLM makes one of a developer's
    "which it reads",  # vLLM leaves an entry out, without a word
    "function.arguments: expected",  # vLLM makes none of arguments that are no JSON
)
"""What only the processor for transformers refuses."""


# -- templates ---------------------------------------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [
        "{{ c.type }}",
        "{{ show(m.content) }}",
        "{{ show('a', y=m['content']) }}",
        "{{ tell(content) }}",
        "{% set all = messages %}",
        "{% set all = messages[1:] %}",
        "{% set all = tools %}",
        "{% set all = messages | list %}",
        "{% set rest = all %}",
        "{% set rest = all[1:] %}",
        "{% set rest = messages is defined %}",
        "{% set content = m.content %}",
        "{% set kept.of = messages %}",
        "{% set c = m.content %}",
    ]
)
LOOPS = [
    "for m in messages",
    "for m in messages[1:]",
    "for m in messages | list",
    "for m in all",
    "for m in rest",
    "for m in rest[::-1]",
    "for m in others",
    "for c in m.content",
    "for c in m['content']",
    "for c in m.content | list",
    "for c in m.parts",
    "for c in content",
    "for c in x",
    "for c in y",
    "for c in m.content[0:1]",
    "for m, n in messages",
    "for c, d in m.content",
    "for x in all",
    "for m in content",
    "for m in x",
]
MACROS = ["show(x, y='')", "show(content)", "show(m)", "tell(x, y='')", "tell(content)", "tell(m)"]


@st.composite
def blocks(draw: Any, inner: st.SearchStrategy[str]) -> str:
    """Put some of a template into a loop, a macro, or neither."""
    body = "".join(draw(st.lists(inner, min_size=1, max_size=3)))
    match draw(st.sampled_from(["loop", "macro", "neither"])):
        case "loop":
            return f"{{% {draw(st.sampled_from(LOOPS))} %}}{body}{{% endfor %}}"
        case "macro":
            return f"{{% macro {draw(st.sampled_from(MACROS))} %}}{body}{{% endmacro %}}"
    return body


RANDOM_TEMPLATES = st.lists(st.recursive(LEAVES, blocks, max_leaves=10), min_size=1, max_size=4).map("".join)
TEMPLATES_OF_VLLM = [path.read_text() for path in Path(vllm.__file__).parent.rglob("chat_templates/*.jinja")]
detect = find("renderers.hf:_detect_content_format", "entrypoints.chat_utils:_detect_content_format")


@settings(max_examples=scaled(200))
@given(RANDOM_TEMPLATES | st.sampled_from(list(TEMPLATES.values()) + TEMPLATES_OF_VLLM))
def test_a_template_has_the_form_that_a_server_sees(template: str) -> None:
    form = detect_content_format(template)
    event(form)
    assert form == detect(template, default="string")


def test_the_types_of_parts_of_vllm_are_reserved() -> None:
    types = {name for name in chat._find_types_of_vllm() if not name.endswith("_embeds")}
    assert types <= set(PARTS)


def test_the_arguments_of_forward_are_reserved() -> None:
    arguments = set(inspect.signature(LlamaForCausalLM.forward).parameters)
    assert set(FORWARD_ARGUMENTS) == arguments - {"self"}


@settings(max_examples=scaled(250))
@given(CONVERSATIONS, CHAT_TEMPLATES, TOOLS, FORMS, st.booleans(), st.booleans())
def test_a_conversation_has_the_ids_of_a_server(
    conversation: Any, template: Any, tools: Any, form: str, interleave: bool, has_generation_prompt: bool
) -> None:
    options = {
        "chat_template": template,
        "tools": tools,
        "chat_template_content_format": form,
        "add_generation_prompt": has_generation_prompt,
    }
    get_processor()
    expected: Prompt | Exception
    try:
        expected = serve(copy_messages(conversation), interleave, options, {})
    except Exception as error:
        expected = error
    prompt: Prompt | Exception
    try:
        prompt = train(copy_messages(conversation), interleave, options, {})
    except InputError as error:
        prompt = error

    if isinstance(prompt, InputError) and is_stricter(prompt):
        event("refused in training only")
        return
    assert isinstance(expected, Exception) == isinstance(prompt, Exception), (expected, prompt)
    if isinstance(prompt, Exception):
        event("refused by both")
        return
    event("served and trained on")
    difference = find_difference(expected, prompt, "chat")
    assert not difference, difference


def is_stricter(error: InputError) -> bool:
    """Return whether vLLM takes what the processor for transformers refuses."""
    sentence = str(error)
    return any(words in sentence for words in STRICTER)


def copy_messages(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls of tools of their own, which vLLM changes in their place."""
    messages = []
    for message in conversation:
        if "tool_calls" in message:
            message = message | {"tool_calls": json.loads(json.dumps(message["tool_calls"]))}
        messages.append(message)
    return messages
