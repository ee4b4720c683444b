"""The chat of the processor for transformers beside that of vLLM: drawn conversations and templates."""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from mmkit.testing import processors, vllm_path
from mmkit.testing.differences import find_difference
from mmkit.training.template import detect_content_format
from mmkit.vllm_api import chat
from mmkit.vllm_api.compat import find
from tests.profiles import scaled
from tools.survey.doors import Doors

NUMBERED = [f"<b_{i}>" for i in range(1, 30)]
TARGETS = ["<a>", *NUMBERED, "<image>", "<c>"]
SPECIAL = ["<unk>", "<s>", "</s>", *TARGETS, "<pa>", "<pb>", "<pi>", "<pc>"]
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


def _modality(name: str, target: Any, token: str, **options: Any) -> Modality:
    layout = embed(tok[token]) * item.length
    plain = {"item": Tensor((between(1, 4), 2)), "fields": {name: batched()}, "embeds": embed(tok[token]) * item.rows}
    return Modality(name, layout=layout, update=target, **{**plain, **options})


TWO = ModelSpec(
    "chat",
    _modality("a", replace(tok["<a>"]), "<pa>"),
    _modality("b", replace(tok["<b_{}>", item.index + 1]), "<pb>"),
    Modality(
        "image",
        item=Image((8, 8)),
        layout=embed(tok["<pi>"]),
        update=replace(tok["<image>"]),
        fields={"x": batched()},
        process=lambda items, scope: {"x": [torch.tensor(picture.size) for picture in items]},
    ),
    _modality("c", insert(at="start"), "<pc>"),
    _modality("d", replace(5 + len(SPECIAL)), "<pc>", when=False),
)
"""Placeholders of one token, of one that counts, of vLLM's own kind of part, and none; and one that is absent."""


@functools.cache
def doors() -> Doors:
    """vLLM's, of a checkpoint whose tokenizer has a token for each character, and two templates."""
    folder = Path(tempfile.mkdtemp())
    words = [*SPECIAL, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    templates = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["texts, with tools that have a type"]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = templates
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=len(words), architectures=["ChatTwo"], **sizes).save_pretrained(folder)
    config = processors.load_config_for_spec(folder, enable_mm_embeds=True)
    made = Doors(processors.make_processor(TWO.classes, config))
    made.model_class.mm_spec = TWO  # type: ignore[attr-defined]
    made.model_class.get_placeholder_str = classmethod(MultiModalModel.get_placeholder_str.__func__)  # type: ignore[attr-defined]
    return made


@functools.cache
def processor() -> Any:
    config = doors().llm.model_config
    return TWO.hf_processor(config.hf_config, doors().llm.renderer.tokenizer, dtype="float32")


@contextmanager
def _interleaving(wanted: bool) -> Iterator[None]:
    multimodal = doors().llm.model_config.multimodal_config
    multimodal.interleave_mm_strings = wanted
    try:
        yield
    finally:
        multimodal.interleave_mm_strings = False


def served(messages: Any, interleave: bool, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The ids and fields of vLLM's `LLM.chat`."""
    options["chat_template_kwargs"] = options.pop("more")
    with _interleaving(interleave), doors().use_model_class():
        doors().llm.chat([messages], SamplingParams(), use_tqdm=False, **options)
    arrived = doors().last_prompt
    if arrived["type"] == "token":
        return list(arrived["prompt_token_ids"]), {}
    outcome = vllm_path.read_outcome(arrived)
    return outcome.ids, outcome.fields


def trained(messages: Any, interleave: bool, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The ids and fields of the processor for transformers."""
    options |= options.pop("more")
    batch = processor().apply_chat_template(
        messages, tokenize=True, return_dict=True, interleave_mm_strings=interleave, **options
    )
    names = {at.modality for at in batch["placeholders"][0]}
    fields: dict[str, Any] = {}
    for name in names:
        keys = [key for key in (f"{name}_embeds", *processor().plan.modalities[name].fields) if key in batch]
        count = len(batch[keys[0]])
        fields[name] = [{key: batch[key][i] for key in keys} for i in range(count)]
    return batch["input_ids"][0].tolist(), fields


TYPED = ["", " ", *TARGETS[:4], "x<a>", "<a><a>", "<image>"]
TEXTS = st.text(st.sampled_from("ab <>\n{"), max_size=5) | st.sampled_from(TYPED)
LENGTHS = st.integers(1, 4)


@st.composite
def _item(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(["a", "a", "b", "b", "c", "image"]))
    if name == "image":
        return {"type": name, name: PILImage.new("RGB", (draw(LENGTHS), 2))}
    rows = torch.full((draw(LENGTHS), 2), draw(st.sampled_from([0.5, 1.0])))
    if draw(st.integers(0, 9)) == 0:
        return {"type": name, name: {f"{name}_embeds": rows.repeat(1, 4)}}
    return {"type": name, name: rows, **({"uuid": None} if draw(st.booleans()) else {})}


_TEXT = TEXTS.map(lambda text: {"type": "text", "text": text})
_ODD = st.sampled_from(
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
_PART = st.one_of(_TEXT, _item())
_PARTS = st.lists(_PART, max_size=4)
_ODD_PARTS = st.tuples(_PARTS, _ODD, _PARTS).map(lambda parts: [*parts[0], parts[1], *parts[2]])
CALLS = st.sampled_from(
    [
        None,
        [],
        [{"type": "function", "function": {"name": "f", "arguments": json.dumps({"x": 1})}}],
        [{"function": {"name": "f", "arguments": {"y": "z"}}}, {"function": {"name": "g", "arguments": ""}}],
    ]
)
ROLES = ["user", "assistant", "system", "tool"]
ODD_ROLES = [*ROLES, "developer"]
MORE = {
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
def _message(draw: Any) -> dict[str, Any]:
    is_odd = draw(st.integers(0, 11)) == 11
    role = draw(st.sampled_from(ODD_ROLES if is_odd else ROLES))
    parts = _ODD_PARTS if is_odd else _PARTS
    message = {"role": role, "content": draw(st.one_of(parts, parts, TEXTS, st.none()))}
    for key, values in MORE.get(role, {}).items():
        if draw(st.booleans()):
            message[key] = draw(values)
    if is_odd:
        message |= draw(st.sampled_from(ODD_ENTRIES))
    return message


_WORDS = st.sampled_from(["", "a", "b b", "\n"]).map(lambda text: {"type": "text", "text": text})
_ROWS = st.sampled_from("abc").map(lambda name: {"type": name, name: torch.ones(2, 2)})
_PLAIN = st.lists(st.one_of(_WORDS, _ROWS), min_size=3, max_size=6).map(
    lambda parts: [{"role": "user", "content": parts}]
)
"""Nothing but what every template of texts takes: items of several modalities in turn, among texts."""
CONVERSATIONS = _PLAIN | st.lists(_message(), min_size=1, max_size=4)
TOOLS = st.sampled_from([None, None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
FORMS = st.sampled_from(["auto", "auto", "string", "openai"])
CHOSEN = st.sampled_from([None, "default", "tool_use"]) | st.sampled_from([*TEMPLATES.values()])

STRICTER = (
    "Write a system message.",  # a release of vLLM makes one of a developer's
    "which it reads",  # vLLM leaves an entry out, without a word
    "function.arguments: expected",  # vLLM makes none of arguments that are no JSON
)
"""What the processor for transformers alone refuses."""


_LISTS = ["messages", "messages[1:]", "messages | list", "all", "rest", "rest[::-1]", "others"]
_CONTENTS = ["m.content", "m['content']", "m.content | list", "m.parts", "content", "x", "y", "m.content[0:1]"]
_LEAVES = st.sampled_from(
    ["{{ c.type }}", "{{ show(m.content) }}", "{{ show('a', y=m['content']) }}", "{{ tell(content) }}"]
    + [f"{{% set all = {value} %}}" for value in ("messages", "messages[1:]", "tools", "messages | list")]
    + [f"{{% set rest = {value} %}}" for value in ("all", "all[1:]", "messages is defined")]
    + ["{% set content = m.content %}", "{% set kept.of = messages %}", "{% set c = m.content %}"]
)


def _blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, min_size=1, max_size=3).map("".join)
    heads = [f"for m in {value}" for value in _LISTS] + [f"for c in {value}" for value in _CONTENTS]
    odd = ["for m, n in messages", "for c, d in m.content", "for x in all", "for m in content", "for m in x"]
    loops = st.tuples(st.sampled_from([*heads, *odd]), several)
    macros = st.tuples(st.sampled_from(["show", "tell"]), st.sampled_from(["x, y=''", "content", "m"]), several)
    return st.one_of(
        loops.map(lambda parts: f"{{% {parts[0]} %}}{parts[1]}{{% endfor %}}"),
        macros.map(lambda parts: f"{{% macro {parts[0]}({parts[1]}) %}}{parts[2]}{{% endmacro %}}"),
        several,
    )


DRAWN = st.lists(st.recursive(_LEAVES, _blocks, max_leaves=10), min_size=1, max_size=4).map("".join)
detect = find("renderers.hf:_detect_content_format", "entrypoints.chat_utils:_detect_content_format")
OTHERS = [path.read_text() for path in Path(vllm.__file__).parent.rglob("chat_templates/*.jinja")]


@settings(max_examples=scaled(200))
@given(DRAWN | st.sampled_from([*TEMPLATES.values(), *OTHERS]))
def test_a_template_has_the_form_that_a_server_sees(template: str) -> None:
    form = detect_content_format(template)
    event(form)
    assert form == detect(template, default="string")


def test_names_of_vllm_are_reserved() -> None:
    """Those of the parts of a message, and of the arguments of `forward`."""
    assert {name for name in chat._find_types_of_vllm() if not name.endswith("_embeds")} <= {*PARTS}
    known = inspect.signature(LlamaForCausalLM.forward).parameters
    assert {*FORWARD_ARGUMENTS} == {*known} - {"self"}


@settings(max_examples=scaled(250))
@given(CONVERSATIONS, CHOSEN, TOOLS, FORMS, st.booleans(), st.booleans())
def test_a_conversation_has_the_ids_of_a_server(
    messages: Any, template: Any, tools: Any, form: str, interleave: bool, begins: bool
) -> None:
    options = {"chat_template": template, "tools": tools, "chat_template_content_format": form}
    more = {"add_generation_prompt": begins, "more": {}}
    assert processor()
    expected: Any
    try:
        expected = served(_copied(messages), interleave, **options, **more)
    except Exception as error:
        expected = error
    try:
        got: Any = trained(_copied(messages), interleave, **options, **more)
    except InputError as error:
        got = error
    if isinstance(got, InputError) and any(remedy in str(got) for remedy in STRICTER):
        event("refused in training alone")
        return
    assert isinstance(expected, Exception) == isinstance(got, Exception), (expected, got)
    if isinstance(got, Exception):
        event("refused by both")
        return
    event("served and trained on")
    assert not (difference := find_difference(expected, got, "chat")), difference


def _copied(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """vLLM changes the calls of tools in their place."""
    copied = []
    for message in messages:
        calls = json.loads(json.dumps(message.get("tool_calls")))
        copied.append({**message, "tool_calls": calls} if "tool_calls" in message else message)
    return copied
