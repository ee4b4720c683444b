"""The path of a request through the server, as the top of mmkit/serve/routes.py tells it."""

import importlib
import re
from operator import attrgetter

import pytest

from mmkit.serve import routes

NAMES = re.findall(r"`((?:\w+\.)+\w+)`", routes.__doc__ or "")


def find(name):
    """Return what a name such as ``engine.Engine.render`` means in mmkit.serve."""
    module, _, attribute = name.partition(".")
    return attrgetter(attribute)(importlib.import_module(f"mmkit.serve.{module}"))


def test_the_path_has_all_rooms_of_the_server_on_it():
    assert {name.partition(".")[0] for name in NAMES} == {
        "answers",
        "bodies",
        "decoding",
        "engine",
        "errors",
        "protocol",
        "routes",
        "state",
        "wire",
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_function_on_the_path_exists(name):
    assert callable(find(name))
