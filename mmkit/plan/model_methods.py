"""The methods by which a model class receives the fields of items, in any engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from ..errors import SpecError


def check_method(
    where: str, model: type, method: str, fields: Sequence[str], further: Sequence[str] = ()
) -> None:
    """Refuse a class without a method that takes the fields by their names.

    Args:
        where: names the class in errors.
        model: the class.
        method: the name of the method.
        fields: the arguments that it always gets.
        further: arguments that it gets if it has parameters of these names.

    Raises:
        SpecError: there is no such method, or it has other parameters.
    """
    function: Any = getattr(model, method, None)
    if not callable(function):
        raise SpecError(where, f"a method {method}(self, {', '.join(fields)})", "none")
    signature = inspect.signature(function)
    parameters = list(signature.parameters)[1:]
    arguments = dict.fromkeys(fields)
    for name in further:
        if name in parameters:
            arguments[name] = None
    try:
        signature.bind(None, **arguments)
    except TypeError:
        expected = f"the fields ({', '.join(fields)}) as parameters"
        got = f"({', '.join(parameters)})"
        raise SpecError(f"{where}.{method}", expected, got) from None
