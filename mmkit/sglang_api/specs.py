"""Which specs SGLang can serve."""

from __future__ import annotations

from ..errors import SpecError
from ..language.spec import Declaration


def check_spec(spec: Declaration) -> None:
    """Refuse a spec of which SGLang cannot keep a part.

    Raises:
        SpecError: raw input, an encoder-decoder model, or outputs other than text.
    """
    where = f"{spec.name} in SGLang"
    if spec.is_raw:
        expected = "items that take positions of a prompt"
        raise SpecError(where, expected, "raw input", "Serve it with vLLM.")
    if spec.decoder_prompt is not None:
        expected = "a decoder alone"
        raise SpecError(where, expected, "decoder_prompt", "Serve it with vLLM.")
    if spec.outputs:
        expected = "text as the only output, since a request cannot confine what is sampled"
        raise SpecError(where, expected, "outputs", "Serve it with vLLM, or leave them out.")
