"""Errors name what they are about, as one exception with one traceback."""

import pickle
import traceback

import pytest

from mmkit import InputError, ModelSpec, SpecError, cfg, embed
from mmkit.errors import (
    ErrorCollector,
    OptionsError,
    convert_errors,
    locate_errors,
    relocate,
    report_as_options_error,
    report_as_spec_error,
)

from .common import CONFIG, make_modality


def test_a_place_is_put_in_front_of_the_same_exception():
    error = SpecError("x", "a number", "a text")
    with pytest.raises(SpecError) as caught, locate_errors("robot.actions"), locate_errors("layout"):
        raise error
    assert caught.value is error
    assert str(error) == "robot.actions: layout: x: expected a number, got a text."
    assert error.where == "robot.actions: layout: x"
    assert error.__cause__ is None


def test_an_error_without_a_place_gets_one():
    with pytest.raises(SpecError) as caught, locate_errors("robot.actions, layout"):
        raise SpecError("cfg.n has no value.")
    assert str(caught.value) == "robot.actions, layout: cfg.n has no value."
    assert caught.value.where == "robot.actions, layout"


def test_a_located_error_survives_a_pickle():
    error = SpecError("", "a number", "a text")
    error.prepend("robot.actions")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.where == "robot.actions"


def test_other_errors_of_a_part_become_errors_of_the_spec():
    with pytest.raises(SpecError, match=r"^robot: expected a value, got ZeroDivisionError: no.$"):
        with locate_errors("robot"):
            raise ZeroDivisionError("no.")


def test_errors_of_a_function_become_the_class_that_is_asked_for():
    with pytest.raises(InputError, match=r"^robot: expected an array, got TypeError.$"):
        with convert_errors("robot", "an array", InputError):
            raise TypeError


@pytest.mark.parametrize("context", [locate_errors("there"), convert_errors("there", "an array")])
def test_errors_of_a_request_pass_as_they_are(context):
    error = InputError("items.a", "a number", "a text")
    with pytest.raises(InputError) as caught, context:
        raise error
    assert caught.value is error
    assert error.where == "items.a"


def test_all_errors_of_a_spec_are_collected():
    errors = ErrorCollector()
    errors.raise_first()
    for text in ("a", "b", "c"):
        with errors.collect():
            raise SpecError(text)
    with pytest.raises(SpecError, match=r"^a$") as caught:
        errors.raise_first()
    assert [str(error) for error in caught.value.others] == ["b", "c"]


def test_a_refused_item_of_the_spec_is_a_mistake_of_the_spec():
    expected = "the largest item that mmkit made is refused: no. Send less."
    with pytest.raises(SpecError, match=f"^{expected}$"):
        with report_as_spec_error(remedy="Send less."):
            raise InputError("no.")


@pytest.mark.parametrize("error", [SpecError("n has no value."), KeyError("n")], ids=repr)
def test_errors_of_options_are_those_of_the_caller(error):
    with pytest.raises(OptionsError), report_as_options_error("robot, mm_processor_kwargs"):
        raise error


def test_an_error_of_an_item_beside_options_passes_as_it_is():
    error = InputError("n has no value.")
    with pytest.raises(InputError) as caught, report_as_options_error("robot, mm_processor_kwargs"):
        raise error
    assert caught.value is error
    assert not isinstance(error, OptionsError)


def test_an_error_moves_to_another_path():
    copy = relocate(InputError("actions[1]", "a number", "a text"), "items.actions[1]")
    assert str(copy) == "items.actions[1]: expected a number, got a text."
    assert copy.where == "items.actions[1]"


def test_a_misspelt_attribute_of_the_config_prints_one_cause_at_most():
    with pytest.raises(SpecError) as caught:
        ModelSpec("spec", make_modality("a", layout=embed(5) * cfg.nope)).bind(CONFIG)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("direct cause") <= 1
    assert text.count("During handling") == 0
    assert caught.value.where == "spec.a, layout"
