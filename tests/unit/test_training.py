"""Specs as processors of transformers, without vLLM."""

import inspect
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.series.configuration import WavesConfig
from examples.series.spec import WAVES
from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from mmkit import (
    Image,
    InputError,
    MmkitError,
    ModelSpec,
    SpecError,
    Tensor,
    batched,
    between,
    embed,
    flat,
    insert,
    item,
    replace,
)
from mmkit.language import names
from mmkit.training import Collator, MultiModalMixin, Processor

from .common import CONFIG, expect_refusal, make_modality

WORDS = ["<pad>", "<series>", "<patch>", "look", "at", "<s>", "user:", "assistant:"]
PAD, SERIES, PATCH, LOOK, AT = range(5)
TYPED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<series>' }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"


def tokenizer(**options):
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<series>", "<patch>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", **options)


class TokenizerWithStart(PreTrainedTokenizerFast):
    """Begins texts with <s>."""

    def encode(self, text, add_special_tokens=True):
        return [5] * add_special_tokens + super().encode(text, add_special_tokens=False)


def waves(**options):
    return WAVES.hf_processor(WavesConfig(vocab_size=8), tokenizer(**options))


def steps(count):
    return torch.arange(count, dtype=torch.float32)[:, None]


TEXTS = st.lists(st.sampled_from(["look", "at", 1, 5, 9]), min_size=1, max_size=4)
"""Words, and lengths of series."""
SAMPLES = st.tuples(TEXTS, st.lists(st.sampled_from(["look", "at", "<s>"]), min_size=1, max_size=3), st.booleans())


@given(st.lists(SAMPLES, min_size=1, max_size=4), st.sampled_from(["left", "right"]), st.sampled_from([1, 4]))
def test_a_batch_is_its_samples_padded(drawn, side, multiple):
    """Of texts and of ids; the labels are the answers."""
    samples, rows = [], []
    for text, answer, as_ids in drawn:
        series = [steps(part) for part in text if part not in WORDS]
        prompt, said = [part if part in WORDS else "<series>" for part in text], [*map(WORDS.index, answer)]
        written = {"input_ids": [*map(WORDS.index, prompt)]} if as_ids else {"text": " ".join(prompt)}
        samples.append({**written, "series": series, "answer": said if as_ids else " ".join(answer)})
        rows.append(([i for p in text for i in ([WORDS.index(p)] if p in WORDS else [PATCH] * -(-p // 4))], said))
    batch = Collator(waves(), padding_side=side, pad_to_multiple_of=multiple)(samples)
    width = max(len(ids) + len(said) for ids, said in rows)
    width += -width % multiple
    tensors = [batch[name].tolist() for name in ("input_ids", "labels", "attention_mask", "mm_token_type_ids")]
    for row, labels, mask, types, places, (ids, said) in zip(*tensors, batch["placeholders"], rows, strict=True):
        gap = width - len(ids) - len(said)
        before, after = (gap, 0) if side == "left" else (0, gap)
        assert row == [PAD] * before + ids + said + [PAD] * after
        assert labels == [-100] * (before + len(ids)) + said + [-100] * after
        assert mask == [0] * before + [1] * (width - gap) + [0] * after
        assert types == [4 * (token == PATCH) for token in row]
        patches = [position for at in places for position in range(at.start, at.end)]
        assert patches == [position for position, token in enumerate(row) if token == PATCH]
    assert [len(one) for one in batch.get("series", ())] == [n for text, *_ in drawn for n in text if n not in WORDS]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_one_shape(side):
    """It is padded to a length, by the side of the tokenizer."""
    ids = torch.tensor([[LOOK, SERIES]] * 2)
    batch = waves(padding_side=side)(input_ids=ids, series=[steps(3), [steps(3)]], padding="max_length", max_length=3)
    assert batch["series"].shape == (2, 3, 1)
    assert batch["attention_mask"].tolist() == [[[1, 1, 0], [0, 1, 1]][side == "left"]] * 2
    assert batch.to(torch.float64)["series"].dtype == torch.float64


def test_fields_and_types_of_several_modalities():
    sized = dict(item=Tensor(shape=(between(1, 4), 2)), update=replace(9))
    spec = ModelSpec(
        "spec",
        make_modality("a", **sized, fields={"rows": flat(item.shape[0]), "scale": batched()}, process=lambda items, s: {
            "rows": torch.cat(items), "scale": [0.5] * len(items)
        }),
        make_modality(
            "b", layout=embed(6) + 8, update=insert(at="start"), embeds=True, fields={"x": batched(hidden=True)}
        ),
    )  # fmt: skip
    processor = spec.hf_processor(CONFIG)
    one = torch.ones(2, 2)
    batch = processor(input_ids=[[9, 9], [9]], a=[[one, one], one], b=[None, one], padding=True)
    assert batch["rows"].shape == (6, 2)
    assert batch["scale"] == [0.5] * 3
    assert batch["input_ids"].tolist() == [[5, 5, 0], [6, 8, 5]]
    assert batch["mm_token_type_ids"].tolist() == [[4, 4, 0], [5, 0, 4]]
    assert "x" not in batch
    wide = make_modality("w", item=Tensor(shape=(1, between(1, 3))), fields={"w": flat(1)})
    padded = ModelSpec("spec", wide).hf_processor(CONFIG)(input_ids=[5, 5], w=[torch.ones(1, 3), torch.ones(1, 1)])
    assert padded["w"].tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]], "flat fields get zeros, as in vLLM"
    rows = processor(input_ids=[1], b={"b_embeds": torch.ones(1, 3)})["b_embeds"]
    assert [part.tolist() for part in rows] == [[[1.0] * 3]]


def test_pictures_go_by_either_name():
    processor = SHOWN.hf_processor(CONFIG)
    for name in ("image", "images"):
        batch = processor(input_ids=torch.tensor([5]), **{name: PICTURE})
        assert (batch["x"], batch["mm_token_type_ids"].tolist()) == ([1], [[1]])
    assert processor(input_ids=[])["input_ids"].dtype == torch.int64


def test_a_text_with_or_without_the_tokens_that_the_tokenizer_adds():
    begins = TokenizerWithStart(tokenizer_object=tokenizer()._tokenizer, pad_token="<pad>")
    processor = WAVES.hf_processor(WavesConfig(vocab_size=8), begins)
    written = {None: [5, LOOK, PATCH], True: [5, LOOK, PATCH], False: [LOOK, PATCH]}
    for added, ids in written.items():
        batch = processor("look <series>", series=steps(3), add_special_tokens=added)
        assert batch["input_ids"].tolist() == [ids]
    assert processor("at", add_special_tokens=False, truncation=False)["input_ids"].tolist() == [[AT]]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_ids_of_an_answer_in_any_container(kind):
    batch = Collator(waves())([{"text": "look", "answer": kind([LOOK, AT])}])
    assert batch["labels"].tolist() == [[-100, LOOK, AT]]


def test_prompts_of_encoder_and_decoder_and_none():
    encoded = ModelSpec("spec", make_modality(update=insert(at="start")), decoder_prompt=lambda s: [3, *s.prompt])
    batch = encoded.hf_processor(CONFIG)(input_ids=[1], m=torch.ones(2, 2))
    assert (batch["input_ids"].tolist(), batch["decoder_input_ids"].tolist()) == ([[5, 1]], [[3, 1]])
    raw = ModelSpec("spec", make_modality(layout=None, update=None, tokens=0)).hf_processor(CONFIG)
    assert raw(m=torch.ones(2, 2))["x"].shape == (1, 2, 2)
    masked = make_modality(layout=None, update=None, tokens=0, fields={"attention_mask": batched()})
    batch = ModelSpec("spec", masked).hf_processor(CONFIG)(m=torch.ones(2, 2))
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (1, 1), "attention_mask": (1, 2, 2)
    }, "a model that reads no prompt has a mask of its own"  # fmt: skip


def parameters(function):
    """The names of the parameters of a function, but for `self` and those that take any name."""
    known = inspect.signature(function).parameters.values()
    return {one.name for one in known if one.kind is not one.VAR_KEYWORD} - {"self"}


BEGUN = ModelSpec("spec", make_modality(update=insert(at="start")), decoder_prompt=lambda s: [3, *s.prompt])
BATCHES = [
    Collator(waves())([{"input_ids": [LOOK], "answer": [AT]}]),
    BEGUN.hf_processor(CONFIG)(input_ids=[1]),
]


def test_names_are_reserved_for_what_has_them():
    assert {*names.CALL_ARGUMENTS} == parameters(Processor.__call__)
    assert {*names.SAMPLE_KEYS} == parameters(Processor.split_samples) | {"answer"}
    assert {*names.BATCH_KEYS} == {key for batch in BATCHES for key in batch}
    assert parameters(LlamaForCausalLM.forward) <= {*names.BATCH_KEYS, *names.LANGUAGE_MODEL_ARGUMENTS}


WORDS_OF_PYTHON = st.sampled_from(["self", "x", "audio", "images", "conversation", "class", "None", "labels"])
ANY_NAME = WORDS_OF_PYTHON | st.sampled_from(sorted({*names.CALL_ARGUMENTS, *names.SAMPLE_KEYS, *names.BATCH_KEYS}))


@given(ANY_NAME, ANY_NAME)
def test_a_name_is_refused_or_harms_nothing(name, field):
    """That of a modality and that of a field: what else is in the batch, and what comes of the item, stays."""

    def batches(spec, name):
        processor = spec.hf_processor(CONFIG)
        sample = {"input_ids": [8, 5], name: MATRIX}
        return processor(**sample), Collator(processor)([{**sample, "answer": [9]}])

    try:
        spec = ModelSpec("spec", make_modality(name, update=replace(5), fields={field: batched()}))
    except SpecError:
        return
    plain = ModelSpec("spec", make_modality("plain", update=replace(5), fields={"plain": batched()}))
    for got, expected in zip(batches(spec, name), batches(plain, "plain"), strict=True):
        assert torch.equal(got.pop(field), expected.pop("plain"))
        got.pop("placeholders"), expected.pop("placeholders")
        assert {key: value.tolist() for key, value in got.items()} == {k: v.tolist() for k, v in expected.items()}


@pytest.mark.parametrize("template", [TYPED, PLAIN])
def test_messages(template):
    processor = waves(chat_template=template)
    content = [{"type": "series", "series": steps(5)}, {"type": "text", "text": "look"}]
    message = {"role": "user", "content": content}
    text = processor.apply_chat_template([message], add_generation_prompt=True)
    assert text.split() == ["user:", "<series>", "look", *["assistant:"] * (template == TYPED)]
    asked = dict(tokenize=True, return_dict=True, processor_kwargs={"padding": True})
    batch = processor.apply_chat_template([[message], [{**message, "content": content[1:]}]], **asked)
    assert batch["input_ids"].tolist() == [[6, PATCH, PATCH, LOOK], [6, LOOK, PAD, PAD]]
    assert batch["series"].shape == (1, 5, 1)
    assert processor.apply_chat_template([message], tokenize=True).tolist() == [[6, PATCH, PATCH, LOOK]]
    assert content[0]["series"] is not None, "the messages are not changed"


NUMBERED = ModelSpec("spec", make_modality(update=replace(9)))
TEXTLESS = ModelSpec("spec", make_modality(update=insert(at="start"), embeds=True))
SHOWN = ModelSpec("spec", make_modality("image", item=Image((4, 4)), process=lambda items, s: {"x": [1] * len(items)}))
PICTURE, ROWS, MATRIX = PILImage.new("RGB", (3, 2)), {"m_embeds": torch.ones(1, 3)}, torch.ones(2, 2)


def collated(**sample):
    Collator(waves())([sample])


def told(processor, *content):
    processor.apply_chat_template([{"role": "user", "content": content}])


def spoken(**message):
    waves(chat_template=PLAIN).apply_chat_template([{"role": "user", **message}])


# fmt: off
REFUSED = [
    ("waves.prompt: expected a text or input_ids, got neither.", lambda: waves()()),
    ("waves.prompt: expected a text or input_ids, got both.", lambda: waves()(text="at", input_ids=[4])),
    ("waves.prompt: expected prompts of one length, got lengths [1, 2]. Write padding=True.",
     lambda: waves()(["at", "at at"])),
    ("waves.series: expected a list with the items of each of 1 prompts, got Tensor. Write None for a prompt without …",
     lambda: waves()(["at"], series=steps(3))),
    ("waves.series: expected a list with the items of each of 1 prompts, got 0 of them. Write None …",
     lambda: waves()(["at"], series=[])),
    ("waves.prompt: expected at least one prompt, got none.", lambda: waves()([])),
    ("waves, a call: expected modalities among ['series'], or text, input_ids, add_special_tokens, padding, "
     "truncation, max_length, padding_side, pad_to_multiple_of, return_tensors, got 'images'.",
     lambda: waves()("at", images=[3])),
    ("waves, a call: …, got 'text_kwargs'. Write options of the text as arguments of the call.",
     lambda: waves()("at", text_kwargs={})),
    ("waves, a call: …, got 'images_kwargs'. Options of the Hugging Face processor are kwargs= of hf_processor().",
     lambda: waves()("at", images_kwargs={})),
    ("waves.multi_modal_data: expected modalities among ['series'], got 'series_embeds'. …",
     lambda: waves()("at", series_embeds=[3])),
    ("waves.truncation: expected False, got True. Nothing is cut off, as in a server: shorten the prompt itself.",
     lambda: waves()("at", truncation=True, max_length=3)),
    ('waves.max_length: expected padding="max_length" beside it, got padding=False. Nothing is cut off, …',
     lambda: waves()("at", max_length=3)),
    ("waves.max_length: expected a number above 0, got -1.",
     lambda: waves()("at", padding="max_length", max_length=-1)),
    ("waves.pad_to_multiple_of: expected padding=True beside it, got padding=False.",
     lambda: waves()("at", pad_to_multiple_of=8)),
    ('waves.padding_side: expected "left" or "right", got \'middle\'.', lambda: waves()("at", padding_side="middle"),
     lambda: Collator(waves(), padding_side="middle")),
    ("waves.prompt: expected a text, or a list of them, got 5.", lambda: waves()(5)),
    ("waves.prompt: expected token ids, got 'at'.", lambda: waves()(input_ids="at")),
    ('waves.padding: expected a bool, "longest", or "max_length" beside max_length=, got \'some\'.',
     lambda: waves()("at", padding="some")),
    ("waves.padding: …, got 'max_length'.", lambda: waves()("at", padding="max_length")),
    ("waves.return_tensors: expected \"pt\", got 'np'.", lambda: waves()("at", return_tensors="np")),
    ("…raw items or precomputed embeddings in one batch, got both…",
     lambda: TEXTLESS.hf_processor(CONFIG)(input_ids=[[1], [1]], m=[ROWS, MATRIX])),
    ("spec.multi_modal_data: expected modalities among ['image'], got 'images'.",
     lambda: SHOWN.hf_processor(CONFIG)(input_ids=[5], image=PICTURE, images=PICTURE)),
    ("waves.samples[0]: expected a dict, got str.", lambda: Collator(waves())(["look"])),
    ("waves.samples[0]: expected keys among ['answer', 'input_ids', 'series', 'text'], got 'weight'.",
     lambda: collated(text="look", answer="at", weight=1)),
    ("waves.samples[0]: expected one prompt, got 2. Give each its sample.",
     lambda: collated(text=["look", "at"], answer="at")),
    ("waves.samples[0].answer: expected a text or token ids, got none.", lambda: collated(text="look"),
     lambda: collated(text="look", answer=None), lambda: collated(text="look", answer=""),
     lambda: collated(text="look", answer=torch.tensor([], dtype=torch.int64))),
    ("waves.samples[0].answer: …, got 5.", lambda: collated(text="look", answer=5)),
    ("waves.samples[0].answer[0]: expected a token id from 0 to 7, got 8.", lambda: collated(text="look", answer=[8])),
    ("waves.samples[0].answer[0]: …, got list [1, 2].", lambda: collated(text="look", answer=torch.tensor([[1, 2]]))),
    ("waves.samples[0].answer: expected no placeholder and no target, since items stand in the prompt, "
     "got one of waves.series.", lambda: collated(text="look", answer="at <series>"),
     lambda: collated(text="look", answer=[PATCH])),
    ("waves.series: …", lambda: collated(text="look <patch>", answer="at")),
    ("terra.conversation: expected a model with a tokenizer, got one without. Call it with ids.",
     lambda: told(TERRA.hf_processor(LlamaActionConfig(pad_token_id=31)))),
    ("waves.conversation: expected a list with at least one message, got [].",
     lambda: waves(chat_template=PLAIN).apply_chat_template([])),
    ("waves.chat_template: expected a chat template, got none. Give chat_template=.", lambda: told(waves())),
    ("waves.chat_template: expected a template, or a name among ['a'], got 'b'.",
     lambda: waves(chat_template={"a": PLAIN}).apply_chat_template([{"role": "user"}], "b")),
    ('waves.chat_template_content_format: expected "auto", "string" or "openai", got \'text\'.',
     lambda: waves(chat_template=PLAIN).apply_chat_template([{"role": "user"}], chat_template_content_format="text")),
    ('waves.conversation[0].content[0]: expected a part {"type": "text", "text": ...} or {"type": "series", '
     '"series": ...}, got type \'image\'.', lambda: told(waves(chat_template=TYPED), {"type": "image", "image": 3})),
    ("waves.conversation[0].content[0]: expected a part with a text, got 3.",
     lambda: told(waves(chat_template=TYPED), {"type": "text", "text": 3})),
    ("waves.conversation[0].content: expected a text or a list of parts, got 3.", lambda: spoken(content=3)),
    ("waves.conversation[0]: expected a message with a role and a content, got {}.",
     lambda: waves(chat_template=PLAIN).apply_chat_template([[{}]])),
    ("waves.conversation[0]: expected '<series>' for 1 item(s), got 2 of them in the texts.",
     lambda: told(waves(chat_template=PLAIN), {"type": "series", "series": 3}, "<series> <series>")),
    ("waves.conversation[0].tool_calls: expected a list of calls, got 3.",
     lambda: spoken(role="assistant", tool_calls=3)),
    ('waves.conversation[0].tool_calls[0]: expected a call {"type": "function", "function": ...}, got {}.',
     lambda: spoken(role="assistant", tool_calls=[{}])),
    ("waves.conversation[0].tool_calls[0].function.arguments: expected a JSON object, got '{'.",
     lambda: spoken(role="assistant", tool_calls=[{"function": {"arguments": "{"}}])),
    ("waves.conversation[0]: expected a role of the chat template, got developer, which it does not name. Write a …",
     lambda: spoken(role="developer")),
    ("waves.conversation: expected messages of which vLLM's chat passes all on to the template, got ['role_of'] as "
     "well, which it reads. Write the thoughts of a message as its reasoning, and leave out others.",
     lambda: waves(chat_template="{{ messages[0].role_of }}").apply_chat_template([{"role": "user", "role_of": "x"}])),
    ("waves.conversation: expected messages that the chat template takes, got TemplateError: user first.",
     lambda: waves(chat_template="{{ raise_exception('user first') }}").apply_chat_template([{"role": "user"}])),
    ("spec.conversation[0].content[0]: expected a placeholder with a text in messages, got one that is an id. Use …",
     lambda: told(NUMBERED.hf_processor(CONFIG, tokenizer(chat_template=PLAIN)), {"type": "m", "m": MATRIX})),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "provoke"), [(text, way) for text, *ways in REFUSED for way in ways])
def test_what_is_refused(sentence, provoke):
    expect_refusal(InputError, sentence, provoke)


# -- in a folder -----------------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path):
    AutoConfig.register("waves", WavesConfig, exist_ok=True)
    before = waves(chat_template=TYPED)
    (file,) = before.save_pretrained(tmp_path)
    assert file == str(tmp_path / "processor_config.json")
    after = WAVES.hf_processor_class.from_pretrained(tmp_path)
    assert (after.chat_template, after.tokenizer.get_vocab()) == (TYPED, before.tokenizer.get_vocab())
    pickled = pickle.loads(pickle.dumps(after))
    for processor in (after, pickled):
        assert type(processor) is WAVES.hf_processor_class
        assert processor("<series>", series=steps(3))["input_ids"].tolist() == [[PATCH]]
    assert "series" in after.model_input_names
    assert after.decode([LOOK, AT]) == "look at"
    assert WAVES.hf_processor_class.from_pretrained(tmp_path, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("spec", "imports"), [(ModelSpec("local", make_modality()), "torch"), (SHOWN, "..package")])
def test_a_spec_that_cannot_be_imported_is_saved_without_code(spec, imports, tmp_path, monkeypatch, caplog):
    """That of a script, or of a module that imports from above its folder."""
    (tmp_path / "above.py").write_text(f"from {imports} import thing\n")
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(tmp_path / "above.py"))
    spec.hf_processor(LlamaConfig(vocab_size=8, n=2)).save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"config.json", "processor_config.json"}
    assert "auto_map" not in (tmp_path / "saved" / "processor_config.json").read_text()
    assert spec.hf_processor_class.from_pretrained(tmp_path / "saved").spec is spec
    is_told = "above.py is not saved: it imports from folders above its own" in caplog.text
    assert is_told == (imports == "..package")


TWO = ModelSpec(
    "two",
    make_modality("a", item=Tensor((between(1, 4), 3)), layout=embed(5) * item.length, update=replace(5),
             fields={"a": batched(shape=(between(1, 4), 3)), "not_sent": batched(hidden=True)},
             process=lambda items, scope: {"a": items, "not_sent": [0] * len(items)}, embeds=embed(5) * item.rows),
    make_modality("b", item=Tensor((2,)), layout=embed(6) + 7, update=replace(6), fields={"b": batched()}),
)  # fmt: skip


class TwoForCausalLM(MultiModalMixin, LlamaForCausalLM):
    mm_spec = TWO

    def __init__(self, config):
        super().__init__(config)
        self.of_a, self.of_b = torch.nn.Linear(3, 32), torch.nn.Linear(2, 32)
        self.post_init()

    def embed_a(self, a):
        return [self.of_a(one) for one in a]

    def embed_b(self, b):
        return self.of_b(b)[:, None]


@pytest.fixture(scope="module")
def two():
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = TwoForCausalLM(LlamaConfig(vocab_size=20, **sizes, bos_token_id=1, eos_token_id=2)).eval()
    return model, TWO.hf_processor(model.config)


def test_a_model_reads_the_items_of_a_batch(two):
    model, processor = two
    a, b = [torch.randn(1, 3), torch.randn(2, 3)], torch.randn(3, 2)
    samples = [
        {"input_ids": [8, 6, 5], "a": a[:1], "b": b[:1], "answer": [9]},
        {"input_ids": [5, 6, 6, 8], "a": a[1:], "b": b[1:], "answer": [10]},
        {"input_ids": [8], "answer": [11]},
    ]
    batch = Collator(processor)(samples)
    embeds = model.get_input_embeddings()(batch["input_ids"]).clone()
    rows = [(0, 1, model.of_b(b[0])), (0, 3, model.of_a(a[0][0])), (1, 0, model.of_a(a[1][0])),
            (1, 1, model.of_a(a[1][1])), (1, 2, model.of_b(b[1])), (1, 4, model.of_b(b[2]))]  # fmt: skip
    for row, position, value in rows:
        embeds[row, position] = value
    whole = {"labels": batch["labels"], "attention_mask": batch["attention_mask"]}
    expected = LlamaForCausalLM.forward(model, inputs_embeds=embeds, **whole)
    got = model(**batch)
    assert torch.equal(got.logits, expected.logits)
    got.loss.backward()
    assert model.of_a.weight.grad.any()
    assert model.of_b.weight.grad.any()


def test_a_model_generates_after_a_padded_batch(two):
    model, processor = two
    prompts = [([8, 6, 5], [torch.randn(3, 3)], torch.randn(1, 2)), ([9, 6], None, torch.randn(1, 2))]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
    alone = [model.generate(**processor(input_ids=ids, a=a, b=b), **options)[0, -3:] for ids, a, b in prompts]
    ids, a, b = map(list, zip(*prompts, strict=True))
    together = processor(input_ids=ids, a=a, b=b, padding=True, padding_side="left")
    assert torch.equal(model.generate(**together, **options)[:, -3:], torch.stack(alone))
    embeds = processor(input_ids=ids[0], a={"a_embeds": [model.of_a(a[0][0]).detach()]}, b=b[0])
    assert torch.equal(model.generate(**embeds, **options)[0, -3:], alone[0])
    assert model.generate(torch.tensor([[8]]), **options).shape == (1, 4)


def test_what_a_model_cannot_place(two):
    model, processor = two
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    rest = {key: value for key, value in batch.items() if key not in ("mm_token_type_ids", "placeholders")}
    with pytest.raises(InputError, match=r"two: expected input_ids and mm_token_type_ids beside items, got a without"):
        model(**rest)
    with pytest.raises(MmkitError, match=r"two\.a, embed_a, item 0: expected 2 encoder rows, got 3"):
        model(**{**batch, "a": torch.randn(1, 3, 3)})
    with pytest.raises(MmkitError, match=r"two\.a, embed_a: expected 2 encoder rows in all, got 4"):
        model(**{**batch, "a": torch.randn(2, 2, 3), "placeholders": None})
