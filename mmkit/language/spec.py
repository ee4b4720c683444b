"""The spec of one model: its modalities, its outputs, and how its prompts are written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, field
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..errors import convert_errors
from .expr import Count, Scope, Value, as_expression
from .field import HF
from .items.tensor import Tensor
from .layout import EndingWith, Layout, LayoutLike, Replace
from .layout import layout as as_layout
from .modality import Modality
from .named_part import NamedPart, check_name, require, require_known_when_bound
from .operations import is_operation
from .policy import Concat, Policy

Rewrite: TypeAlias = "EndingWith | Callable[[Scope], Any]"
"""How a spec rewrites a caller's prompt."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

MakeOutputs: TypeAlias = "Callable[[Scope], Iterable[Output]]"
"""A function from a `Scope` with `cfg` and `tok` to the outputs of a checkpoint."""

EXTRA_ARG = "mmkit_output"
"""The key of `SamplingParams.extra_args` for the name of the output that a request asks for."""

DOCUMENT_FILE = "mmkit.json"
"""The file of a checkpoint folder that holds its spec as a document; see `mmkit.document`."""


class Output(NamedPart, init=False):
    """One kind of output other than text, for example a frame of a world model, or an image.

    It says which ids may stand where, and how they become an array. An output has a fixed number of
    tokens; the ids outside the `any_id` positions are separators. It is the whole answer, unless
    there is `after`.

    With `after`, an answer is text, and whenever the model writes the token `after`, an output
    follows: its layout once, or, with `until` and `most`, its layout at least once, at most `most`
    times, and then the token `until`. Text goes on behind it.

    Attributes:
        name: the name by which requests ask for it.
        layout: which ids may stand where. With `until` this is a unit, of which an output has
            several.
        decode: a function ``(ids, scope) -> array``. It receives the ids at the `any_id` positions,
            int64 (positions,), and a `Scope` with `cfg` and `tok`, and returns a numpy array. It
            accepts all ids that the layout allows, and returns arrays of one shape and dtype; uint8
            (height, width, 3) is an RGB image. With `until`, the shape may depend on the number of
            units. Several threads may call it at once.
        encode: its inverse, ``(array, scope) -> ids``: integers (positions,). It may raise a
            ValueError for an array that the output cannot be.
        lossy: whether `decode` returns only nearly the array that `encode` received, for example
            with a learned image tokenizer.
        after: the token behind which an output stands in an answer of text:
            ``tok["<action>"]``. None: the whole answer is the output.
        until: the token that ends an output of several units; None for one unit.
        most: the most units before `until`.

    Raises:
        SpecError: a name that is no identifier, a layout that depends on more than `cfg` and `tok`,
            a `decode` or `encode` that is no function, or `until` without `after` or `most`.
    """

    name: str
    layout: Layout
    decode: Callable[[Array, Scope], Array]
    encode: Callable[[Array, Scope], Any] | None = None
    _: KW_ONLY
    lossy: bool = False
    after: Value | None = None
    until: Value | None = None
    most: Value | None = None

    def __init__(
        self,
        name: str,
        layout: LayoutLike,
        decode: Callable[[Array, Scope], Array],
        encode: Callable[[Array, Scope], Any] | None = None,
        *,
        lossy: bool = False,
        after: Count | None = None,
        until: Count | None = None,
        most: Count | None = None,
    ) -> None:
        self._set(name=name, layout=as_layout(layout), decode=decode, encode=encode, lossy=lossy)
        self._set(after=as_expression(after), until=as_expression(until), most=as_expression(most))
        self._check(f"output {name!r}")

    def _check(self, where: str) -> None:
        check_name(self.name, where)
        expected = "a function (value, scope)"
        require(callable(self.decode), f"{where}, decode", expected, repr(self.decode))
        may_encode = self.encode is None or callable(self.encode)
        require(may_encode, f"{where}, encode", expected, repr(self.encode))
        self._check_marks(where)
        for part in ("layout", "after", "until", "most"):
            require_known_when_bound(getattr(self, part), f"{where}, {part}")

    def _check_marks(self, where: str) -> None:
        """Refuse marks that are no tokens, and those that mean nothing without another."""
        for part in ("after", "until"):
            mark = getattr(self, part)
            is_text = isinstance(mark, (str, Layout)) or is_operation(mark, "tok.text")
            remedy = 'Write tok["<action>"] or cfg.some_token_id.'
            require(not is_text, f"{where}, {part}", "one token id", repr(mark), remedy)
        has_both = (self.until is None) == (self.most is None)
        missing = "most" if self.most is None else "until"
        remedy = "most= is the largest number of units before until=."
        require(has_both, where, "until and most together", f"no {missing}", remedy)
        may_end = self.after is not None or self.until is None
        remedy = "The token after begins an output whose length varies."
        require(may_end, where, "after beside until", "none", remedy)


class Declaration(NamedPart, init=False):
    """What a `mmkit.ModelSpec` declares, apart from what binds, generates and registers it.

    The attributes are told there.
    """

    name: str
    modalities: tuple[Modality, ...] = field(default=(), repr=False)
    prompt: EndingWith | Layout | None = None
    decoder_prompt: EndingWith | Layout | None = None
    tokenization_kwargs: Mapping[str, Any] = field(default_factory=dict)
    merges: str | None = None
    outputs: tuple[Output, ...] | MakeOutputs = ()
    policy: Policy | None = None

    declaring_module: ClassVar[str] = "__main__"
    """The name of the module that declares the spec."""

    def __init__(
        self,
        name: str,
        *modalities: Modality,
        prompt: Rewrite | Layout | None = None,
        decoder_prompt: Rewrite | LayoutLike | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        merges: str | None = None,
        outputs: Sequence[Output] | MakeOutputs = (),
        policy: Policy | None = None,
    ) -> None:
        """Declare a model.

        Raises:
            SpecError: no modality, or two that share a name or a field name; two outputs that share
                a name; or a policy of modalities or an output that there are not.
        """
        self._set(
            name=name,
            modalities=modalities,
            prompt=_convert_rewrite(prompt),
            decoder_prompt=_convert_rewrite(decoder_prompt),
            tokenization_kwargs=dict(tokenization_kwargs or {}),
            merges=merges,
            outputs=outputs if callable(outputs) else tuple(outputs),
            policy=policy,
            declaring_module=find_calling_module(),
        )
        self._check(f"spec {name!r}")

    def list_outputs(self, scope: Scope) -> tuple[Output, ...]:
        """Return the outputs for a config and a tokenizer.

        Raises:
            SpecError: the function of the spec fails, or returns something else.
        """
        if not callable(self.outputs):
            return self.outputs
        where = f"{self.name}.outputs"
        with convert_errors(where, "the outputs for this config"):
            outputs = tuple(self.outputs(scope))
        _check_outputs(outputs, where)
        return outputs

    @property
    def is_raw(self) -> bool:
        """Whether `forward` receives the fields of an item, and nothing of the prompt."""
        return not all(modality.has_positions for modality in self.modalities)

    def __getitem__(self, name: str) -> Modality:
        """Return the modality of that name.

        Raises:
            KeyError: there is none.
        """
        for modality in self.modalities:
            if modality.name == name:
                return modality
        raise KeyError(name)

    def placeholder_text(self, modality: str, index: int) -> str | None:
        """Return the text of an item in a chat message: ``<image>`` for ``tok["<image>"]``.

        It is the target of `replace`.

        Args:
            modality: name of the modality.
            index: the item's position among the items of its modality.

        Returns:
            The text; None for another update, and for a target that is no text, or depends on more
            than `item.index`.
        """
        scope = Scope(item=SimpleNamespace(index=index))
        for declared in self.modalities:
            if declared.name != modality:
                continue
            for update in declared.update:
                if isinstance(update, Replace):
                    return update.find_text(scope)
        return None

    # -- the checks; each may rely on the earlier ones --

    def _check(self, where: str) -> None:
        self._check_modalities(where)
        check_name(self.name, where)
        if not callable(self.outputs):
            _check_outputs(self.outputs, where)
        is_character = isinstance(self.merges, str) and len(self.merges) == 1
        may_merge = self.merges is None or is_character
        require(may_merge, f"{where}, merges", "one character", repr(self.merges))
        require(self.modalities, where, "at least one modality", "none")
        if self.is_raw:
            self._check_raw(where)
        if self.decoder_prompt is not None:
            self._check_encoder_items(where)
        self._check_inputs_of_processors(where)
        self._check_unique_names(where)
        self._check_policy(f"{where}, policy")

    def _check_modalities(self, where: str) -> None:
        for modality in self.modalities:
            expected = "modalities, each as an argument of its own"
            remedy = "Write a * before it." if isinstance(modality, (list, tuple)) else ""
            got = f"a {type(modality).__name__}"
            require(isinstance(modality, Modality), where, expected, got, remedy)

    def _check_raw(self, where: str) -> None:
        """Refuse anything beside a modality without positions."""
        names = [modality.name for modality in self.modalities]
        if callable(self.outputs):
            names.append("outputs")
        else:
            names += [output.name for output in self.outputs]
        if self.prompt is not None:
            names.append("prompt")
        if self.decoder_prompt is not None:
            names.append("decoder_prompt")
        if self.policy is not None:
            names.append("policy")
        expected = "nothing beside a modality without positions, whose fields take up forward"
        require(len(names) == 1, where, expected, ", ".join(names))

    def _check_encoder_items(self, where: str) -> None:
        """Refuse items of an encoder-decoder model that become ids only.

        They stand in the encoder's prompt, and vLLM runs the encoder on the fields of items.
        """
        for modality in self.modalities:
            expected = "embed() positions beside decoder_prompt, since an encoder reads fields"
            got = f"a layout of {modality.name} without any"
            require(not modality.is_ids_only, where, expected, got)

    def _check_inputs_of_processors(self, where: str) -> None:
        """Refuse `hf(inputs=...)` that names what no modality passes."""
        arguments: set[str] = set()
        for modality in self.modalities:
            arguments.update(modality.arguments)
        for modality in self.modalities:
            if isinstance(modality.process, HF):
                unknown = sorted(set(modality.process.inputs) - arguments)
                where_inputs = f"{where}, {modality.name}: hf(inputs=...)"
                expected = f"arguments among {sorted(arguments)}"
                require(not unknown, where_inputs, expected, repr(unknown))

    def _check_unique_names(self, where: str) -> None:
        """Refuse two modalities or fields of one name.

        The model receives fields by name, so a name must tell the modality.
        """
        fields: list[str] = []
        for modality in self.modalities:
            fields += modality.received_fields
        for modality in self.modalities:
            if modality.embeds:
                fields.append(f"{modality.name}_embeds")
        _check_unique("modality", [modality.name for modality in self.modalities], where)
        _check_unique("field", fields, where)

    def _check_policy(self, where: str) -> None:
        """Refuse a policy of outputs or modalities that the spec does not have."""
        if self.policy is None:
            return
        require(isinstance(self.policy, Policy), where, "a Policy", repr(self.policy))
        if not callable(self.outputs):  # a function's outputs are known when the spec is bound
            check_output_of_policy(self.policy, [output.name for output in self.outputs], where)
        names = [modality.name for modality in self.modalities]
        for name, items in self.policy.items.items():
            where_of_items = f"{where}, items"
            require(name in names, where_of_items, f"modalities among {names}", repr(name))
            item_type = self[name].item
            expected = "a modality whose item is one value"
            require(not item_type.is_nested, where_of_items, expected, f"{name!r} of {item_type!r}")
            is_concat = isinstance(items, tuple) and any(isinstance(x, Concat) for x in items)
            expected = "concat() for a Tensor of one dimension"
            is_vector = isinstance(item_type, Tensor) and item_type.ndim == 1
            got = f"{name!r} of {item_type!r}"
            require(is_vector or not is_concat, where_of_items, expected, got)

    def _write_arguments(self) -> Iterator[str]:
        # modalities are arguments without a name, after the name of the spec
        arguments = super()._write_arguments()
        yield next(arguments)
        for modality in self.modalities:
            yield repr(modality)
        yield from arguments


def find_calling_module() -> str:
    """Return the name of the module whose code declares or registers a spec, as `enum` does."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__") in _DECLARING_MODULES and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "__main__"))


_ROOT = __name__.removesuffix(".language.spec")  # not always mmkit: a package may hold a copy of it

_DECLARING_MODULES = (
    f"{_ROOT}.language.spec",
    f"{_ROOT}.language.named_part",
    f"{_ROOT}.document.convert",
    f"{_ROOT}.model_spec",
    f"{_ROOT}.model.serving",
)
"""The modules of mmkit through whose functions a spec is declared or registered."""


def _convert_rewrite(rewrite: Any) -> EndingWith | Layout | None:
    """Return how a prompt is rewritten: the ids at its end, or a layout that takes its place."""
    if rewrite is None or isinstance(rewrite, EndingWith):
        return rewrite
    return as_layout(rewrite)


def check_output_of_policy(policy: Policy, names: Sequence[str], where: str) -> None:
    """Refuse a policy of an output that the spec does not have.

    Raises:
        SpecError: its output is none of these.
    """
    expected = f"an output among {list(names)}"
    require(policy.output in names, f"{where}, output", expected, repr(policy.output))


def _check_outputs(outputs: Sequence[Any], where: str) -> None:
    """Refuse what is no output, and two outputs of one name."""
    for output in outputs:
        require(isinstance(output, Output), f"{where}, outputs", "outputs", repr(output))
    _check_unique("output", [output.name for output in outputs], where)


def _check_unique(kind: str, names: Iterable[str], where: str) -> None:
    """Refuse a name that comes twice."""
    seen_names: set[str] = set()
    for name in names:
        require(name not in seen_names, where, f"one {kind} named {name!r}", "several")
        seen_names.add(name)
