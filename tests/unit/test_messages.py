"""The sentences of SpecError and InputError that a user meets, each beside what provokes it.

A table has rows of a sentence and one or more causes, each of which gets it. ``…`` in a sentence stands for words that
another test has, or that the cause itself has. Branches of one condition are causes or rows of their own, other words
in the same place are not.
"""

import math
import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch.nn.utils.rnn import pad_sequence

from mmkit import (
    Audio,
    Image,
    InputError,
    ModelSpec,
    Output,
    Record,
    SpecError,
    Tensor,
    Text,
    Video,
    already_expanded,
    any_id,
    batched,
    between,
    cfg,
    constant,
    derived,
    each,
    embed,
    ending_with,
    fields,
    flat,
    hf,
    insert,
    item,
    later,
    literal,
    proc,
    replace,
    select,
    tok,
    where,
)
from mmkit.language.expr import Scope, evaluate
from mmkit.language.field import identity
from mmkit.language.vocabulary import Vocabulary
from mmkit.plan.bind import plan_for_options
from mmkit.plan.layouts import TooManyRows
from mmkit.plan.placement import PromptForm, ReservedTargets
from mmkit.plan.placing import place
from mmkit.plan.placing_errors import InsideOtherItem, LeftOver, NotFound

from .common import CONFIG, Tokenizer, bind_modality, bind_plan, make_item_layout, make_modality, refuses

FORM = re.compile(r"[^.:].*: expected \S.*, got \S.*\.( [A-Z].*\.)?|.+ has no value( here)?: \S.*\.")
"""Where, expected, got and a remedy, in whole sentences."""

DOUBLED = re.compile(r"(?<!\.)\.\.(?!\.|[0-9a-z])|  |\b(\w+): \1\b")
"""A second full stop or space, and a place that is named twice."""


@contextmanager
def rejects(error, sentence):
    """Check that the block raises such an error, and that its message is a well-formed sentence."""
    with refuses(error, sentence) as caught:
        yield
    message = str(caught.value)
    assert FORM.fullmatch(message), message
    assert not DOUBLED.search(message), message


def list_cases(table):
    """Return a case for each cause in a table, named by its sentence."""
    cases = []
    for row in table:
        sentence = row[0]
        for cause in row[1:]:
            cases.append(pytest.param(sentence, cause, id=sentence))
    return cases


ZEROS = torch.zeros(2, 2)
PIXELS = np.zeros((4, 5, 3), np.uint8)
FRAMES = np.zeros((2, 4, 5, 3), np.uint8)
SPARSE = torch.zeros(3, 4, 5).to_sparse()
PICTURE = PILImage.new("RGB", (5, 4))

TENSOR = Tensor(shape=(2, 2))
TEXT = Text(most=cfg.n)
GENES = Tensor((between(1, 4),), "int64")
RECORD = Record(a=GENES, b=Tensor((item.a.length,)))

SPEC = ModelSpec("spec", make_modality())
PLAN = bind_plan(make_modality())
CHARACTERS = Vocabulary(Tokenizer())

IDS_ONLY = {"layout": literal(fields.codes), "update": replace(6), "fields": {"codes": batched()}}
WITHOUT_POSITIONS = dict(layout=None, update=None, tokens=0)
"""Options of a modality whose items take no place in the prompt."""

NUMBERED_TARGET = replace(tok["<|image_{}|>", item.index + 1])
NUMBER = dict(shape=(), dtype="int64")
"""Options of a field of one whole number per item."""


def preview(data, prompt=(5,), processor=None, **options):
    """Expand a prompt with these items, by the plan of a modality with these options."""
    return bind_plan(make_modality(**options), processor=processor).preview(list(prompt), data)


def parse(item_type, data):
    return bind_modality(item=item_type, process=hf()).parser.parse_raw_items(data)


# -- options of a modality ---------------------------------------------------------------------------------------------


def process_items_only(items):
    return items


def process_three_arguments(items, scope, more):
    return items


# fmt: off
MODALITIES = [
    (", item: expected an item type, got 'tensor'.", dict(item="tensor")),
    (", item: expected an item type, got (1024, 3). Write Tensor((1024, 3)).", dict(item=(1024, 3))),
    (", item: expected an item type, got <class …>. Write Tensor(...).", dict(item=Tensor)),
    (", item: expected an item type, got {'a': …}. Write Record(...).", dict(item={"a": TEXT})),
    (": expected placeholder and tokens together, or layout, got placeholder without tokens. Add tokens=, the number …",
     dict(layout=None, update=None, placeholder="<image>")),
    (": expected placeholder and tokens together, or layout, got tokens without placeholder. Add placeholder=, …",
     dict(layout=None, update=None, tokens=5), dict(layout=None, tokens=0)),
    (": expected …, or layout, got layout beside them. Leave …", dict(placeholder="<image>", tokens=5)),
    (": expected …, or layout, got layout beside one. Leave …", dict(tokens=5), dict(placeholder=5)),
    (": expected placeholder and tokens, or layout and update, got layout alone. Add update=.", dict(update=None)),
    (": expected placeholder and tokens, or layout and update, got update alone. Add layout=.", dict(layout=None)),
    (": expected placeholder and tokens, or layout and update, got neither.", dict(layout=None, update=None)),
    (": expected at least one update, got none.", dict(update=[])),
    (", cacheable: expected True, False or a condition, got 'no'.", dict(cacheable="no")),
    (", update: expected replace(), insert(), already_expanded() or a list of them, got 5.",
     dict(update=5), dict(update=[5])),
    (", positions: expected (t, h, w) or (t, h, w, scale), got (1, 2).", dict(positions=(1, 2))),
    (", positions: expected …, got an item without positions.", dict(WITHOUT_POSITIONS, positions=(1, 1, 1))),
    (", positions: expected fields that …, got item.length. Declare …", dict(positions=(1, item.length, 1))),
    (", positions: expected fields that …, got fields.x. Declare …",
     dict(positions=(1, fields.x, 1), fields={"x": batched(hidden=True)})),
    (": expected limit=1 for an item without positions, got 2.", dict(WITHOUT_POSITIONS, limit=2)),
    (": expected no embeds for an item without positions, got True.", dict(WITHOUT_POSITIONS, embeds=True)),
    (": expected at least one field, got none.", dict(fields={})),
    (", update: expected replace() for a layout without embed(), got insert(at='start').",
     dict(IDS_ONLY, update=insert(at="start"))),
    (", update: expected replace() for a layout without embed(), got already_expanded().",
     dict(IDS_ONLY, update=[replace(6), already_expanded()])),
    (", positions: expected none for a layout without embed(), got some.", dict(IDS_ONLY, positions=(1, 1, 1))),
    (", embeds: expected none for a layout without embed(), got True.", dict(IDS_ONLY, embeds=True)),
    (", fields['x']: expected a field that the layout reads, since it has no embed() and the model gets none, got "
     "another one. Leave it out, or write embed() where the rows of an encoder stand.",
     dict(layout=literal(5)), dict(IDS_ONLY, fields={"x": batched(), "codes": batched()})),
    (", fields: expected a dict of batched(), flat(), … or constant(), got ['x'].", dict(fields=["x"])),
    (", fields['x']: expected batched(), flat(), … or constant(), got 'batched'.", dict(fields={"x": "batched"})),
    (", fields['x']: expected batched(), flat(), … or constant(), got batched without its (). Write batched().",
     dict(fields={"x": batched})),
    (": expected a Tensor or Audio item and one field, …, got … and fields ['x', 'y'].",
     dict(fields={"x": batched(), "y": batched()})),
    (": expected …, or a process, got Image(…) and fields ['x'].", dict(item=Image((2, 2)), process=identity())),
    (": expected a field for each of ['b'], …, got Record(…) and …",
     dict(item=Record(a=TEXT, b=Tensor((2,))), process=identity())),
    (": expected hf() or a function for process, got 5.", dict(process=5)),
    (", process: expected a function of the items and a Scope, got one that takes another number of …. Write (items, …",
     dict(process=process_items_only), dict(process=process_three_arguments)),
    (": expected unpad to name fields among ['x'], got ['y'].", dict(process=hf(unpad={"y": 3}))),
    (", fields.z: expected a field among ['x'], got 'z'. Declare it in fields.",
     dict(layout=embed(5) * fields.z), dict(layout=embed(5) * where(item.a, fields.z, 1)),
     dict(fields={"x": flat(fields.z)}), dict(fields={"x": batched(shape=(fields.z,))}),
     dict(update=replace(fields.z)), dict(process=hf(unpad={"x": fields.z})), dict(embeds=embed(5) * fields.z)),
    (", fields['z'][0].a: expected a field among ['x'], got 'z'. …", dict(layout=embed(5) * fields["z"][0].a)),
    (", embeds: expected a layout over item.rows, …, got True.", dict(layout=embed(5) * item.length, embeds=True)),
    (", embeds: expected True, a layout, or flat(item.rows) where layout and targets read fields, got flat(item.rows).",
     dict(embeds=flat(item.rows)), dict(layout=embed(5) * fields.x[0], update=NUMBERED_TARGET, embeds=flat(item.rows),
                                        fields={"x": batched(shape=(1,), dtype="int64")})),
    (", embeds: expected True, a layout, or …, got batched().", dict(embeds=batched())),
    (", fields['x']: expected a batched field with shape and dtype, …",
     dict(layout=embed(5) * fields.x, embeds=True, fields={"x": batched(shape=())}),
     dict(layout=embed(5) * fields.x, embeds=True, fields={"x": batched(dtype="int64")}),
     dict(layout=embed(5) * fields.x, embeds=True, fields={"x": batched(**NUMBER, hidden=True)}),
     dict(layout=embed(5) * fields.x, embeds=True, fields={"x": flat(1, **NUMBER)})),
    (": expected no part or field named m_embeds, …, got one.", dict(fields={"m_embeds": batched()}, embeds=True)),
    (": expected no part or field named m_embeds, …, got one.", dict(item=Record(m_embeds=TEXT))),
    (", fields['attention_mask']: expected a name that nothing else has beside the fields, got 'attention_mask', a key "
     "of the trainer's batch. Call the field m_attention_mask, for example.",
     dict(fields={"attention_mask": batched()})),
    (", fields['labels']: …, got 'labels', …. Rename the output: hf(outputs={'labels': 'm_labels'}).",
     dict(fields={"labels": batched()}, process=hf())),
    (", fields['position_ids']: …, got 'position_ids', an argument of the language model. …",
     dict(fields={"position_ids": batched()})),
    (", fields['positions']: …, got 'positions', an argument of the model's forward. …",
     dict(WITHOUT_POSITIONS, fields={"positions": batched()})),
    (", fields['mmkit_m_rows']: …, got 'mmkit_m_rows', a name of mmkit's own fields. …",
     dict(fields={"mmkit_m_rows": batched()})),
    (", fields['a-b']: expected a name that is a Python identifier, got 'a-b'.", dict(fields={"a-b": batched()})),
    (", fields['self']: …, got 'self', …", dict(fields={"self": batched()})),
    (": expected cacheable to …, got none. Write …", dict(layout=embed(5) * item.count)),
    (": expected fields that do not read item.index, …, got some that do. Read …",
     dict(fields={"x": batched(), "n": derived(item.index)})),
]
"""Options of `make_modality()`; after `modality 'm'`."""
# fmt: on


@pytest.mark.parametrize(("sentence", "options"), list_cases(MODALITIES))
def test_options_of_a_modality_are_rejected(sentence, options):
    with rejects(SpecError, "modality 'm'" + sentence):
        make_modality(**options)


NAMES = [
    ("expected a name that is a Python identifier, got 'a b'.", "a b"),
    (
        "expected a name that nothing else has beside the items, got 'text', an argument of the trainer's processor. "
        "Give the modality another name.",
        "text",
    ),
    ("…, got 'answer', a key of a sample of the trainer's collator. …", "answer"),
    ("…, got 'refusal', a part of vLLM's chat messages. …", "refusal"),
    ("…, got 'type', a key of a part of a message. …", "type"),
    ("…, got 'uuid', a key of a part of a message. …", "uuid"),
    ("…, got 'multimodal', what vLLM's models embed. …", "multimodal"),
    ("…, got 'self', the first argument of every method. …", "self"),
    ("…, got 'lambda', a keyword of Python. …", "lambda"),
    ("…, got 'm_embeds', a name of precomputed embeddings. …", "m_embeds"),
]


@pytest.mark.parametrize(("sentence", "name"), list_cases(NAMES))
def test_a_name_that_a_modality_cannot_have(sentence, name):
    with rejects(SpecError, f"modality '{name}': {sentence}"):
        make_modality(name)


def test_a_name_whose_embeddings_have_the_name_of_an_argument():
    sentence = (
        "modality 'inputs': expected a name that nothing else has, with _embeds behind it, got 'inputs_embeds', an "
        "argument of the language model. Give …"
    )
    with rejects(SpecError, sentence):
        make_modality("inputs", embeds=True)


# -- modalities of a spec ----------------------------------------------------------------------------------------------


def test_a_spec_needs_a_name_that_is_an_identifier():
    with rejects(SpecError, "spec 'a b': expected a name that is a Python identifier, got 'a b'."):
        ModelSpec("a b", make_modality())


def test_a_spec_needs_a_modality():
    with rejects(SpecError, "spec 'a': expected at least one modality, got none."):
        ModelSpec("a")


def test_modalities_are_arguments_of_their_own():
    with rejects(SpecError, "spec 'a': expected modalities, each as an argument of its own, got a list. Write …"):
        ModelSpec("a", [make_modality()])
    with rejects(SpecError, "spec 'a': expected modalities, each as an argument of its own, got a str."):
        ModelSpec("a", "m")


def test_modalities_have_different_names():
    with rejects(SpecError, "spec 'a': expected one modality named 'n', got several."):
        ModelSpec("a", make_modality("n"), make_modality("n", fields={"y": batched()}))


def test_fields_have_different_names():
    with rejects(SpecError, "spec 'a': expected one field named 'x', got several."):
        ModelSpec("a", make_modality(), make_modality("n"))


def test_a_field_has_another_name_than_the_embeddings_of_another_modality():
    with rejects(SpecError, "spec 'a': expected one field named 'm_embeds', …"):
        ModelSpec("a", make_modality(embeds=True), make_modality("n", fields={"m_embeds": batched()}))


def test_a_modality_without_positions_has_nothing_beside_it():
    without_positions = make_modality(**WITHOUT_POSITIONS)
    with rejects(SpecError, "spec 'a': expected nothing beside a modality …, got m, n."):
        ModelSpec("a", without_positions, make_modality("n", fields={"y": batched()}))
    with rejects(SpecError, "spec 'a': expected nothing beside …, got m, prompt."):
        ModelSpec("a", without_positions, prompt=ending_with(7))


def test_hf_takes_arguments_of_a_hugging_face_processor():
    sound = make_modality(item=Audio(largest=3), process=hf(inputs={"audio": "sound"}))
    with rejects(SpecError, "spec 'a', m: hf(inputs=...): expected arguments among ['audios'], got ['audio']."):
        ModelSpec("a", sound)


def test_a_spec_whose_modalities_are_all_left_out():
    with rejects(SpecError, "spec: expected a modality whose when= holds for the config, got none."):
        bind_plan(make_modality(when=False))


# -- parts of a declaration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(5, 1), (1, 2.5)])
def test_between_takes_whole_numbers_in_order(least, most):
    with rejects(SpecError, f"between(): expected whole numbers, in order, got {least}..{most}."):
        between(least, most)


@pytest.mark.parametrize("size", [between(-1, 5), -1, 2.5])
def test_sizes_are_whole_numbers_from_0_on(size):
    sentence = f"spec.m, item: Tensor.shape[1] = {size!s}: expected whole numbers >= 0, in order, got {size!s}."
    with rejects(SpecError, sentence):
        bind_modality(item=Tensor((2, size)))


def test_insert_takes_the_start_or_a_prefix():
    with rejects(SpecError, 'insert(): expected at="start" or after=a prefix, got nothing.'):
        insert()
    with rejects(SpecError, "insert(): expected …, got at='middle'."):
        insert(at="middle")
    with rejects(SpecError, "insert(): expected …, got at='start', after=5."):
        insert(at="start", after=5)


def test_hf_takes_an_object_that_is_called_like_a_processor():
    sentence = (
        "processor of hf(): expected an object that is called like a Hugging Face processor, got <class 'int'>. Give "
        "an instance: int(), or later(int)(...) of what the config says."
    )
    with rejects(SpecError, sentence):
        hf(int)
    with rejects(SpecError, "processor of hf(): expected an object …, got 3."):
        hf(3)
    with rejects(SpecError, "spec.m, process: expected an object that is called like …, for hf(), got 2."):
        preview({"m": ZEROS}, process=hf(cfg.n))


def test_a_layout_takes_no_text():
    sentence = (
        "layout: expected token ids, got '<image>'. Write tok['<image>'] for one token or tok.text('<image>') for text."
    )

    def lay_a_text(element):
        return "<image>"

    with rejects(SpecError, sentence):
        "<image>" + embed(5)
    with rejects(SpecError, sentence):
        embed(5) + "<image>"
    with rejects(SpecError, sentence):
        each(2, lay_a_text)
    with rejects(SpecError, sentence):
        make_modality(layout="<image>")


def test_a_target_is_no_text():
    with rejects(SpecError, "replace(): expected token ids, got '<image>'. Write …"):
        replace("<image>")
    with rejects(SpecError, "insert(): expected token ids, got '<image>'. Write …"):
        insert(after="<image>")


def test_embed_takes_one_token_id():
    with rejects(SpecError, "embed(): expected one token id, got '<image>'. Write embed(tok[\"<image>\"]) or …"):
        embed("<image>")
    with rejects(SpecError, "embed(): expected one token id, got tok.text('ab'). Write …"):
        embed(tok.text("ab"))
    with rejects(SpecError, "embed(): expected one token id, got embed(1) * 2. Write …"):
        embed(embed(1) * 2)


def test_ids_are_added_as_literals():
    sentence = (
        "cfg.a + cfg.b + embed(5): expected layouts, got ids, which are not added. Write literal(cfg.a, cfg.b) for …"
    )
    with rejects(SpecError, sentence):
        cfg.a + cfg.b + embed(5)


def test_a_dtype_is_known():
    with rejects(SpecError, "dtype of a field: expected a torch dtype or its name, got 'nn'."):
        batched(dtype="nn")
    with rejects(SpecError, "Tensor.dtype: expected one of float16, …, bool, got 'float'."):
        Tensor(shape=(), dtype="float")


def test_a_shape_is_a_tuple():
    with rejects(SpecError, "Tensor.shape: expected a tuple of sizes, one per dimension, got 3."):
        Tensor(shape=3)


def test_a_record_has_parts():
    with rejects(SpecError, "Record: expected at least one part, got none."):
        Record()
    sentence = "Record.a: expected an item type, got <class 'mmkit.language.items.tensor.Text'>."
    with rejects(SpecError, sentence):
        Record(a=Text)
    with rejects(SpecError, "Record: expected a part that is not called index, count, rows or _..., got 'count'."):
        Record(count=TEXT)


# -- values of expressions ---------------------------------------------------------------------------------------------

LONG_KEY = "a" * 74

VALUES_OF_EXPRESSIONS = [
    ("cfg.zzz has no value: object has no attribute 'zzz'.", (cfg.zzz, Scope(cfg=object()))),
    ("cfg.b has no value: dict …. It has: c, d.", (cfg.b, Scope({"c": 1, "d": 2}))),
    ("fields.x has no value: the … fields lack 'x'. It has: y.", (fields.x, Scope(fields={"y": 1}))),
    ("cfg.sizes[2] has no value: cfg.sizes is [1].", (cfg.sizes[2] + 1, Scope(cfg={"sizes": [1]}))),
    (f"cfg[9] has no value: cfg is {{'{LONG_KEY}'....", (cfg[9], Scope(cfg={LONG_KEY: 1}))),
    ("cfg has no value here: the spec is not bound to a config.", (cfg.a, Scope())),
    ("cfg.n + cfg.text has no value: unsupported …, with 2, 'x'.", (cfg.n + cfg.text, Scope(CONFIG))),
]


@pytest.mark.parametrize(("sentence", "expression_and_scope"), list_cases(VALUES_OF_EXPRESSIONS))
def test_an_expression_without_a_value(sentence, expression_and_scope):
    expression, scope = expression_and_scope
    with rejects(SpecError, sentence):
        evaluate(expression, scope)


# -- a spec that is bound ----------------------------------------------------------------------------------------------


def test_bind_takes_a_config_before_a_tokenizer():
    sentence = (
        "spec, bind: expected a config, then a tokenizer, got a SimpleNamespace as tokenizer. Write bind(config, …"
    )
    with rejects(SpecError, sentence):
        SPEC.bind(Tokenizer(), CONFIG)


@pytest.mark.parametrize("config", [None, SimpleNamespace(n=2)], ids=["no config", "no vocab_size"])
def test_a_config_states_the_size_of_its_vocabulary(config):
    with rejects(SpecError, "config: expected a vocab_size in …, got None."):
        SPEC.bind(config)


def test_a_vocabulary_has_no_more_ids_than_unicode_has_characters():
    with rejects(SpecError, "config: expected a vocab_size of at most 1114111, got 2000000."):
        SPEC.bind(SimpleNamespace(n=2, vocab_size=2_000_000))


def test_merges_are_characters():
    spec = ModelSpec("a", make_modality(), merges="\u2028")
    with rejects(SpecError, "a, merges: expected a character …, got '\\u2028'."):
        spec.bind(CONFIG)


def test_a_token_has_no_id_without_a_tokenizer():
    spec = ModelSpec("spec", make_modality(layout=embed(tok["<image>"])))
    with rejects(SpecError, "spec.m, layout: tok['<image>'] has no value: … without a …. Use …"):
        spec.bind(CONFIG)


def rewrite_prompt(prompt):
    """Rewrite [1, 2] by the prompt= of a spec."""
    return bind_plan(make_modality(), prompt=prompt).rewrite("prompt", [1, 2])


def test_a_prompt_ends_with_literal_ids_of_the_vocabulary():
    with rejects(SpecError, "spec.prompt: expected literal ids, since …, got embed()."):
        rewrite_prompt(ending_with(embed(5)))
    with rejects(SpecError, "spec.prompt: expected token ids below the vocabulary size 200, got 200. …"):
        rewrite_prompt(ending_with(200))


def test_a_processor_that_the_config_lacks():
    processor = bind_modality(process=hf(cfg.zzz)).field_processor
    with rejects(SpecError, "spec.m, process: cfg.zzz has no value: …"):
        processor.hf_call.part  # noqa: B018


def test_hf_needs_the_processor_of_the_model():
    sentence = "spec, process: expected a Hugging Face processor for hf(), got none. Bind the spec with processor=."
    with rejects(SpecError, sentence):
        preview({"m": ZEROS}, process=hf())


def lay_other_ids_for_long_items(scope):
    return embed(5 + scope.item.length // 4)


def test_items_have_the_placeholder_ids_of_the_largest():
    with rejects(SpecError, "spec.m, layout: expected embed() of ids that the largest …, got [6]…"):
        preview({"m": torch.zeros(5)}, [6], item=Tensor((between(1, 9),)), layout=lay_other_ids_for_long_items)


def test_modalities_have_different_targets():
    sentence = (
        "spec.n, update: expected a target that no other modality has, got 'µ', which is that of m too. Give each …"
    )
    numbered = make_modality("n", update=NUMBERED_TARGET, fields={"y": batched()})
    with rejects(SpecError, sentence):
        bind_plan(make_modality(update=replace(181)), numbered)


def test_the_largest_item_has_the_most_encoder_rows():
    sentence = (
        "spec.m, item: expected the most encoder rows for the largest item, got 1, and 4 for the smallest. State …"
    )
    with rejects(SpecError, sentence):
        bind_modality(item=Tensor(shape=(between(1, 4), 2)), layout=embed(5) * (5 - item.length))


@pytest.mark.parametrize("eos_token_id", [2, [1, 2]], ids=["one id", "several ids"])
def test_a_placeholder_is_not_the_id_that_ends_an_answer(eos_token_id):
    config = SimpleNamespace(n=2, vocab_size=200, eos_token_id=eos_token_id)
    spec = ModelSpec("spec", make_modality(layout=embed(2)))
    sentence = (
        "spec.m, layout: expected a placeholder id that no text has, got 2, the config's eos_token_id, with which an "
        "answer ends. Use …"
    )
    with rejects(SpecError, sentence):
        spec.bind(config)


@pytest.mark.parametrize("eos_token_id", [2, [1, 2]], ids=["one id", "several ids"])
def test_another_placeholder_and_an_answer_that_does_not_end_so_are_accepted(eos_token_id):
    config = SimpleNamespace(n=2, vocab_size=200, eos_token_id=eos_token_id)
    other = ModelSpec("spec", make_modality(layout=embed(3)))
    assert other.bind(config).embed_ids == {3}

    spec = ModelSpec("spec", make_modality(layout=embed(2)))
    assert spec.bind(config, Tokenizer()).embed_ids == {2}, "the tokenizer says with what an answer ends"

    def keep_ids(ids, scope):
        return ids

    frame = Output("frame", any_id(0, 2) * 2, keep_ids)
    with_output = ModelSpec("spec", make_modality(layout=embed(2)), outputs=[frame])
    assert with_output.bind(config).embed_ids == {2}, "an output ends by its length"


def test_the_number_of_rows_depends_on_the_item_only():
    sentence = (
        "spec.m, layout: expected 1 embed() position(s) whatever item.index is, as for the first item, got 2. Say by "
        "cacheable=False that an item depends on its position."
    )
    with rejects(SpecError, sentence):
        bind_modality(layout=embed(5) * (item.index + 1))


def test_a_process_takes_the_largest_item_that_mmkit_makes():
    def process_smiles(items, scope):
        for text in items:
            if set(text) - set("CNO=()"):
                raise InputError("m", "a SMILES", repr(text))
        return {"x": torch.zeros(len(items), 2)}

    sentence = (
        "the largest item that mmkit made is refused: m: expected a SMILES, got 'aa'. State its alphabet=, or a text "
        "as largest=."
    )
    with rejects(SpecError, sentence):
        bind_modality(item=Text(2), process=process_smiles)


# -- options of a modality that is bound -------------------------------------------------------------------------------


def look_up_index(scope):
    return scope.item.index


def look_up_missing_fact(scope):
    return scope.item.x


def repeat_by_count(scope):
    return embed(5) * scope.item.count


def lay_without_a_value(scope):
    return next(iter(()))


def lay_missing_id(element):
    return embed(cfg.zzz)


def lay_two_million_ids(element):
    return embed(5) * 2_000_000


def lay_id_outside_the_vocabulary(element):
    return literal(200)


def pad_to_the_longest(items, scope):
    return {"x": pad_sequence(items, batch_first=True)}


def add_the_number_of_items(items, scope):
    return {"x": [value + len(items) / 100 for value in items]}


def return_random_values(items, scope):
    return {"x": torch.rand(len(items), 2)}


def double_in_place(items, scope):
    return {"x": [value.mul_(2) for value in items]}


def raise_key_error(items, scope):
    return {}["x"]


def declare_shape(*shape, **options):
    return dict(item=Tensor(shape=shape, **options))


def declare_parts(**parts):
    return dict(item=Record(**parts), process=hf(), cacheable=False)


ZZZ = "cfg.zzz has no value: SimpleNamespace has no attribute 'zzz'."
OUTSIDE = ": expected token ids below the vocabulary size 200, got 200. Use a reserved id inside the vocabulary: vLLM …"

# fmt: off
BOUND = [
    ("layout: proc has no value here: the model has no Hugging Face processor.", dict(layout=embed(proc.a))),
    ("limit: item has no value here: it describes one raw item and is only known …", dict(limit=item.length)),
    ("limit: fields has no value here: it holds … only known after processing.", dict(limit=fields.x)),
    ("limit: cfg.sise has no value: SimpleNamespace has no attribute 'sise'. It has: size.", dict(limit=cfg.sise)),
    ("layout: expected placeholder ids that no item chooses, got …. Choose …",
     dict(layout=embed(40 + fields.x)), dict(layout=select(tok.text("ab"), embed=fields.x)),
     dict(embeds=embed(item.rows))),
    ("layout: expected a placeholder id that no text has, got 153, the token 'word'. Use …", dict(layout=embed(153))),
    ("layout: expected a placeholder id that no text has, got 151, with which …", dict(layout=embed(151))),
    ("layout: expected a placeholder id that no text has, got 152, which stands for every text that the tokenizer does "
     "not know. Use …", dict(layout=embed(152))),
    ("update: tok.text('\N{SNOWMAN}') has no value: the tokenizer has no token for a part of …",
     dict(update=replace(tok.text("\N{SNOWMAN}")))),
    ("update: tok.text('{}', item.shape) has no value: item.shape is neither a text nor a number but a tuple.",
     dict(update=replace(tok.text("{}", item.shape)))),
    ("fields['n']: item.index has no value here: items are cached by their content. Say …",
     dict(fields={"x": batched(), "n": derived(look_up_index)})),
    ("layout: item.count has no value here: …", dict(layout=repeat_by_count)),
    ("process: expected process to return the same x for an item, …, got different values when other items were …",
     dict(item=Tensor((between(1, 2),)), process=pad_to_the_longest),
     dict(process=add_the_number_of_items)),
    ("process: expected process to return the same x …, got different values when it was processed again, …",
     dict(process=return_random_values)),
    ("process: expected process to leave the items as they are, got another value in one of them. They are the …",
     dict(process=double_in_place)),
    (f"layout: {ZZZ}",
     dict(layout=embed(5) * (item.length + cfg.zzz)), dict(layout=each(item.length, lay_missing_id)),
     dict(layout=where(item.length < 3, embed(cfg.zzz), embed(5) * fields.x))),
    (f"update: {ZZZ}", dict(update=replace(cfg.zzz)), dict(update=insert(after=cfg.zzz))),
    (f"fields: {ZZZ}", dict(fields={"x": batched(shape=(cfg.zzz,))}), dict(fields={"x": flat(cfg.zzz)})),
    (f"embeds: {ZZZ}", dict(embeds=embed(cfg.zzz))),
    (f"process: {ZZZ}", dict(process=hf(text=cfg.zzz)), dict(process=hf(unpad={"x": cfg.zzz}))),
    (f"when: {ZZZ}", dict(when=cfg.zzz)),
    (f"item: Tensor.shape: {ZZZ}", declare_shape(cfg.zzz)),
    ("layout: tok['<imgae>']: expected a token …. Near: '<image>', …. Use tok.text('<imgae>') …",
     dict(layout=embed(tok["<imgae>"]))),
    ("layout: tok['zzz']: expected a token …, got a text that is none. …", dict(layout=embed(tok["zzz"]))),
    ("layout: tok[2]: expected the text of one token, got int. Use an id as it is.", dict(layout=embed(tok[cfg.n]))),
    ("limit: cfg.size // (cfg.n - 2) has no value: … by zero, with 7, 0.", dict(limit=cfg.size // (cfg.n - 2))),
    ("layout: cfg.n * 0.5: expected a token id, …, got 1.0. Use math.floor(), …", dict(layout=embed(cfg.n * 0.5))),
    ("layout: embed(5) * 1000000000: expected at most 4194304 ids, got 1000000000.", dict(layout=embed(5) * 10**9)),
    ("layout: each(…): expected at most 4194304 ids, got 6000000.", dict(layout=each(3, lay_two_million_ids))),
    ("item: Tensor.shape[1] = cfg.n - 4: expected whole numbers >= 0, in order, got -2.", declare_shape(3, cfg.n - 4)),
    ("item: Tensor.shape[0] = …",
     declare_shape(cfg.n * 1.0), declare_shape(True),
     declare_shape(between(3, cfg.n)), declare_shape(between(cfg.minus, 3))),
    ("item: Tensor.shape: item has no value here: …", declare_shape(item.length)),
    ("item: Tensor.bound: expected a number > 0 …",
     declare_shape(1, bound=0), declare_shape(1, bound=math.nan), declare_shape(1, bound=True)),
    ("item: Tensor.bound: expected a number, got 0..3 of float32. State …", declare_shape(1, bound=between(0, 3))),
    ("item: Tensor.bound: expected values that uint8 …, got 0..256.",
     declare_shape(1, dtype="uint8", bound=between(0, 256))),
    ("item: Tensor.bound: expected values that uint8 …, got -1..3.",
     declare_shape(1, dtype="uint8", bound=between(cfg.minus, 3))),
    ("item: Tensor.bound: expected whole numbers, in order, got 3..2.",
     declare_shape(1, dtype="int8", bound=between(3, cfg.n))),
    ("item: Tensor.largest: expected a shape within (1..4, 3), got (5, 3).",
     declare_shape(between(1, 4), 3, largest=(5, 3))),
    ("item: Record.b: Tensor.shape: item.c has …", declare_parts(a=TEXT, b=Tensor((item.c.length,)))),
    ("item: Record.a: Text.least, Text.most: expected …, got 1..0.", declare_parts(a=Text(most=cfg.n - 2))),
    ("item: Text.alphabet: expected a text of at least one character, got ''.", dict(item=Text(2, alphabet=""))),
    ("item: Text.largest: expected at least one text, got none.", dict(item=Text(2, largest=[]))),
    ("item: Text.largest: expected a text of 1..2 characters, got int 2.", dict(item=Text(2, largest=cfg.n))),
    ("item: Text.largest: expected a text of 1..2 characters among 'ab', got 'c' at 1.",
     dict(item=Text(2, alphabet="ab", largest=["ab", "bc"]))),
    ("item: Audio.largest: expected … of at most 50 samples, got 51 …", dict(item=Audio(51, most=50))),
    ("item: Audio.largest: expected … of at least 9 samples, got 5 samples.", dict(item=Audio(5, least=9))),
    ("item: Audio.most: expected whole numbers >= 0, in order, got -1.", dict(item=Audio(9, most=cfg.minus))),
    ("item: Image.largest: expected 2 …",
     dict(item=Image(5)), dict(item=Image((3, 0))), dict(item=Image((1.5, 2))), dict(item=Image([(1, 2), (3,)]))),
    ("item: Audio.largest: expected 1 whole number(s) >= 1, got (-1,).", dict(item=Audio(largest=cfg.minus))),
    ("item: Audio.bound: expected a number > 0 from cfg, got -1.", dict(item=Audio(largest=4, bound=cfg.minus))),
    ("item: Audio.rate: expected a number > 0 from cfg, got -1.", dict(item=Audio(largest=4, rate=-1))),
    ("limit: 1.5: expected the most items, a whole number >= 0, got 1.5. Use math.floor(), …", dict(limit=1.5)),
    ("limit: …: expected the most items, a whole number >= 0, got ….", dict(limit=-1), dict(limit=True)),
    ("layout: expected at least one placeholder per item, got 2 other tokens for an item of shape (2, 2). Round up …",
     dict(layout=lambda scope: [1, 2])),
    ("layout: expected at least one token per item, got none for an item of shape (2,). Send a larger one.",
     dict(IDS_ONLY, item=Tensor((between(2, 4),)), layout=literal(5) * (item.length - 2), fields={})),
    ("layout: expected an item whose layout is without …, its target, got one with it. Begin the layout with …",
     dict(IDS_ONLY, layout=literal(7, 5), fields={}, update=replace(7))),
    ("layout: expected at least one placeholder per item, got none for an item of shape (2,). Round …",
     dict(item=Tensor(shape=(between(2, 4),)), layout=embed(5) * (item.length - 2))),
    (f"layout{OUTSIDE}",
     dict(layout=embed(200)), dict(layout=embed(tok["<far>"])), dict(layout=embed(5) + literal(200)),
     dict(layout=embed(5) + each(fields.x.shape[0], lay_id_outside_the_vocabulary)),
     dict(layout=where(item.length < 3, embed(5), embed(200))), dict(embeds=embed(200) * item.rows)),
    (f"update{OUTSIDE}", dict(update=replace([1, 200])), dict(update=[already_expanded(), replace(200)])),
    ("update: expected a target of at least one token, got none.", dict(update=replace([]))),
    ("process: expected to take well-formed items, got KeyError: 'x'.", dict(process=raise_key_error)),
    ("layout: expected a value, got StopIteration.", dict(layout=lay_without_a_value)),
    ("item: expected one largest item, since only the Hugging Face processor tells its rows, got 2 of them. State …",
     dict(item=Tensor((between(1, 4),), largest=[(4,), (1,)]), layout=embed(5) * fields.x[0], process=hf())),
    ("update: expected a value, got AttributeError: … no attribute 'x'.", dict(update=replace(look_up_missing_fact))),
]
"""Options of a modality that is bound; after `spec.m, `."""
# fmt: on


@pytest.mark.parametrize(("sentence", "options"), list_cases(BOUND))
def test_options_of_a_bound_modality_are_rejected(sentence, options):
    with rejects(SpecError, "spec.m, " + sentence):
        bind_modality(**options)


# -- what a process returns --------------------------------------------------------------------------------------------


def take_half_a_row(scope):
    return 0.5


# fmt: off
PROCESSED = [
    (", process: expected a dict of tensors, got int.", (3, batched())),
    (", process: expected the fields ['x'], got [], without ['x'].", ({}, batched())),
    (", process: expected the fields ['x'], got ['x'], without ['x'].", ({"x": None}, batched())),
    (": expected process to return declared fields, ['x'], got ['y']. Declare them in fields, or do not return them.",
     ({"x": torch.zeros(1), "y": [2]}, batched())),
    (": expected process to return declared fields, [], got ['x']. Declare …", ({"x": [1]}, derived(1))),
    (", fields['x']: expected a tensor with a dimension 0, got shape ().", ({"x": torch.zeros(())}, batched())),
    (", fields['x']: expected a tensor with a dimension 0, got int.", ({"x": 3}, batched())),
    (", fields['x']: expected a … dimension 1, got shape (4,).", ({"x": torch.zeros(4)}, flat(item.length, dim=1))),
    (", fields['x']: expected a … dimension -2, got shape (4,).", ({"x": torch.zeros(4)}, flat(item.length, dim=-2))),
    (", fields['x']: expected a … dimension 1, got ndarray.", ({"x": np.zeros((3, 4))}, flat(item.length, dim=1))),
    (", fields['x']: take_half_a_row: expected a size, …, got 0.5. …", ({"x": torch.zeros(4)}, flat(take_half_a_row))),
    (", fields['x']: item 0: expected dtype int64, got float32.", ({"x": torch.zeros(1)}, batched(dtype="int64"))),
    (", fields['x']: item 0: expected dtype int64, got list.", ({"x": [[0.0]]}, batched(dtype="int64"))),
    (", fields['x']: item 0: expected shape (1,) per item, got ().", ({"x": [[0]]}, batched(shape=(1,)))),
    (", fields['x']: item 0: expected shape (2,) …", ({"x": torch.zeros(1, 3)}, batched(shape=(item.length,)))),
    (", fields['x']: item has no value here: it describes one raw item …", ({}, constant(item.length))),
    (", fields['x']: value: expected numbers for a int64 tensor, got ….", ({}, derived("a", dtype="int64"))),
]
"""What `process` returns, and how the field x is declared; after `spec.m`."""
# fmt: on


@pytest.mark.parametrize(("sentence", "value_and_field"), list_cases(PROCESSED))
def test_what_a_process_returns_is_rejected(sentence, value_and_field):
    returned, field = value_and_field

    def process(items, scope):
        return returned

    with rejects(SpecError, "spec.m" + sentence):
        bind_modality(process=process, fields={"x": field})


# -- data of items -----------------------------------------------------------------------------------------------------


def nest(levels):
    """Return a number in so many lists."""
    nested = 1.0
    for _ in range(levels):
        nested = [nested]
    return nested


# fmt: off
TENSORS = [
    ("dict {'a': 1}.", [{"a": 1}]),
    ("dtype bool. Convert it to float32.", np.zeros((2, 2), bool), torch.zeros(2, 2, dtype=torch.bool)),
    ("dtype >f4. Convert it to float32.", np.zeros((2, 2), ">f4")),
    ("shape (2,).", np.zeros(2, np.float32)),
    ("shape (3, 2).", np.zeros((3, 2), np.float32), [[[1.0] * 2, [1.0] * 2, [1.0] * 2]]),
    ("shape (2, 0).", [[], []]),
    ("shape (1, 2, 2). Send one tensor per item.", [torch.zeros(1, 2, 2)]),
    ("shape (1, 3, 4).", [torch.zeros(1, 3, 4)]),
    ("a ragged list.", [[1.0, 2.0], [3.0]], [[1.0, 2.0], 1.0], [[[1.0, 2.0], [3.0]]]),
    ("a list that holds None.", [[1.0, 2.0], [1.0, None]], [[1.0, 2.0], None]),
    ("a list that holds bool True.", [[0, 1], [2, True]]),
    ("a list that holds 9223372036854775808.", [[0, 1], [2, 2**63]]),
    ("a list that holds -9223372036854775809.", [[0, 1], [2, -(2**63) - 1]]),
    ("a list that holds a int.", [[10**5000] * 2] * 2),
    ("a list that holds more than 32 levels.", [nest(33)], [nest(900)]),
    ("a torch.sparse_coo tensor on cpu.", torch.zeros(2, 2).to_sparse()),
    ("a torch.strided tensor on meta.", torch.zeros(2, 2, device="meta")),
    ("a masked array. Fill its gaps.", np.ma.masked_array(np.zeros((2, 2)))),
    ("the value 9223372036854775808.", np.array([[0, 1], [2, 2**63]], np.uint64)),
]
"""Data of Tensor(shape=(2, 2)); after `spec.m[0]: expected a (2, 2) float32 tensor, got `."""
# fmt: on


@pytest.mark.parametrize(("sentence", "data"), list_cases(TENSORS))
def test_data_of_a_tensor_are_rejected(sentence, data):
    with rejects(InputError, "spec.m[0]: expected a (2, 2) float32 tensor, got " + sentence):
        parse(TENSOR, data)


# fmt: off
CONTAINERS = [
    ("a (2, 2) float32 tensor or a list of them, got None. Send the item, or leave the modality out.", (TENSOR, None)),
    ("a (2, 2) float32 tensor or a list of them, got a str.", (TENSOR, "x" * 100)),
    ("a dict of a and b or a list of them, got int 3.", (RECORD, 3)),
    ("a text of 1..2 characters or a list of them, got int 3.", (TEXT, 3)),
    ("a video with metadata or a list of them, got None. …", (Video(largest=(4, 4, 4), metadata=True), None)),
]
"""Item types and data; after `spec.m: expected `."""
# fmt: on


@pytest.mark.parametrize(("sentence", "type_and_data"), list_cases(CONTAINERS))
def test_data_that_are_no_items_are_rejected(sentence, type_and_data):
    item_type, data = type_and_data
    with rejects(InputError, "spec.m: expected " + sentence):
        parse(item_type, data)


HALF = Tensor(shape=(2, 2), dtype="float16")
INDICES = Tensor(shape=(2,), dtype="int64")
BYTES = Tensor(shape=(2,), dtype="uint8")
MASK = Tensor(shape=(2,), dtype="bool")
IMAGE_OF_A_FUNCTION = Image((4, 4)).for_function()
CHECK = "Check the units."

# fmt: off
VALUES = [
    ("a (2, 2) float32 tensor, got shape ().", (TENSOR, 3.0)),
    ("finite values of magnitude <= 65504, got nan at [1, 0].", (TENSOR, [[0, 1], [math.nan, 1]])),
    ("finite values of magnitude <= 65504, got -inf at [1, 1].", (TENSOR, [[0, 1], [1, -math.inf]])),
    (f"finite values of magnitude <= 65504, got -70000 at [1, 1]. {CHECK}", (TENSOR, [[0, 1], [2, -7e4]])),
    (f"finite values of magnitude <= 0.1, got 0.1 at [0]. {CHECK}",
     (Tensor(shape=(2,), bound=0.1), np.full(2, np.nextafter(np.float32(0.1), np.float32(1))))),
    ("finite values … <= 65504, got 70000 at [0]. …", (Tensor((2,), "float16", bound=1e6), [7e4, 0])),
    ("integers that float16 holds exactly, got 2049 at [1, 0]. Send floats to have them rounded.",
     (HALF, np.array([[4096, 0], [2049, 1]], np.uint16)), (HALF, torch.tensor([[4096, 0], [2049, 1]]))),
    ("integers that float32 …, got 9223372036854775807 …", (Tensor((1,), bound=math.inf), np.array([2**63 - 1]))),
    ("int32 values from -9 to 9, got 10 at [1].", (Tensor((2,), "int32", bound=9.0), [0, 10])),
    ("uint8 values from 0 to 255, got 256 at [1].", (BYTES, [1, 256])),
    ("whole numbers that int64 holds, got 1.5 at [1].", (INDICES, [0.0, 1.5]), (INDICES, np.array([0, 1.5], "f2"))),
    ("uint8 values from 0 to 255, got nan at [1].", (BYTES, torch.tensor([0.0, math.nan]))),
    ("whole numbers that int64 holds, got 9.22337e+18 at [1].", (INDICES, [0.0, 2.0**63])),
    ("a (2,) int64 tensor, got a list that holds bool True.", (INDICES, [True, False])),
    ("a (2,) bool tensor, got dtype int64. Convert it to bool.", (MASK, np.zeros(2, int))),
    ("a (2,) bool tensor, got a list that holds int 1.", (MASK, [1, 0])),
    ("at most 48 samples at 16000 Hz, got 48000 of them from 3 at 1 Hz. …", (Audio(4, rate=16000), (np.zeros(3), 1))),
    ("a PIL image or 8-bit RGB pixels, got shape (3, 4, 5) of torch.float32. Send three channels of uint8 values …",
     (IMAGE_OF_A_FUNCTION, torch.zeros(3, 4, 5))),
    ("a PIL image or 8-bit RGB pixels, got shape (1, …) of uint8. …", (IMAGE_OF_A_FUNCTION, PIXELS[None, :, :, 0])),
    ("a text of 1..2 characters, got int 3.", (TEXT, [3])),
    ("a text of 1..2 characters, got 3 of them.", (TEXT, "abc")),
    ("a text of 1..2 characters, got 0 of them.", (TEXT, "")),
    ("a text of 1..2 characters among 'CO', got 'N' at 1.", (Text(2, alphabet="CO"), "CN")),
    ("a text that UTF-8 can encode, got half of a surrogate pair at 1.", (TEXT, "a\ud800")),
    ("a dict of a and b, got one of ['a', 'c'].", (RECORD, {"a": [1], "c": 2})),
    ("a dict of a and b, got int 3. A list or tuple is several items.", (RECORD, [3])),
    ("a (frames, metadata) pair, got frames without metadata.", (Video(largest=(2, 4, 4), metadata=True), FRAMES)),
]
"""Item types and data; after `spec.m[0]: expected `, as are images, videos and audio below."""
# fmt: on


@pytest.mark.parametrize(("sentence", "type_and_data"), list_cases(VALUES))
def test_values_of_an_item_are_rejected(sentence, type_and_data):
    item_type, data = type_and_data
    with rejects(InputError, "spec.m[0]: expected " + sentence):
        parse(item_type, data)


# fmt: off
IMAGES = [
    ("an image of at least 1 x 1 pixels, got size (0, 3).", PILImage.new("RGB", (0, 3))),
    ("a PIL image or an array, got str 'cat'.", "cat"),
    ("a PIL image or an array, got list [1, 2].", [[1, 2]]),
    ("an array of shape (height, width, 3) or (3, height, width), got shape (5, 6, 7).", np.zeros((5, 6, 7))),
    ("an array of shape …, got shape (0, 5, 3).", np.zeros((0, 5, 3))),
    ("an array of shape …, got a torch.sparse_coo tensor on cpu.", SPARSE),
    ("finite values …, got NaN or an infinity.", torch.zeros(3, 4, 4) + math.nan, torch.zeros(3, 4, 5) + math.inf),
    ("finite values of magnitude <= 65504, got 100000.", torch.full((3, 4, 4), 1e5)),
    ("real numbers, got dtype complex128.", np.zeros((3, 4, 4), complex)),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "data"), list_cases(IMAGES))
def test_images_are_rejected(sentence, data):
    with rejects(InputError, "spec.m[0]: expected " + sentence):
        parse(Image(largest=(4, 4)), data)


FRAME = np.zeros((4, 4, 3))
WIDER_FRAME = np.zeros((4, 5, 3))

# fmt: off
VIDEOS = [
    ("an array of shape (frames, height, width, 3), got str 'cat'.", "cat"),
    ("an array of shape …, got shape (4, 4, 3).", FRAME),
    ("an array of shape …, got shape (2, 5, 6, 7).", np.zeros((2, 5, 6, 7))),
    ("an array of shape …, got tuple ('x', {'fps': 2.0}).", ("x", {"fps": 2.0})),
    ("an array of shape …, got shape (4, 5, 3).", (FRAMES[0], {"fps": 2.0})),
    ("an array of shape …, got a torch.sparse_coo tensor on cpu.", [SPARSE]),
    ("an array of shape …, got a list.", [PIXELS, "x"]),
    ("frames of one shape and dtype, got float64 (4, 4, 3) and float64 (4, 5, 3).", [FRAME, WIDER_FRAME]),
    ("frames of one shape and dtype, got uint8 (4, 5, 3) and uint8 (4, 5).", [PICTURE, PICTURE.convert("L")]),
    ("finite values …, got NaN or an infinity.", np.full((2, 4, 5, 3), np.nan), torch.full((2, 3, 4, 5), math.inf)),
    ("real numbers, got dtype object.", np.zeros((2, 4, 5, 3), object)),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "data"), list_cases(VIDEOS))
def test_videos_are_rejected(sentence, data):
    with rejects(InputError, "spec.m[0]: expected " + sentence):
        parse(Video(largest=(2, 4, 4)), data)


# fmt: off
SOUNDS = [
    ("a 1-D float array or an (array, sampling rate) pair, got shape (3,), dtype int64.", np.zeros(3, int)),
    ("a 1-D float array …, got shape (0,), dtype float64.", np.zeros(0)),
    ("a 1-D float array …, got shape (1, 2, 2), dtype float64.", np.zeros((1, 2, 2))),
    ("a 1-D float array …, got a torch.sparse_coo tensor on cpu.", SPARSE[0, 0]),
    ("a 1-D float array …, got list [[1.0], [1.0, 2.0]].", [[[1.0], [1.0, 2.0]]]),
    ("a sampling rate >= 1 in Hz, got 0.", (np.zeros(3), 0)),
    ("a sampling rate >= 1 in Hz, got inf.", (np.zeros(3), math.inf)),
    ("a sampling rate >= 1 in Hz, got True.", (np.zeros(3), True)),
    ("samples alone, since the spec states no sampling rate, got 8000 Hz. Send the array.", (np.zeros(3), 8000)),
    ("finite values of magnitude <= 65504, got NaN or an infinity.", [1.0, math.nan], np.array([math.inf])),
    ("finite values of magnitude <= 65504, got 1e+300.", np.array([1e300])),
    ("samples of magnitude <= 8, got 32767. Scale them to -1..1.", np.array([3.0, -32767.0])),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "data"), list_cases(SOUNDS))
def test_audio_is_rejected(sentence, data):
    with rejects(InputError, "spec.m[0]: expected " + sentence):
        parse(Audio(largest=4), data)


def test_stereo_is_rejected():
    sentence = (
        "spec.m: expected a 1-D float array …, got shape (9, 2), which has 2 channel(s). Average the channels: "
        "x.mean(1)."
    )
    with rejects(InputError, sentence):
        parse(Audio(largest=4), np.zeros((9, 2)))


LENGTH = "Send a file that states its length, or the frames alone."

# fmt: off
METADATA = [
    (f"fps > 0, got nan. {LENGTH}", {"fps": math.nan}),
    ("fps > 0, got inf. …", {"fps": math.inf}),
    ("fps > 0, got -1.0. …", {"fps": np.float64(-1)}),
    (f"a duration >= 0 in seconds, got -2. {LENGTH}", {"fps": 1, "duration": -2}),
    (f"total_num_frames >= 1, got -3074457345618259. {LENGTH}", {"total_num_frames": -3074457345618259}),
    (f"frames_indices of {len(FRAMES)} frames, got 10 of them.", {"frames_indices": list(range(10))}),
    ("frames_indices …, got int 5.", {"frames_indices": 5}),
    ("frames_indices from 0 to 3, got 4.", {"total_num_frames": 4, "frames_indices": [4] * len(FRAMES)}),
    ("frames_indices from 0 to inf, got -1.", {"frames_indices": [-1] * len(FRAMES)}),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "metadata"), list_cases(METADATA))
def test_metadata_of_a_video_are_rejected(sentence, metadata):
    with rejects(InputError, "spec.m[0], metadata: expected " + sentence):
        parse(Video((9, 9, 9)), (FRAMES, metadata))


CLICKED = Record(image=Image((9, 9)), x=Tensor((1,), "int64", bound=between(0, item.image.width - 1)))


def test_an_item_in_a_list_is_named_by_its_index():
    with rejects(InputError, "spec.m[1]: expected a (2, 2) float32 tensor, got shape (3,)."):
        parse(TENSOR, [ZEROS, torch.zeros(3)])


def test_a_part_of_a_record_is_named():
    with rejects(InputError, "spec.m[0].x: expected int64 values from 0 to 3, got 4 at [0]."):
        parse(CLICKED, {"image": PICTURE.resize((4, 9)), "x": [4]})
    with rejects(InputError, "spec.m[0]: expected a dict of image and x, got one of ['x']."):
        parse(CLICKED, {"x": [0]})
    with rejects(InputError, "spec.m[0].image: expected a PIL image or an array, got int 0."):
        parse(CLICKED, {"image": 0, "x": [0]})
    with rejects(InputError, "spec.m[0].a: expected a (1..4,) int64 tensor, got shape (5,)."):
        parse(RECORD, {"a": [1] * 5, "b": [1]})


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_limit_of_a_size_that_the_item_lacks():
    sound = bind_modality(item=Audio(4, most=4, rate=2))
    with rejects(InputError, "spec.m, limit_mm_per_prompt: expected …, got width=3. …"):
        sound.largest_item(sizes={"width": 3})


def test_a_prompt_that_the_function_of_the_spec_rejects():
    def find_seven(scope):
        return scope.prompt.index(7)

    with rejects(InputError, "spec.prompt: expected a prompt …, got ValueError: 7 is not …"):
        rewrite_prompt(find_seven)


def test_a_prompt_without_the_layout_is_not_reduced():
    plan = bind_plan(make_modality(update=replace(9)))
    with rejects(InputError, "spec.prompt: expected the layout …"):
        plan.unexpand([9], {"m": ZEROS})


def test_a_text_needs_a_tokenizer():
    with rejects(InputError, "spec.prompt: expected token ids, got a text. The model has no …"):
        SPEC.bind(CONFIG).expand("text", {})


def test_a_text_is_one_that_utf_8_can_encode():
    plan = SPEC.bind(CONFIG, Tokenizer())
    with rejects(InputError, "spec.prompt: expected a text that UTF-8 can encode, got half of a surrogate pair at 2."):
        plan.expand("a \ud800", {})


def test_a_prompt_consists_of_ids_of_the_vocabulary():
    with rejects(InputError, "spec.prompt[1]: expected a token id …, got -1. Check the tokenizer."):
        PLAN.preview([1, -1], {})
    with rejects(InputError, "spec.prompt[2]: expected a token id from 0 to 199, got 200. …"):
        PLAN.check_ids([1, 2, 200])


@pytest.mark.parametrize("token", ["5", None, 2**99])
def test_a_token_id_is_a_number_of_the_vocabulary(token):
    with rejects(InputError, "spec.prompt[1]: expected a …, got …."):
        PLAN.check_ids([0, token])


def test_none_is_no_item():
    with rejects(InputError, "spec.m[1]: expected …, got None. Send the item itself."):
        PLAN.expand([5, 5], {"m": [ZEROS, None]})
    with rejects(InputError, "spec.m[1]: expected …, got None. Send the item itself."):
        preview({"m": [ZEROS, None]}, [5, 5])


# mmkit gives the remedy where the message of a processor says "text"; so must not the name of this function, which is
# in the TypeError of the second test
def reject_call(**inputs):
    """Reject a call as the Hugging Face processors of models with a text do."""
    raise ValueError("You have to specify text.")


def test_items_that_the_hugging_face_processor_refuses():
    with rejects(InputError, "spec.m: expected items …, got some that it refuses: You have to …. Name …"):
        preview({"m": ZEROS}, process=hf(), processor=reject_call)


def return_one_batch(m, **options):
    """Return one batch for all items, as Idefics2's processor does."""
    return {"x": torch.stack(list(m))[None]}


def test_a_hugging_face_processor_that_returns_one_batch_for_all_items():
    parts = dict(item=Tensor((3,)), layout=embed(5), fields={"x": batched()})
    sentence = (
        "spec.m, fields['x']: expected 2 items along the first dimension, got 1. If the processor takes all items for "
        "those of one prompt, call it for each: hf(..., one_by_one=True)."
    )
    with rejects(SpecError, sentence):
        preview({"m": [torch.zeros(3)] * 2}, [5, 5], process=hf(), processor=return_one_batch, **parts)

    items = [torch.zeros(3), torch.ones(3)]
    expanded = preview({"m": items}, [5, 5], process=hf(one_by_one=True), processor=return_one_batch, **parts)
    assert [field["x"].tolist() for field in expanded.fields["m"]] == [[[0, 0, 0]], [[1, 1, 1]]]


def return_three_crops(m, crop=True):
    """Return three entries for an item, unless they are turned off."""
    return {"x": torch.stack([item for item in m for _ in range(3 if crop else 1)])}


def test_a_hugging_face_processor_that_returns_more_entries_than_items():
    parts = dict(item=Tensor((3,)), layout=embed(5), fields={"x": batched()}, processor=return_three_crops)
    sentence = (
        "spec.m, fields['x']: expected 1 items along the first dimension, got 3. If an item has several, declare "
        "flat(...). If the processor passes arguments of its own to its image processor, repeat them: hf(..., "
        "kwargs={...})."
    )
    with rejects(SpecError, sentence):
        preview({"m": [torch.zeros(3)]}, process=hf(), **parts)

    expanded = preview({"m": [torch.zeros(3)]}, process=hf(kwargs={"crop": False}), **parts)
    assert [field["x"].shape for field in expanded.fields["m"]] == [(3,)]


def test_an_option_of_a_request_that_is_named_as_an_input():
    plan = bind_plan(make_modality(process=hf()), processor=reject_call)
    with_option = plan_for_options(plan, {"m": 0}, reject_call)
    with rejects(InputError, "spec.m: expected items …, got TypeError: … multiple values for keyword argument 'm'."):
        with_option.preview([5, 5], {"m": ZEROS})


def test_an_item_that_a_process_refuses_itself():
    def process_zeros(items, scope):
        if items[0].any():
            raise InputError("spec.m[0]", "an item of mine", "another")
        return {"x": items}

    with rejects(InputError, "spec.m[0]: expected an item of mine, got another."):
        preview({"m": ZEROS + 1}, process=process_zeros)


def return_zeros(items, scope):
    return {"x": torch.zeros(len(items), 2)}


def test_a_text_without_tokens_that_stand_for_an_item():
    options = dict(
        item=Record(a=Text(12)), layout=embed(tok["<image>"]), update=replace(tok["<im_end>"]), process=return_zeros
    )
    target = "spec.m[1].a: expected a text without '<im_end>', which stands for an item, got 'x<im_end>y'."
    with rejects(InputError, target):
        preview({"m": [{"a": "x"}, {"a": "x<im_end>y"}]}, [8, 8], **options)
    with rejects(InputError, "spec.m[0].a: expected a text without '<image>', which …, got '<image>'."):
        preview({"m": {"a": "<image>"}}, [8], **options)


def test_modalities_of_a_request():
    with rejects(InputError, "spec.multi_modal_data: expected …, got 'x'."):
        PLAN.expand([], {"x": 0})
    with rejects(InputError, "spec.multi_modal_data: expected …, got 'x'."):
        preview({"x": 0})


@pytest.mark.parametrize("method", [PLAN.expand, PLAN.preview], ids=["expand", "preview"])
def test_items_are_sent_by_modality(method):
    sentence = 'spec.multi_modal_data: expected a dict of items by modality, got a list. Write {"m": [...]}.'
    with rejects(InputError, sentence):
        method([5], [ZEROS])


def test_an_item_that_a_layout_function_rejects():
    def refuse_two_rows(length):
        if length == 2:
            raise ValueError("too odd.")
        return length

    def lay(scope):
        return embed(5) * refuse_two_rows(scope.item.length)

    rows = later(refuse_two_rows)(item.length)
    items = [torch.zeros(1), torch.zeros(2)]
    growing = Tensor((between(1, 4),))
    sentence = "spec.m[1]: expected an item that has a layout, got an item of shape (2,): too odd."
    with rejects(InputError, sentence):
        preview({"m": items}, [5, 5], item=growing, layout=embed(5) * rows)
    with rejects(InputError, sentence):
        preview({"m": items}, [5, 5], item=growing, layout=lay)
    with rejects(InputError, sentence):
        preview(
            {"m": items}, [5, 5], item=growing, layout=embed(5) * fields.n, fields={"x": batched(), "n": derived(rows)}
        )


def return_tensors(items, scope):
    return {"x": [torch.tensor(value) for value in items]}


def test_an_item_without_a_placeholder():
    vector = Tensor((between(1, 3),))
    sentence = "spec.m[1]: expected at least one placeholder per item, got 1 other token for an item of shape (2,). …"
    with rejects(InputError, sentence):
        preview({"m": [torch.zeros(1), torch.zeros(2)]}, item=vector, layout=literal(6) + embed(5) * (item.length % 2))

    sentence = "spec.m[0]: expected at least one placeholder per item, got none for an item of shape (2,). …"
    with rejects(InputError, sentence):
        preview({"m": ZEROS[0]}, item=vector, layout=embed(5) * (item.length % 2))

    sentence = "spec.m[0]: expected at least one …, got none for an item of length 1. Send one of at least 2 samples."
    halved = embed(5) * (item.length // 2)
    with rejects(InputError, sentence):
        preview({"m": np.zeros(1)}, item=Audio(largest=9), layout=halved, process=return_tensors)


def preview_audio_of_three_rows(data):
    """Preview data of a modality whose largest item has three encoder rows."""
    options = dict(layout=embed(5) * item.length, embeds=embed(5) * item.rows, process=return_tensors)
    return preview({"m": data}, [5] * 4, item=Audio(largest=3), **options)


@pytest.mark.parametrize("data", [{"m_embeds": torch.zeros(4, 2)}, [0.0] * 4], ids=["embeddings", "samples"])
def test_an_item_with_more_rows_than_the_largest(data):
    with rejects(TooManyRows, "spec.m[0]: expected at most 3 encoder row(s), …, got 4. …"):
        preview_audio_of_three_rows(data)


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_embeddings_are_sent_as_a_part_of_their_modality():
    with rejects(InputError, "spec.multi_modal_data: …, got 'm_embeds'. Send embeddings …"):
        preview({"m_embeds": ZEROS}, embeds=True)


def test_embeddings_that_a_modality_does_not_take():
    with rejects(InputError, "spec.multi_modal_data: …, got 'm_embeds'. Send the raw items …"):
        preview({"m_embeds": ZEROS[None]})
    with rejects(InputError, "spec.m: expected a (2, 2) …, got m_embeds. Send the raw …"):
        preview({"m": {"m_embeds": ZEROS[None]}})
    with rejects(InputError, "spec.m: expected a (2, 2) float32 tensor or a list of them, got dict {}."):
        preview({"m": {}})


def test_embeddings_of_an_item_are_a_tensor():
    with rejects(InputError, "spec.m: expected at least one (rows, hidden_size) tensor, got none."):
        preview({"m": {"m_embeds": torch.zeros(0, 2, 3)}}, embeds=True)
    with rejects(InputError, "spec.m: expected at least one (rows, hidden_size) tensor, got a str."):
        preview({"m": {"m_embeds": "rows"}}, embeds=True)


def test_embeddings_have_as_many_rows_as_the_layout():
    with rejects(InputError, "spec.m[0]: expected 1 embedding row(s), got 2."):
        preview({"m": {"m_embeds": ZEROS}}, embeds=True)


def parse_embeddings_with_fields(embeddings, **field_values):
    """Parse embeddings of two columns, with the fields n and k that their layout reads."""
    own_fields = {"n": batched(**NUMBER), "k": batched(**NUMBER)}
    layout = embed(5) * (fields.n + fields.k)
    parser = bind_modality(layout=layout, fields=own_fields, embeds=True, process=hf()).parser
    parser.parse({"m_embeds": embeddings, **field_values}, 2)


def test_embeddings_come_with_the_fields_of_their_layout():
    with rejects(InputError, "spec.m: expected the fields ['m_embeds', 'n', 'k'], got ['m_embeds', 'n']."):
        parse_embeddings_with_fields([ZEROS], n=[2])


def test_embeddings_and_their_fields_are_of_as_many_items():
    with rejects(InputError, "spec.m.k: expected 2 items, got 1."):
        parse_embeddings_with_fields([ZEROS] * 2, n=[2, 2], k=[0])
    with rejects(InputError, "spec.m: expected 3 embedding row(s) for 2 items, got 2."):
        parse_embeddings_with_fields(ZEROS, n=[2, 1], k=[0, 0])
    with rejects(InputError, "spec.m: expected embeddings of 1 items, got 2."):
        parse_embeddings_with_fields([ZEROS] * 2, n=[2], k=[0])
    with rejects(InputError, "spec.m: expected embeddings of 3 items, got 2."):
        parse_embeddings_with_fields([ZEROS] * 2, n=[2] * 3, k=[0] * 3)


def test_pixels_that_may_be_embeddings():
    parser = bind_modality(item=Image(largest=(9, 9)), process=hf(), embeds=True).parser
    sentence = "spec.m[2]: expected pixels of three channels, got shape (1, 4, 6), which may be embeddings. …"
    with rejects(InputError, sentence):
        parser.parse([torch.zeros(3, 4, 6), torch.zeros(4, 6, 3), torch.zeros(1, 4, 6)], 6)

    sentence = "spec.m[0]: expected a finite floating (rows, 6) tensor, got shape (4, 5) of torch.float32. Send …"
    with rejects(InputError, sentence):
        parser.parse(torch.zeros(3, 4, 5), 6)


# -- items of a prompt -------------------------------------------------------------------------------------------------


def test_placeholders_without_items():
    without_tokenizer = SPEC.bind(CONFIG)
    sentence = 'spec.m: expected one item per placeholder, got 2 placeholders [5] and no item. Send items of "m", …'
    with rejects(InputError, sentence):
        without_tokenizer.place_layouts([1, 5, 5], {})

    with rejects(InputError, r"spec.m: expected one item …, got 1 placeholder '\x05' and no item. …"):
        PLAN.place_layouts([5], {})

    sentence = r"spec.m: expected one item per placeholder, got 2 placeholders '\x05' and no item. …"
    with rejects(InputError, sentence):
        PLAN.place_layouts([1, 5, 5], {})
    with rejects(InputError, sentence):
        PLAN.place_layouts([1, 5, 5], {"m": []})


def test_items_of_two_modalities_that_have_one_layout():
    plan = bind_plan(make_modality(), make_modality("n", fields={"y": batched()}))
    sentence = (
        "spec.m, spec.n: expected a prompt that tells their items apart, got the layout '\\x05', which either has. "
        "Send …"
    )
    with rejects(InputError, sentence):
        plan.preview([5, 5], {"m": ZEROS, "n": ZEROS})


def test_a_modality_without_positions_has_one_item_per_request():
    plan = bind_plan(make_modality(**WITHOUT_POSITIONS))
    with rejects(InputError, "spec.m: expected one item per request, got none. The model reads …"):
        plan.preview([5], {})
    with rejects(InputError, "spec.m: expected fewer items, got 2. At most 1 m(s) …"):
        plan.preview([5], {"m": [ZEROS] * 2})


def place_items(prompt, *updates, **options):
    """Place items of m, each two positions of the id 5, by the update of each: a kind and the ids of its target."""
    layouts = [make_item_layout([5, 5], [update]) for update in updates]
    return place(prompt, {"m": layouts}, "spec", **options)


def get_characters(text):
    """Return the ids of a text by the tokenizer of these tests."""
    return Tokenizer().encode(text, add_special_tokens=False)


def test_more_targets_than_items():
    sentence = (
        "spec.m: expected 1 target [3] in …, got 2, and 1 placeholder [5] beside. Write one target …, or its whole …"
    )
    with rejects(LeftOver, sentence):
        place_items([3, 1, 3, 5], ("replace", [3]))


def test_a_placeholder_beside_an_item_at_the_start():
    with rejects(LeftOver, "spec.m: expected a prompt without placeholders, got 1 placeholder [5]. …"):
        place_items([1, 5], ("start", []))


def test_a_target_without_its_item():
    with rejects(LeftOver, "spec.m: expected one item per target, got the target [2] without its item. Send …"):
        place([1, 2], {}, "spec", ReservedTargets({(2,): "m"}))
    with rejects(LeftOver, "spec.m: expected one item per target, got the target '<graph>' without its item. …"):
        place(
            get_characters("a<graph>"),
            {},
            "spec",
            ReservedTargets({tuple(get_characters("<graph>")): "m"}),
            tok=CHARACTERS,
        )


@pytest.mark.parametrize("prompt", [[7, 1, 8, 9, 3, 9, 1], [7, 1, 8, 1, 3]])
def test_a_target_inside_the_layout_of_another_modality(prompt):
    image = make_item_layout([1, 1], [("replace", [1])], embeds=(1,))
    video = make_item_layout([7, 1, 8], [("replace", [3])], embeds=(1,))
    sentence = "spec.image[0]: expected a target outside layouts, got [1] inside [7, 1, 8], a layout of video. Write …"
    with rejects(InputError, sentence):
        place(prompt, {"image": [image, image], "video": [video]}, "spec")


@pytest.mark.parametrize("target", [3, 4])
def test_a_target_too_many_of_items_with_different_targets(target):
    """The error counts the target that is left over, and the items that have it."""
    small, large = (make_item_layout([9], [("replace", [number])], embeds=(9,)) for number in (3, 4))
    sentence = f"spec.m: expected 1 target [{target}] in the prompt for 1 item, got 2. Write one target per item, and …"
    with rejects(LeftOver, sentence):
        place([3, 4, target] if target == 4 else [3, 3, 4], {"m": [small, large]}, "spec")


def test_a_prompt_that_lacks_a_target():
    sentence = (
        "spec.m: expected 1 target [3] in the prompt for 1 item, got 0. Write one target per item, and nothing else …"
    )
    with rejects(NotFound, sentence):
        place_items([1], ("replace", [3]))
    with rejects(NotFound, "spec.m: expected 1 target [3] in the prompt for 1 item, got 0. …"):
        place_items([1], ("replace", [3]), forms=[PromptForm.MIXED])


@pytest.mark.parametrize(
    ("prompt", "update", "sentence"),
    [
        pytest.param(
            [4, 3, 4],
            ("replace", [3]),
            "spec.n[0]: expected the target [3] outside other items, got none but in [4, 3, 4], which stands for m[0]. "
            "Write one target for each item.",
            id="target",
        ),
        pytest.param(
            [4, 3, 4],
            ("already_expanded", []),
            "spec.n[0]: expected the layout [3] outside other items, got none but in [4, 3, 4], which stands for m[0]. "
            "Write one layout for each item.",
            id="layout",
        ),
        pytest.param(
            [4, 3, 4, 1],
            ("after", [4]),
            "spec.n[0]: expected the end of the prefix [4] outside other items, got none but in [4, 3, 4], which "
            "stands for m[0]. Write the target of the other item behind it.",
            id="prefix",
        ),
    ],
)
def test_an_item_whose_place_is_inside_another_item(prompt, update, sentence):
    """Not that nothing stands for it: it does, and as often as there are items."""
    outer = make_item_layout([5, 5], [("replace", [4, 3, 4])], embeds=(5,))
    inner = make_item_layout([3], [update], embeds=(3,))
    with rejects(InsideOtherItem, sentence):
        place(prompt, {"m": [outer], "n": [inner]}, "spec")


def test_items_of_two_modalities_that_have_one_target():
    first = make_item_layout([5, 5], [("replace", [3])], embeds=(5,))
    second = make_item_layout([6], [("replace", [3])], embeds=(6,))
    sentence = "spec.n[0]: expected the target [3] outside other items, got none but in [3], which stands for m[0]. …"
    with rejects(InsideOtherItem, sentence):
        place([3, 1], {"m": [first], "n": [second]}, "spec")


def test_what_is_left_over_is_named_where_the_number_is_right():
    """The target of the second alternative of an update."""
    both = make_item_layout([5, 5], [("replace", [3]), ("replace", [4])])
    with rejects(LeftOver, "spec.m: expected 1 target [3] in the prompt for 1 item, got 1, and [4] beside. Write …"):
        place([3, 1, 4], {"m": [both]}, "spec")
    at_start = make_item_layout([5, 5], [("start", []), ("replace", [4])])
    with rejects(LeftOver, "spec.m: expected a prompt without targets, got the target [4]. Leave …"):
        place([4, 1, 4], {"m": [at_start]}, "spec")


def test_a_target_is_told_as_text_where_there_is_a_tokenizer():
    with rejects(NotFound, "spec.m: expected 1 target '<graph>' in the prompt for 1 item, got 0. …"):
        place_items([1], ("replace", get_characters("<graph>")), tok=CHARACTERS)


def test_a_long_target_is_cut():
    with rejects(NotFound, "spec.m: expected 1 target [0, 1, 2, 3, ... 9 ids] in …"):
        place_items([1], ("replace", range(9)))
    with rejects(NotFound, "spec.m: expected 1 target 'abcd'... of 9 tokens in …"):
        place_items([1], ("replace", get_characters("abcdefghi")), tok=CHARACTERS)


def test_a_prompt_that_lacks_a_layout():
    sentence = (
        "spec.m: expected 2 layouts [5] * 2 in the prompt for 2 items, got 1, and 1 placeholder [5] beside. Write …"
    )
    with rejects(NotFound, sentence):
        place_items([5, 5, 5], ("already_expanded", []), ("already_expanded", []))


def test_a_prompt_that_starts_otherwise():
    with rejects(NotFound, "spec.m: expected a prompt that starts with [7, 8], got one … [1, 2]."):
        place_items([1, 2], ("after", [7, 8]))


@pytest.mark.parametrize("prompt", [[71], [72, 71]])
def test_targets_that_differ_are_in_order(prompt):
    sentence = (
        "spec.m[1]: expected the target [72] in the prompt, after those of …, got none. Write one target …, in order."
    )
    with rejects(NotFound, sentence):
        place_items(prompt, ("replace", [71]), ("replace", [72]))
