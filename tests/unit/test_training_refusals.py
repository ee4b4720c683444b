"""What the processor and the collator for training refuse, in one sentence each."""

import pytest
import torch

from examples.terra.configuration import LlamaActionConfig
from examples.terra.spec import TERRA
from mmkit import InputError, ModelSpec, insert, replace
from mmkit.training import Collator

from .common import CONFIG, make_modality, refuses
from .test_training import (
    MATRIX,
    PATCH,
    PICTURE,
    PICTURES,
    PLAIN,
    ROWS,
    TYPED,
    make_series,
    make_tokenizer,
    make_waves_processor,
)

# -- calls of the processor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "a text or input_ids, got neither."),
        ({"text": "at", "input_ids": [4]}, "a text or input_ids, got both."),
        ({"text": []}, "at least one prompt, got none."),
        ({"text": 5}, "a text, or a list of them, got 5."),
        ({"input_ids": "at"}, "token ids, got 'at'."),
        ({"text": ["at", "at at"]}, "prompts of one length, got lengths [1, 2]. Write padding=True."),
    ],
)
def test_a_call_without_a_prompt_that_fits_is_refused(arguments, sentence):
    with refuses(InputError, f"waves.prompt: expected {sentence}"):
        make_waves_processor()(**arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"padding": "some"},
            'padding: expected a bool, "longest", or "max_length" beside max_length=, got \'some\'.',
        ),
        ({"padding": "max_length"}, "padding: …, got 'max_length'."),
        ({"padding_side": "middle"}, 'padding_side: expected "left" or "right", got \'middle\'.'),
        (
            {"max_length": 3},
            'max_length: expected padding="max_length" beside it, got padding=False. Nothing is cut off, …',
        ),
        ({"padding": "max_length", "max_length": -1}, "max_length: expected a number above 0, got -1."),
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of: expected padding=True beside it, got padding=False."),
        (
            {"truncation": True, "max_length": 3},
            "truncation: expected False, got True. Nothing is cut off, as in a server: shorten the prompt itself.",
        ),
        ({"return_tensors": "np"}, "return_tensors: expected \"pt\", got 'np'."),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(arguments, sentence):
    with refuses(InputError, f"waves.{sentence}"):
        make_waves_processor()("at", **arguments)


def test_a_side_that_a_collator_cannot_pad_is_refused():
    with refuses(InputError, 'waves.padding_side: expected "left" or "right", got \'middle\'.'):
        Collator(make_waves_processor(), padding_side="middle")


def test_a_name_that_is_no_modality_is_refused_with_the_names_that_a_call_takes():
    sentence = (
        "waves, a call: expected modalities among ['series'], or text, input_ids, add_special_tokens, padding, "
        "truncation, max_length, padding_side, pad_to_multiple_of, return_tensors, got 'images'."
    )
    with refuses(InputError, sentence):
        make_waves_processor()("at", images=[3])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("text_kwargs", "Write options of the text as arguments of the call."),
        ("images_kwargs", "Options of the Hugging Face processor are kwargs= of hf_processor()."),
    ],
)
def test_options_of_transformers_in_a_call_are_refused_with_a_remedy(name, remedy):
    with refuses(InputError, f"waves, a call: …, got '{name}'. {remedy}"):
        make_waves_processor()("at", **{name: {}})


def test_embeddings_by_a_name_of_their_own_are_refused():
    sentence = "waves.multi_modal_data: expected modalities among ['series'], got 'series_embeds'. …"
    with refuses(InputError, sentence):
        make_waves_processor()("at", series_embeds=[3])


@pytest.mark.parametrize(("series", "got"), [(make_series(3), "Tensor"), ([], "0 of them")])
def test_a_batch_takes_a_list_with_the_items_of_each_prompt(series, got):
    sentence = (
        f"waves.series: expected a list with the items of each of 1 prompts, got {got}. "
        "Write None for a prompt without any."
    )
    with refuses(InputError, sentence):
        make_waves_processor()(["at"], series=series)


def test_raw_items_beside_embeddings_in_one_batch_are_refused():
    spec = ModelSpec("spec", make_modality(update=insert(at="start"), embeds=True))
    with refuses(InputError, "…raw items or precomputed embeddings in one batch, got both…"):
        spec.hf_processor(CONFIG)(input_ids=[[1], [1]], m=[ROWS, MATRIX])


def test_pictures_by_both_names_are_refused():
    with refuses(InputError, "spec.multi_modal_data: expected modalities among ['image'], got 'images'."):
        PICTURES.hf_processor(CONFIG)(input_ids=[5], image=PICTURE, images=PICTURE)


# -- samples of the collator -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "sentence"),
    [
        ("look", "expected a dict, got str."),
        (
            {"text": "look", "answer": "at", "weight": 1},
            "expected keys among ['answer', 'input_ids', 'series', 'text'], got 'weight'.",
        ),
        ({"text": ["look", "at"], "answer": "at"}, "expected one prompt, got 2. Give each its sample."),
    ],
)
def test_a_sample_that_is_no_dict_of_one_prompt_is_refused(sample, sentence):
    with refuses(InputError, f"waves.samples[0]: {sentence}"):
        Collator(make_waves_processor())([sample])


def test_a_sample_without_an_answer_is_refused():
    with refuses(InputError, "waves.samples[0].answer: expected a text or token ids, got none."):
        Collator(make_waves_processor())([{"text": "look"}])


NO_IDS = "expected a text or token ids, got none."
NO_TARGET = "expected no placeholder and no target, since items stand in the prompt, got one of waves.series."


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, f": {NO_IDS}"),
        ("", f": {NO_IDS}"),
        (torch.tensor([], dtype=torch.int64), f": {NO_IDS}"),
        (5, ": …, got 5."),
        ([8], "[0]: expected a token id from 0 to 7, got 8."),
        (torch.tensor([[1, 2]]), "[0]: …, got list [1, 2]."),
        ("at <series>", f": {NO_TARGET}"),
        ([PATCH], f": {NO_TARGET}"),
    ],
)
def test_an_answer_that_a_model_cannot_learn_is_refused(answer, sentence):
    with refuses(InputError, f"waves.samples[0].answer{sentence}"):
        Collator(make_waves_processor())([{"text": "look", "answer": answer}])


def test_a_prompt_that_vllm_refuses_is_refused():
    with refuses(InputError, "waves.series: …"):
        Collator(make_waves_processor())([{"text": "look <patch>", "answer": "at"}])


# -- conversations ---------------------------------------------------------------------------------------------------


def apply_template(processor, *content):
    """Apply the chat template to one message of these parts."""
    processor.apply_chat_template([{"role": "user", "content": content}])


def apply_plain_template(**message):
    """Apply a template of texts to one message."""
    processor = make_waves_processor(chat_template=PLAIN)
    processor.apply_chat_template([{"role": "user", **message}])


def test_a_conversation_takes_a_tokenizer():
    processor = TERRA.hf_processor(LlamaActionConfig(pad_token_id=31))
    sentence = "terra.conversation: expected a model with a tokenizer, got one without. Call it with ids."
    with refuses(InputError, sentence):
        apply_template(processor)


def test_a_conversation_has_a_message():
    with refuses(InputError, "waves.conversation: expected a list with at least one message, got []."):
        make_waves_processor(chat_template=PLAIN).apply_chat_template([])


def test_a_conversation_takes_a_chat_template():
    with refuses(InputError, "waves.chat_template: expected a chat template, got none. Give chat_template=."):
        apply_template(make_waves_processor())


def test_a_template_is_a_template_or_the_name_of_one():
    processor = make_waves_processor(chat_template={"a": PLAIN})
    with refuses(InputError, "waves.chat_template: expected a template, or a name among ['a'], got 'b'."):
        processor.apply_chat_template([{"role": "user"}], "b")


def test_a_content_format_is_one_of_vllm():
    processor = make_waves_processor(chat_template=PLAIN)
    sentence = 'waves.chat_template_content_format: expected "auto", "string" or "openai", got \'text\'.'
    with refuses(InputError, sentence):
        processor.apply_chat_template([{"role": "user"}], chat_template_content_format="text")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (
            {"type": "image", "image": 3},
            'a part {"type": "text", "text": ...} or {"type": "series", "series": ...}, got type \'image\'.',
        ),
        ({"type": "text", "text": 3}, "a part with a text, got 3."),
    ],
)
def test_a_part_that_is_no_text_and_no_item_is_refused(part, sentence):
    processor = make_waves_processor(chat_template=TYPED)
    with refuses(InputError, f"waves.conversation[0].content[0]: expected {sentence}"):
        apply_template(processor, part)


def test_a_content_that_is_no_list_is_refused():
    with refuses(InputError, "waves.conversation[0].content: expected a text or a list of parts, got 3."):
        apply_plain_template(content=3)


def test_a_message_without_a_role_is_refused():
    processor = make_waves_processor(chat_template=PLAIN)
    with refuses(InputError, "waves.conversation[0]: expected a message with a role and a content, got {}."):
        processor.apply_chat_template([[{}]])


def test_a_message_with_more_targets_than_items_is_refused():
    processor = make_waves_processor(chat_template=PLAIN)
    sentence = "waves.conversation[0]: expected '<series>' for 1 item(s), got 2 of them in the texts."
    with refuses(InputError, sentence):
        apply_template(processor, {"type": "series", "series": 3}, "<series> <series>")


def test_an_item_without_a_text_in_messages_is_refused():
    spec = ModelSpec("spec", make_modality(update=replace(9)))
    processor = spec.hf_processor(CONFIG, make_tokenizer(chat_template=PLAIN))
    sentence = (
        "spec.conversation[0].content[0]: expected a target with a text in messages, got one that is an id. Use …"
    )
    with refuses(InputError, sentence):
        apply_template(processor, {"type": "m", "m": MATRIX})


@pytest.mark.parametrize(
    ("tool_calls", "sentence"),
    [
        (3, ": expected a list of calls, got 3."),
        ([{}], '[0]: expected a call {"type": "function", "function": ...}, got {}.'),
        ([{"function": {"arguments": "{"}}], "[0].function.arguments: expected a JSON object, got '{'."),
    ],
)
def test_a_malformed_tool_call_is_refused(tool_calls, sentence):
    with refuses(InputError, f"waves.conversation[0].tool_calls{sentence}"):
        apply_plain_template(role="assistant", tool_calls=tool_calls)


def test_a_developer_message_is_refused_where_the_template_names_no_developer():
    sentence = (
        "waves.conversation[0]: expected a role of the chat template, got developer, which it does not name. "
        "Write a system message."
    )
    with refuses(InputError, sentence):
        apply_plain_template(role="developer")


def test_a_template_that_reads_what_vllm_does_not_pass_on_is_refused():
    processor = make_waves_processor(chat_template="{{ messages[0].role_of }}")
    sentence = (
        "waves.conversation: expected messages of which vLLM's chat passes all on to the template, got ['role_of'] as "
        "well, which it reads. Write the thoughts of a message as its reasoning, and leave out others."
    )
    with refuses(InputError, sentence):
        processor.apply_chat_template([{"role": "user", "role_of": "x"}])


def test_messages_that_the_template_refuses_are_refused():
    processor = make_waves_processor(chat_template="{{ raise_exception('user first') }}")
    sentence = "waves.conversation: expected messages that the chat template takes, got TemplateError: user first."
    with refuses(InputError, sentence):
        processor.apply_chat_template([{"role": "user"}])
