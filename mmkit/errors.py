"""One exception family, one message style: where, expected, got, remedy.

Example: ``robot.actions[3]: expected a (6, 3) float32 tensor, got dtype bool. Convert it to
    float32.``
"""

from __future__ import annotations

DISTRIBUTION = "vllm-mmkit"
"""What pip calls mmkit."""


class MmkitError(ValueError):
    """Base of every error that mmkit raises on purpose. Its arguments are the parts of a
    `sentence`, or one text that is the whole message.

    Attributes:
        where: the path of what is wrong, for example ``robot.actions[3]``; empty for an error made
            of one text.
    """

    def __init__(self, where: str, expected: str = "", got: str = "", remedy: str = "") -> None:
        super().__init__(sentence(where, expected, got, remedy) if expected else where)
        self.where = where if expected else ""


class SpecError(MmkitError):
    """A spec that cannot work. mmkit raises it when a spec is declared, or bound to a config and a
    tokenizer.

    Attributes:
        others: further errors of the same spec, where it was bound.
    """

    others: tuple[SpecError, ...] = ()


class InputError(MmkitError):
    """A request that cannot be served. mmkit raises it before the request reaches the engine; it is
    HTTP status 400 in vLLM's server."""


class VllmApiError(MmkitError):
    """The installed vLLM has none of the interfaces that mmkit knows."""


def sentence(where: str, expected: str, got: str, remedy: str = "") -> str:
    """A message in mmkit's one style: where, expected, got, and a remedy."""
    text = f"{where}: expected {expected}, got {got}."
    return f"{text} {remedy}" if remedy else text
