"""Specs as processors of transformers, without vLLM."""

import inspect
import json
import math
import pickle
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from examples.llava_like.checkpoint import make_checkpoint
from examples.llava_like.spec import LLAVA_LIKE
from examples.series import CHECKPOINT
from examples.series.configuration import WavesConfig
from examples.series.encoder import PatchEncoder
from examples.series.reference import WavesForCausalLM
from examples.series.spec import WAVES
from examples.series.untrained import make_model
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
    identity,
    insert,
    item,
    replace,
)
from mmkit.document import to_document
from mmkit.language import names
from mmkit.training import Collator, DocumentProcessor, MultiModalMixin, Processor

from .common import CONFIG, make_modality, refuses

WORDS = ["<pad>", "<series>", "<patch>", "look", "at", "<s>", "user:", "assistant:"]
PAD, SERIES, PATCH, LOOK, AT = range(5)
TYPED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<series>' }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"


def make_tokenizer(**options):
    """Return a tokenizer of the words above, one token each."""
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<series>", "<patch>"])
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", **options)


class TokenizerWithStart(PreTrainedTokenizerFast):
    """Begins texts with <s>."""

    def encode(self, text, add_special_tokens=True):
        ids = super().encode(text, add_special_tokens=False)
        return [WORDS.index("<s>")] + ids if add_special_tokens else ids


def make_waves_processor(**options):
    """Return the processor of the series example, whose items become one position for each four steps."""
    return WAVES.hf_processor(WavesConfig(vocab_size=8), make_tokenizer(**options))


def make_series(count):
    """Return an item of so many steps."""
    return torch.arange(count, dtype=torch.float32)[:, None]


def make_pixel_fields(items, scope):
    return {"x": [1] * len(items)}


PICTURES = ModelSpec("spec", make_modality("image", item=Image((4, 4)), process=make_pixel_fields))
PICTURE = PILImage.new("RGB", (3, 2))
MATRIX = torch.ones(2, 2)
"""An item of `make_modality`."""
ROWS = {"m_embeds": torch.ones(1, 3)}
"""Its precomputed embeddings."""


# -- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnSample:
    """A sample of the collator.

    Attributes:
        prompt: words, and the lengths of series.
        answer: words.
        as_ids: whether prompt and answer are sent as ids.
    """

    prompt: list
    answer: list
    as_ids: bool

    @property
    def lengths(self):
        return [part for part in self.prompt if part not in WORDS]

    @property
    def answer_ids(self):
        return [WORDS.index(word) for word in self.answer]

    @property
    def expanded_ids(self):
        ids = []
        for part in self.prompt:
            if part in WORDS:
                ids.append(WORDS.index(part))
            else:
                ids += [PATCH] * math.ceil(part / 4)
        return ids

    def make(self):
        """Return the sample as a user writes it."""
        words = [part if part in WORDS else "<series>" for part in self.prompt]
        sample = {"series": [make_series(length) for length in self.lengths]}
        if self.as_ids:
            sample["input_ids"] = [WORDS.index(word) for word in words]
            sample["answer"] = self.answer_ids
        else:
            sample["text"] = " ".join(words)
            sample["answer"] = " ".join(self.answer)
        return sample


SAMPLES = st.builds(
    DrawnSample,
    prompt=st.lists(st.sampled_from(["look", "at", 1, 5, 9]), min_size=1, max_size=4),
    answer=st.lists(st.sampled_from(["look", "at", "<s>"]), min_size=1, max_size=3),
    as_ids=st.booleans(),
)


@given(st.lists(SAMPLES, min_size=1, max_size=4), st.sampled_from(["left", "right"]), st.sampled_from([1, 4]))
def test_a_batch_is_its_samples_padded(samples, side, multiple):
    """Of texts and of ids; the labels are the answers."""
    collate = Collator(make_waves_processor(), padding_side=side, pad_to_multiple_of=multiple)
    batch = collate([sample.make() for sample in samples])
    lengths = [len(sample.expanded_ids) + len(sample.answer_ids) for sample in samples]
    width = math.ceil(max(lengths) / multiple) * multiple
    for i, sample in enumerate(samples):
        ids = sample.expanded_ids
        answer = sample.answer_ids
        gap = width - lengths[i]
        before, after = (gap, 0) if side == "left" else (0, gap)
        row = batch["input_ids"][i].tolist()
        assert row == [PAD] * before + ids + answer + [PAD] * after
        assert batch["labels"][i].tolist() == [-100] * (before + len(ids)) + answer + [-100] * after
        assert batch["attention_mask"][i].tolist() == [0] * before + [1] * lengths[i] + [0] * after
        assert batch["mm_token_type_ids"][i].tolist() == [4 * (token == PATCH) for token in row]
        positions = []
        for placement in batch["placeholders"][i]:
            positions += range(placement.start, placement.end)
        assert positions == [position for position, token in enumerate(row) if token == PATCH]
    all_lengths = []
    for sample in samples:
        all_lengths += sample.lengths
    assert [len(series) for series in batch.get("series", ())] == all_lengths


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_padded_to_a_length_by_the_side_of_the_tokenizer(side):
    processor = make_waves_processor(padding_side=side)
    ids = torch.tensor([[LOOK, SERIES]] * 2)
    series = [make_series(3), [make_series(3)]]
    batch = processor(input_ids=ids, series=series, padding="max_length", max_length=3)
    mask = [0, 1, 1] if side == "left" else [1, 1, 0]
    assert batch["series"].shape == (2, 3, 1)
    assert batch["attention_mask"].tolist() == [mask] * 2
    assert batch.to(torch.float64)["series"].dtype == torch.float64


def join_rows(items, scope):
    return {"rows": torch.cat(items), "scale": [0.5] * len(items)}


MIXED = ModelSpec(
    "spec",
    make_modality(
        "a",
        item=Tensor(shape=(between(1, 4), 2)),
        update=replace(9),
        fields={"rows": flat(item.shape[0]), "scale": batched()},
        process=join_rows,
    ),
    make_modality("b", layout=embed(6) + 8, update=insert(at="start"), embeds=True, fields={"x": batched(hidden=True)}),
)


def test_a_batch_has_the_fields_and_types_of_several_modalities():
    matrix = torch.ones(2, 2)
    batch = MIXED.hf_processor(CONFIG)(
        input_ids=[[9, 9], [9]], a=[[matrix, matrix], matrix], b=[None, matrix], padding=True
    )
    assert batch["rows"].shape == (6, 2)
    assert batch["scale"] == [0.5] * 3
    assert batch["input_ids"].tolist() == [[5, 5, 0], [6, 8, 5]]
    assert batch["mm_token_type_ids"].tolist() == [[4, 4, 0], [5, 0, 4]]
    assert "x" not in batch


def test_flat_fields_of_several_widths_get_zeros_as_in_vllm():
    spec = ModelSpec("spec", make_modality("w", item=Tensor(shape=(1, between(1, 3))), fields={"w": flat(1)}))
    batch = spec.hf_processor(CONFIG)(input_ids=[5, 5], w=[torch.ones(1, 3), torch.ones(1, 1)])
    assert batch["w"].tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_a_batch_has_precomputed_embeddings_as_they_are():
    batch = MIXED.hf_processor(CONFIG)(input_ids=[1], b={"b_embeds": torch.ones(1, 3)})
    assert [rows.tolist() for rows in batch["b_embeds"]] == [[[1.0] * 3]]


def test_pictures_go_by_either_name():
    processor = PICTURES.hf_processor(CONFIG)
    for name in ("image", "images"):
        batch = processor(input_ids=torch.tensor([5]), **{name: PICTURE})
        assert batch["x"] == [1]
        assert batch["mm_token_type_ids"].tolist() == [[1]]


def test_an_empty_prompt_has_integers():
    assert PICTURES.hf_processor(CONFIG)(input_ids=[])["input_ids"].dtype == torch.int64


def test_a_text_with_or_without_the_tokens_that_the_tokenizer_adds():
    tokenizer = TokenizerWithStart(tokenizer_object=make_tokenizer()._tokenizer, pad_token="<pad>")
    processor = WAVES.hf_processor(WavesConfig(vocab_size=8), tokenizer)
    start = WORDS.index("<s>")
    expected = {None: [start, LOOK, PATCH], True: [start, LOOK, PATCH], False: [LOOK, PATCH]}
    for add_special_tokens, ids in expected.items():
        batch = processor("look <series>", series=make_series(3), add_special_tokens=add_special_tokens)
        assert batch["input_ids"].tolist() == [ids]
    assert processor("at", add_special_tokens=False, truncation=False)["input_ids"].tolist() == [[AT]]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_ids_of_an_answer_in_any_container(kind):
    batch = Collator(make_waves_processor())([{"text": "look", "answer": kind([LOOK, AT])}])
    assert batch["labels"].tolist() == [[-100, LOOK, AT]]


def begin_with_3(scope):
    return [3, *scope.prompt]


ENCODER_DECODER = ModelSpec("spec", make_modality(update=insert(at="start")), decoder_prompt=begin_with_3)


def test_a_batch_of_an_encoder_decoder_model_has_both_prompts():
    batch = ENCODER_DECODER.hf_processor(CONFIG)(input_ids=[1], m=MATRIX)
    assert batch["input_ids"].tolist() == [[5, 1]]
    assert batch["decoder_input_ids"].tolist() == [[3, 1]]


def test_a_model_without_placeholders_takes_no_prompt():
    spec = ModelSpec("spec", make_modality(layout=None, update=None, tokens=0))
    assert spec.hf_processor(CONFIG)(m=MATRIX)["x"].shape == (1, 2, 2)


def test_a_model_without_a_prompt_has_a_mask_of_its_own():
    modality = make_modality(layout=None, update=None, tokens=0, fields={"attention_mask": batched()})
    batch = ModelSpec("spec", modality).hf_processor(CONFIG)(m=MATRIX)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"].shape == (1, 2, 2)


# -- names -----------------------------------------------------------------------------------------------------------


def list_parameters(function):
    """Return the names of the parameters of a function, but for `self` and those that take any name."""
    parameter_names = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameter_names.add(parameter.name)
    return parameter_names - {"self"}


def test_arguments_of_the_processor_are_reserved():
    assert set(names.CALL_ARGUMENTS) == list_parameters(Processor.__call__)


def test_keys_of_a_sample_are_reserved():
    assert set(names.SAMPLE_KEYS) == list_parameters(Processor.split_samples) | {"answer"}


def test_keys_of_a_batch_are_reserved():
    keys = set(Collator(make_waves_processor())([{"input_ids": [LOOK], "answer": [AT]}]))
    keys.update(ENCODER_DECODER.hf_processor(CONFIG)(input_ids=[1]))
    assert set(names.BATCH_KEYS) == keys


def test_arguments_of_the_language_model_are_reserved():
    reserved = set(names.BATCH_KEYS) | set(names.LANGUAGE_MODEL_ARGUMENTS)
    assert list_parameters(LlamaForCausalLM.forward) <= reserved


NAMES = st.sampled_from(
    ["self", "x", "audio", "images", "conversation", "class", "None", "labels"]
    + sorted({*names.CALL_ARGUMENTS, *names.SAMPLE_KEYS, *names.BATCH_KEYS})
)


def make_batches(spec, name):
    """Return what the processor and the collator make of one item of a modality of this name."""
    processor = spec.hf_processor(CONFIG)
    sample = {"input_ids": [8, 5], name: MATRIX}
    return [processor(**sample), Collator(processor)([{**sample, "answer": [9]}])]


@given(NAMES, NAMES)
def test_a_name_is_refused_or_harms_nothing(name, field):
    """That of a modality and that of a field: what else is in the batch, and what comes of the item, stays."""
    try:
        spec = ModelSpec("spec", make_modality(name, update=replace(5), fields={field: batched()}))
    except SpecError:
        return
    plain = ModelSpec("spec", make_modality("plain", update=replace(5), fields={"plain": batched()}))
    for batch, expected in zip(make_batches(spec, name), make_batches(plain, "plain"), strict=True):
        assert torch.equal(batch.pop(field), expected.pop("plain"))
        del batch["placeholders"]
        del expected["placeholders"]
        assert set(batch) == set(expected)
        for key, value in batch.items():
            assert torch.equal(value, expected[key])


# -- conversations ---------------------------------------------------------------------------------------------------


CONTENT = [{"type": "series", "series": make_series(5)}, {"type": "text", "text": "look"}]


@pytest.mark.parametrize(
    ("template", "words"),
    [(TYPED, ["user:", "<series>", "look", "assistant:"]), (PLAIN, ["user:", "<series>", "look"])],
    ids=["of parts", "of texts"],
)
def test_a_conversation_is_a_prompt_by_either_form_of_template(template, words):
    processor = make_waves_processor(chat_template=template)
    message = {"role": "user", "content": CONTENT}
    assert processor.apply_chat_template([message], add_generation_prompt=True).split() == words
    ids = processor.apply_chat_template([message], tokenize=True)
    assert ids.tolist() == [[WORDS.index("user:"), PATCH, PATCH, LOOK]]
    assert CONTENT[0]["series"] is not None, "the messages are not changed"


@pytest.mark.parametrize("template", [TYPED, PLAIN], ids=["of parts", "of texts"])
def test_conversations_are_a_batch(template):
    processor = make_waves_processor(chat_template=template)
    conversations = [[{"role": "user", "content": CONTENT}], [{"role": "user", "content": CONTENT[1:]}]]
    batch = processor.apply_chat_template(
        conversations, tokenize=True, return_dict=True, processor_kwargs={"padding": True}
    )
    user = WORDS.index("user:")
    assert batch["input_ids"].tolist() == [[user, PATCH, PATCH, LOOK], [user, LOOK, PAD, PAD]]
    assert batch["series"].shape == (1, 5, 1)


# -- in a folder -----------------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path):
    AutoConfig.register("waves", WavesConfig, exist_ok=True)
    before = make_waves_processor(chat_template=TYPED)
    (file,) = before.save_pretrained(tmp_path)
    assert file == str(tmp_path / "processor_config.json")
    after = WAVES.hf_processor_class.from_pretrained(tmp_path)
    assert (after.chat_template, after.tokenizer.get_vocab()) == (TYPED, before.tokenizer.get_vocab())
    pickled = pickle.loads(pickle.dumps(after))
    for processor in (after, pickled):
        assert type(processor) is WAVES.hf_processor_class
        assert processor("<series>", series=make_series(3))["input_ids"].tolist() == [[PATCH]]
    assert "series" in after.model_input_names
    assert after.decode([LOOK, AT]) == "look at"
    assert WAVES.hf_processor_class.from_pretrained(tmp_path, dtype=torch.float64).dtype == torch.float64


def process_here(items, scope):
    return {"x": items}


OF_FUNCTION = ModelSpec("local", make_modality(process=process_here))
OF_LAMBDA = ModelSpec("local", make_modality(process=lambda items, scope: {"x": items}))


@pytest.mark.parametrize(
    ("spec", "imports", "files"),
    [
        (ModelSpec("local", make_modality()), "torch", {"mmkit.json", "processing_local.py"}),
        (OF_FUNCTION, "..package", {"mmkit.json"}),
        (OF_LAMBDA, "torch", set()),
    ],
)
def test_what_is_saved_of_a_spec_that_cannot_be_imported(spec, imports, files, tmp_path, monkeypatch, caplog):
    """That of a script, or of a module that imports from above its folder: its code is not saved, its document is."""
    (tmp_path / "above.py").write_text(f"from {imports} import thing\n")
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(tmp_path / "above.py"))
    if spec is OF_LAMBDA:
        spec = ModelSpec("local", spec["m"])  # no module has it
    spec.hf_processor(LlamaConfig(vocab_size=8, n=2)).save_pretrained(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "processor_config.json"} | files
    has_code = "auto_map" in (tmp_path / "saved" / "processor_config.json").read_text()
    assert has_code == ("processing_local.py" in files)
    assert spec.hf_processor_class.from_pretrained(tmp_path / "saved").spec is spec
    assert ("mmkit.json is not saved: spec 'local', modalities[0].process" in caplog.text) == (not files)
    has_warning = "above.py is not saved: it imports from folders above its own" in caplog.text
    assert has_warning == (imports == "..package")


def test_auto_processor_reads_the_document_of_a_spec_without_functions(tmp_path):
    """No code of the folder is run: whoever imports `mmkit.training` has the class."""
    spec = ModelSpec("local", make_modality())
    before = spec.hf_processor(LlamaConfig(vocab_size=8, n=2))
    before.save_pretrained(tmp_path)
    (tmp_path / "processing_local.py").write_text("raise AssertionError\n")
    after = AutoProcessor.from_pretrained(tmp_path)
    pickled = pickle.loads(pickle.dumps(after))
    for processor in (after, pickled):
        assert type(processor) is DocumentProcessor
        assert to_document(processor.spec) == spec.to_document()
        received = processor(input_ids=[1, 5], m=torch.ones(2, 2))
        expected = before(input_ids=[1, 5], m=torch.ones(2, 2))
        assert received.keys() == expected.keys()
        assert received["x"].equal(expected["x"])
    after.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "mmkit.json").read_text()) == spec.to_document()
    with refuses(InputError, f"{tmp_path / 'none'}: expected a checkpoint with mmkit.json, got one without it."):
        (tmp_path / "none").mkdir()
        DocumentProcessor.from_pretrained(tmp_path / "none")


# -- the model -------------------------------------------------------------------------------------------------------


def make_fields_of_a(items, scope):
    return {"a": items, "not_sent": [0] * len(items)}


TWO = ModelSpec(
    "two",
    make_modality(
        "a",
        item=Tensor((between(1, 4), 3)),
        layout=embed(5) * item.length,
        update=replace(5),
        fields={"a": batched(shape=(between(1, 4), 3)), "not_sent": batched(hidden=True)},
        process=make_fields_of_a,
        embeds=embed(5) * item.rows,
    ),
    make_modality("b", item=Tensor((2,)), layout=embed(6) + 7, update=replace(6), fields={"b": batched()}),
)


class TwoForCausalLM(MultiModalMixin, LlamaForCausalLM):
    mm_spec = TWO

    def __init__(self, config):
        super().__init__(config)
        self.of_a = torch.nn.Linear(3, 32)
        self.of_b = torch.nn.Linear(2, 32)
        self.post_init()

    def embed_a(self, a):
        return [self.of_a(rows) for rows in a]

    def embed_b(self, b):
        return self.of_b(b)[:, None]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return TwoForCausalLM(config).eval()


@pytest.fixture(scope="module")
def processor(model):
    return TWO.hf_processor(model.config)


def test_a_model_reads_the_items_of_a_batch(model, processor):
    a = [torch.randn(1, 3), torch.randn(2, 3)]
    b = torch.randn(3, 2)
    samples = [
        {"input_ids": [8, 6, 5], "a": a[:1], "b": b[:1], "answer": [9]},
        {"input_ids": [5, 6, 6, 8], "a": a[1:], "b": b[1:], "answer": [10]},
        {"input_ids": [8], "answer": [11]},
    ]
    batch = Collator(processor)(samples)
    embeds = model.get_input_embeddings()(batch["input_ids"]).clone()
    embeds[0, 1] = model.of_b(b[0])
    embeds[0, 3] = model.of_a(a[0][0])
    embeds[1, 0] = model.of_a(a[1][0])
    embeds[1, 1] = model.of_a(a[1][1])
    embeds[1, 2] = model.of_b(b[1])
    embeds[1, 4] = model.of_b(b[2])
    expected = LlamaForCausalLM.forward(
        model, inputs_embeds=embeds, labels=batch["labels"], attention_mask=batch["attention_mask"]
    )
    result = model(**batch)
    assert torch.equal(result.logits, expected.logits)
    result.loss.backward()
    assert model.of_a.weight.grad.any()
    assert model.of_b.weight.grad.any()


OPTIONS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}


def test_a_model_generates_after_a_padded_batch_what_it_does_after_each_prompt(model, processor):
    input_ids = [[8, 6, 5], [9, 6]]
    a = [[torch.randn(3, 3)], None]
    b = [torch.randn(1, 2), torch.randn(1, 2)]
    expected = []
    for i in range(2):
        inputs = processor(input_ids=input_ids[i], a=a[i], b=b[i])
        expected.append(model.generate(**inputs, **OPTIONS)[0, -3:])
    batch = processor(input_ids=input_ids, a=a, b=b, padding=True, padding_side="left")
    assert torch.equal(model.generate(**batch, **OPTIONS)[:, -3:], torch.stack(expected))


def test_a_model_generates_after_embeddings_what_it_does_after_their_items(model, processor):
    a = torch.randn(3, 3)
    b = torch.randn(1, 2)
    raw = processor(input_ids=[8, 6, 5], a=[a], b=b)
    rows = model.of_a(a).detach()
    embedded = processor(input_ids=[8, 6, 5], a={"a_embeds": [rows]}, b=b)
    assert torch.equal(model.generate(**embedded, **OPTIONS), model.generate(**raw, **OPTIONS))


def test_a_model_generates_after_a_prompt_without_items(model):
    assert model.generate(torch.tensor([[8]]), **OPTIONS).shape == (1, 4)


class DroppingForCausalLM(TwoForCausalLM):
    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, inputs_embeds=None, **kwargs
    ):
        if inputs_embeds is not None and past_key_values is None:
            return {"inputs_embeds": inputs_embeds}
        return {"input_ids": input_ids}  # transformers 5 makes the cache before the first step


def test_a_class_that_would_answer_without_its_items_is_refused(model, processor):
    dropping = DroppingForCausalLM(model.config).eval()
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    sentence = (
        r"two, DroppingForCausalLM\.prepare_inputs_for_generation: expected inputs_embeds for the first step, which "
        r"hold the items, got none\. Let it pass them on, or take GenerationMixin\.prepare_inputs_for_generation\."
    )
    with pytest.raises(MmkitError, match=sentence):
        dropping.generate(**batch, **OPTIONS)
    assert dropping.generate(torch.tensor([[8]]), **OPTIONS, min_new_tokens=3).shape == (1, 4)


class UnawareForCausalLM(TwoForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}


def test_a_class_that_cannot_generate_after_embeddings_is_refused(model, processor):
    unaware = UnawareForCausalLM(model.config).eval()
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    with pytest.raises(
        MmkitError, match=r"two, UnawareForCausalLM\.prepare_inputs_for_generation: expected inputs_embeds"
    ):
        unaware.generate(**batch, **OPTIONS)


def test_items_without_the_rest_of_their_batch_are_refused(model, processor):
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    del batch["mm_token_type_ids"]
    del batch["placeholders"]
    with pytest.raises(InputError, match=r"two: expected input_ids and mm_token_type_ids beside items, got a without"):
        model(**batch)


def test_rows_that_an_item_has_no_positions_for_are_refused(model, processor):
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    batch["a"] = torch.randn(1, 3, 3)
    with pytest.raises(MmkitError, match=r"two\.a, embed_a, item 0: expected 2 encoder rows, got 3"):
        model(**batch)


def test_rows_that_a_batch_has_no_positions_for_are_refused(model, processor):
    batch = processor(input_ids=[8, 5], a=torch.randn(2, 3))
    batch["a"] = torch.randn(2, 2, 3)
    batch["placeholders"] = None
    with pytest.raises(MmkitError, match=r"two\.a, embed_a: expected 2 encoder rows in all, got 4"):
        model(**batch)


def test_weights_of_the_language_model_that_a_checkpoint_lacks(tmp_path, caplog):
    """Those of a new encoder are not named."""
    model = make_model(0, 23)
    for folder, missing in (("no-encoder", "encoder."), ("no-head", ("encoder.", "lm_head."))):
        weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith(missing)}
        model.save_pretrained(tmp_path / folder, state_dict=weights)

    WavesForCausalLM.from_pretrained(tmp_path / "no-encoder")
    assert not [record for record in caplog.records if record.name.startswith("mmkit.")]

    _, info = WavesForCausalLM.from_pretrained(tmp_path / "no-head", output_loading_info=True)
    assert "lm_head.weight" in info["missing_keys"]
    (record,) = [record for record in caplog.records if record.name.startswith("mmkit.")]
    folder = tmp_path / "no-head"
    assert record.getMessage() == (
        f"mmkit: waves, WavesForCausalLM.from_pretrained({folder!r}): expected all weights of the language model, got "
        "none for 1, which stay random: lm_head.weight. If the checkpoint has them under other names, pass key_mapping."
    )


def test_a_class_without_a_spec_has_that_of_the_checkpoint(tmp_path):
    class OfDocument(MultiModalMixin, LlamaForCausalLM):
        config_class = WavesConfig

        def __init__(self, config):
            super().__init__(config)
            self.encoder = PatchEncoder(config)

        def embed_series(self, series):
            return [self.encoder(item) for item in series]

    model = make_model(0, 23)
    model.save_pretrained(tmp_path)
    spec = ModelSpec("plain", WAVES["series"].model_copy(update={"process": identity()}))
    processor = spec.hf_processor(model.config, AutoTokenizer.from_pretrained(CHECKPOINT))
    processor.save_pretrained(tmp_path)
    batch = processor("<series> is a", series=[torch.randn(9, 1)])
    again = OfDocument.from_pretrained(tmp_path)
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    (tmp_path / "mmkit.json").unlink()
    with refuses(InputError, f"{tmp_path}: expected a checkpoint with mmkit.json, got one without it."):
        OfDocument.from_pretrained(tmp_path)


def test_published_names_of_weights_load_into_a_subclass_of_another_name(tmp_path):
    """transformers renames them by the name of its own class."""

    class Renamed(MultiModalMixin, LlavaForConditionalGeneration):
        mm_spec = LLAVA_LIKE

    make_checkpoint(tmp_path)
    weights = Renamed.from_pretrained(tmp_path).state_dict()
    expected_weights = LlavaForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected_weights[name]), name
