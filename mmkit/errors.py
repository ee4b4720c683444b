"""One exception family, one message style: where, expected, got, remedy.

Example: ``robot.actions[3]: expected a (6, 3) float32 tensor, got dtype bool. Convert it to
    float32.``
"""

from __future__ import annotations

DISTRIBUTION = "vllm-mmkit"
"""What pip calls mmkit."""


class MmkitError(ValueError):
    """Base of every error that mmkit raises on purpose. Made of the parts of a `sentence`, or of a
    text as it is.

    Attributes:
        where: what the error is about, as ``robot.actions[3]``; empty if it was made of a text.
    """

    def __init__(self, where: str, expected: str = "", got: str = "", remedy: str = "") -> None:
        super().__init__(sentence(where, expected, got, remedy) if expected else where)
        self.where = where if expected else ""


class SpecError(MmkitError):
    """A spec that cannot work: found when it is declared, or when it is bound to a config and a
    tokenizer."""


class InputError(MmkitError):
    """A request that cannot be served: found before it reaches the engine (HTTP status 400 in
    vLLM's server)."""


class VllmApiError(MmkitError):
    """The installed vLLM has none of the interfaces that mmkit knows."""


def sentence(where: str, expected: str, got: str, remedy: str = "") -> str:
    """Build the one message style: where it went wrong, what was expected, what came, what to
    do."""
    text = f"{where}: expected {expected}, got {got}."
    return f"{text} {remedy}" if remedy else text
