"""The ejected file: what it copies, and the classes of its model."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..errors import SpecError
from ..expr import Expr, Opaque, Root, Scope, item, out, root
from ..generate import class_prefix
from ..items import Audio, Between, Image, Tensor, Video
from ..layout import Layout, around_prompt
from ..process import HF, Identity
from ..spec import Modality, ModelSpec
from .carry import Carrier
from .text import listed, literal, statement
from .translate import Body, static

_TITLES = {
    "mmkit.errors": "errors",
    "mmkit.expr": "",
    "mmkit.vocabulary": "",
    "mmkit.items": "items: what a caller may send",
    "mmkit.layout": "placeholders",
    "mmkit.fields": "fields: how processed tensors split into items",
    "mmkit.updates": "how placeholders get into the prompt",
    "mmkit.plan": "",
    "mmkit.vllm_api.common": "",
    "mmkit.eject.runtime": "the same for every model: parser, dummy inputs, processor",
}


def eject(spec: ModelSpec, sample: Scope | None = None) -> str:
    """The vLLM classes of a spec as the source of one module, which needs vLLM 0.31 to 0.33 and not mmkit.

    Args:
        spec: the declaration.
        sample: the config and the processor of a checkpoint, which tell where ``cfg.a.b`` is an entry of a mapping;
            None takes it for an attribute.

    Raises:
        SpecError: the spec uses something that cannot be copied, as a function without source.
    """
    file = _File(spec, sample)
    text = file.text()
    return _formatted(text)


def _formatted(text: str) -> str:
    """A source text after ruff, where there is one."""
    command = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--line-length=120", "--target-version=py311", "-"]
    for step in (["check", "--fix-only", "--select=I,F401", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run([*command, *step, *options], input=text, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout:
            return text
        text = done.stdout
    return text


@dataclass
class _Class:
    """A class in the making."""

    head: str
    doc: str
    attributes: list[tuple[str, str]] = field(default_factory=list)
    methods: list[list[str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        made = [f"class {self.head}:", f'    """{self.doc}"""']
        if self.attributes:
            made.append("")
            for name, source in self.attributes:
                made += statement(f"{name} = ", source, 4)
        for method in self.methods:
            made += ["", *method]
        return made


class _File:
    """The file of one spec."""

    def __init__(self, spec: ModelSpec, sample: Scope | None) -> None:
        self.spec, self.sample = spec, sample
        self.prefix = class_prefix(spec.name)
        home = spec._module
        self.carrier = Carrier(home, home.partition(".")[0], _features(spec), spec.name)
        module = vars(sys.modules[home]) if home in sys.modules else {}
        self.names: dict[Any, str] = {}
        for name, value in module.items():
            if isinstance(value, (Expr, Layout)) and not isinstance(value, Root) and not name.startswith("_"):
                try:
                    self.names.setdefault(value, name)
                except TypeError:
                    continue
        self.functions: list[list[str]] = []
        self.processors: dict[Any, str] = {}

    def body(self, inline: bool = False) -> Body:
        return Body(self.carrier, self.names, self.sample, inline)

    def text(self) -> str:
        for name in ("Scope", "Positions", "Modality", "ProcessingInfo", "DummyInputs"):
            self.carrier.runtime(name)
        suffixes = ("ProcessingInfo", "DummyInputs", "Processor")
        for name in [f"{self.prefix}{suffix}" for suffix in suffixes] + list(
            map(self._class_name, self.spec.modalities)
        ):
            self.carrier.claim(name)
        base = self.carrier.runtime("Processor" if self.spec.decoder_prompt is None else "EncDecProcessor")
        made = [self._modality(m) for m in self.spec.modalities]
        info = self._info()
        listing = " and ".join(m.name for m in self.spec.modalities)
        model = [
            *self.functions,
            *(m.lines() for m in made),
            info.lines(),
            _Class(
                f"{self.prefix}DummyInputs(DummyInputs)", f"Worst-case inputs of {self.spec.name}: {listing}."
            ).lines(),
            _Class(
                f"{self.prefix}Processor({base})",
                f"Turns the items of {self.spec.name} into fields and placeholders: {listing}.",
            ).lines(),
        ]
        sections = [self._head(), self.carrier.imports()]
        for module, texts in self.carrier.sections():
            title = _TITLES.get(module, f"functions of {self.spec.name}")
            sections += [_rule(title)] * bool(title) + texts
        sections += [_rule(f"the model: {self.spec.name}"), *("\n".join(lines) for lines in model)]
        return _joined(sections) + "\n"

    def _head(self) -> str:
        info, dummy, processor = (f"{self.prefix}{suffix}" for suffix in ("ProcessingInfo", "DummyInputs", "Processor"))
        return (
            f'"""vLLM processor classes of {self.spec.name}, for vLLM 0.31 to 0.33.\n\n'
            "The classes of the model are at the end of this file. Register them on its model class:\n\n"
            f"    @MULTIMODAL_REGISTRY.register_processor(\n        {processor}, info={info}, "
            f'dummy_inputs={dummy}\n    )\n"""'
        )

    # -- classes

    def _info(self) -> _Class:
        made = _Class(
            f"{self.prefix}ProcessingInfo(ProcessingInfo)",
            f"Limits, token counts and data parser of {self.spec.name}.",
            [
                ("name", literal(self.spec.name) or ""),
                ("kinds", listed([self._class_name(m) for m in self.spec.modalities])),
            ],
        )
        for part in ("prompt", "decoder_prompt"):
            layout = getattr(self.spec, part)
            if layout is not None:
                around = around_prompt(layout)
                if around is None:
                    method = self._function(part, layout, "Positions", self_=False)
                else:
                    method = self._function(f"{part}_around", list(around), "list[Positions]", self_=False)
                doc = {
                    "prompt": "What becomes of every prompt",
                    "decoder_prompt": "What becomes of the decoder's prompt",
                }
                method.insert(1, f'        """{doc[part]}{": what stands before and after it" if around else ""}."""')
                made.methods.append(["    @staticmethod", *method])
        return made

    def _class_name(self, m: Modality) -> str:
        return f"{self.prefix}{class_prefix(m.name)}"

    def _modality(self, m: Modality) -> _Class:
        made = _Class(f"{self._class_name(m)}(Modality)", f"{m.name}: {_told(m)}.")
        attributes = made.attributes
        attributes.append(("name", literal(m.name) or ""))
        attributes.append(("fields: ClassVar[Mapping[str, Field]]", self._fields(m)))
        every = m.layout.leaves() | (m.embeds.leaves() if isinstance(m.embeds, Layout) else frozenset())
        every = every.union(*(update.leaves() for update in m.update))
        opaque = any(isinstance(leaf, Opaque) for leaf in every)
        if opaque or any(root(leaf) == out for leaf in every):
            attributes.append(("reads_out", "True"))
        if opaque or item.index in every:
            attributes.append(("by_index", "True"))
        if item.index in every or item.count in every:
            attributes.append(("bounded", "False"))
        if m.embeds:
            attributes.append(("takes_embeds", "True"))
        made.methods.append(self._item(m))
        if m.limit is not None:
            made.methods.append(self._function("most", m.limit, "int | None", layout=False))
        made.methods.append(self._function("positions", m.layout, "Positions"))
        made.methods.append(self._updates(m))
        if ids := self._known_ids(m):
            made.methods.append(ids)
        if isinstance(m.process, HF):
            self._hf(m, m.process, made)
        else:
            made.methods.append(self._process(m))
        if isinstance(m.embeds, Layout):
            made.methods.append(self._function("embeds_positions", m.embeds, "Positions"))
        if m.cache is not True:
            made.methods.append(self._function("cacheable", m.cache, "bool", layout=False))
        if m.when is not True:
            made.methods.append(self._function("present", m.when, "bool", layout=False))
        for name, varying in (("fixed_targets", frozenset()), ("numbered", {item.index})):
            if targets := [u.target for u in m.update if u.kind == "replace" and _varying(u.target) == varying]:
                made.methods.append(self._function(name, targets, "list[Positions]"))
        return made

    def _function(
        self, name: str, value: Any, returns: str, *, layout: bool = True, self_: bool = True, args: str = "s: Scope"
    ) -> list[str]:
        """A method that computes a value or a layout."""

        def made(body: Body) -> str:
            body.name_parts(*(value if isinstance(value, list) else [value]))
            if isinstance(value, list):
                return listed([body.positions(part) for part in value], square=True)
            return body.positions(value) if layout else body.value(value)

        return self._method(f"def {name}({'self, ' * self_}{args}) -> {returns}:", made)

    def _method(self, head: str, make: Callable[[Body], str], indent: int = 4) -> list[str]:
        """A function that returns what `make` writes."""
        first = self.body()
        make(first)
        body = self.body()
        body.once = frozenset(name for name, count in first.roots.items() if count == 1)
        source = make(body)
        made = [f"{' ' * indent}{head}"]
        wanted: list[tuple[str, str]] = []
        for local, expression in reversed(body.statements()):
            if any(local in _names(text) for text in (source, *(text for _, text in wanted))):
                wanted.insert(0, (local, expression))
        for local, expression in wanted:
            made += statement(f"{local} = ", expression, indent + 4)
        return [*made, *statement("return ", source, indent + 4)]

    def _item(self, m: Modality) -> list[str]:
        kind = m.item
        sizes = getattr(kind, "shape", ())
        ends = [end for size in sizes for end in ((size.least, size.most) if isinstance(size, Between) else (size,))]
        named = [*ends, *(getattr(kind, name, None) for name in ("largest", "bound", "rate"))]
        if type(kind) not in (Tensor, Image, Video, Audio):
            raise SpecError(f"{self.spec.name}.{m.name}, eject", "an item type of mmkit", type(kind).__name__)
        name = self.carrier.need("mmkit.items", type(kind).__name__)

        def made(body: Body) -> str:
            body.name_parts(*named)
            return f"{name}({', '.join(self._item_arguments(m, body))})"

        return self._method(f"def item_type(self, s: Scope) -> {name}:", made)

    def _item_arguments(self, m: Modality, body: Body) -> list[str]:
        kind = m.item if isinstance(m.process, HF) else m.item.for_function()
        args: list[str] = []
        match kind:
            case Tensor():
                shape = [
                    f"{self.carrier.need('mmkit.items', 'Between')}({body.value(s.least)}, {body.value(s.most)})"
                    if isinstance(s, Between)
                    else body.value(s)
                    for s in kind.shape
                ]
                args.append(f"shape={listed(shape)}")
                if kind.dtype != "float32":
                    args.append(f"dtype={literal(kind.dtype)}")
                if not kind.finite:
                    args.append("finite=False")
                if kind.bound is not None:
                    args.append(f"bound={body.value(kind.bound)}")
                if kind.largest is not None:
                    args.append(f"largest={body.value(kind.largest)}")
            case Image():
                args.append(f"largest={body.value(kind.largest)}")
                if kind.arrays is False:
                    args.append("arrays=False")
            case Video():
                args.append(f"largest={body.value(kind.largest)}")
                if kind.metadata:
                    args.append("metadata=True")
            case Audio():
                args.append(f"largest={body.value(kind.largest)}")
                if kind.rate is not None:
                    args.append(f"rate={body.value(kind.rate)}")
        return args

    def _fields(self, m: Modality) -> str:
        name = self.carrier.need("mmkit.fields", "Field")
        made = []
        for key, declared in m.fields.items():
            args = [literal(declared.kind) or ""]
            if declared.kind == "flat":
                args.append(f"sizes={self._late(m, key, declared.sizes)}")
            if declared.dim:
                args.append(f"dim={declared.dim}")
            if declared.keep_on_cpu:
                args.append("keep_on_cpu=True")
            if declared.shape is not None:
                args.append(f"shape={listed([self._size(m, key, size) for size in declared.shape])}")
            if declared.dtype is not None:
                args.append(f"dtype={literal(declared.dtype)}")
            if declared.value is not None:
                args.append(f"value={self._late(m, key, declared.value)}")
            made.append(f"{literal(key)}: {name}({', '.join(args)})")
        return f"{{{', '.join(made)}}}"

    def _size(self, m: Modality, key: str, size: Any) -> str:
        if isinstance(size, Between):
            between = self.carrier.need("mmkit.items", "Between")
            return f"{between}({self._late(m, key, size.least)}, {self._late(m, key, size.most)})"
        return self._late(m, key, size)

    def _late(self, m: Modality, key: str, value: Any) -> str:
        """A constant, or a function of a scope: a short one in place, another one of its own."""
        if not isinstance(value, (Expr, list, tuple)) or literal(value) is not None:
            return literal(value) or self.carrier.reference(value)
        short = self.body(inline=True)
        text = short.value(value)
        if len(text) <= 60:
            return f"lambda s: {text}"
        return self._top(f"{m.name}_{key}", value, "Any")

    def _top(self, name: str, value: Any, returns: str) -> str:
        """A function of the file."""
        self.carrier.import_name("typing", "Any")
        while name in self.carrier.taken:
            name = f"{name}_"
        self.carrier.claim(name)

        def made(body: Body) -> str:
            body.name_parts(value)
            return body.value(value)

        self.functions.append(self._method(f"def {name}(s: Scope) -> {returns}:", made, 0))
        return name

    def _updates(self, m: Modality) -> list[str]:
        def made(body: Body) -> str:
            body.name_parts(*(update.target for update in m.update))
            pairs = [listed([literal(update.kind) or "", body.positions(update.target)]) for update in m.update]
            return listed(pairs, square=True)

        return self._method("def updates(self, s: Scope) -> list[tuple[str, Positions]]:", made)

    def _known_ids(self, m: Modality) -> list[str]:
        layouts = [m.layout, *([m.embeds] if isinstance(m.embeds, Layout) else [])]

        def made(body: Body) -> str:
            body.name_parts(*layouts, constant=True)
            lists = list(dict.fromkeys(text for layout in layouts for text in body.known_ids(layout)))
            return " + ".join(f"({text})" if " if " in text and len(lists) > 1 else text for text in lists)

        if not made(self.body()):
            return []
        return self._method("def known_ids(self, s: Scope) -> list[int]:", made)

    def _process(self, m: Modality) -> list[str]:
        head = "def process(self, values: Sequence[Any], s: Scope) -> Mapping[str, Any]:"
        for name in ("Sequence", "Mapping"):
            self.carrier.import_name("collections.abc", name)
        self.carrier.import_name("typing", "Any")
        if isinstance(m.process, Identity):
            ((key, declared),) = m.fields.items()
            if declared.kind == "shared":
                raise SpecError(f"{self.spec.name}.{m.name}, {key}", "a batched or flat field for identity()", "shared")
            made = "list(values)"
            if declared.kind == "flat":
                self.carrier.import_module("torch")
                made = f"torch.cat(list(values), dim={declared.dim})"
            return self._method(head, lambda _: f"{{{literal(key)}: {made}}}")
        return self._method(head, lambda _: f"{self.carrier.reference(m.process)}(values, s)")

    def _hf(self, m: Modality, called: HF, made: _Class) -> None:
        made.attributes.append(("by_hf", "True"))
        for name in ("inputs", "outputs"):
            if renames := getattr(called, name):
                made.attributes.append((name, literal(dict(renames)) or ""))
        if called.processor is not None:
            known = next((name for part, name in self.processors.items() if part == called.processor), None)
            if known is None:
                known = self._top(f"{m.name}_processor", called.processor, "Any")
                self.processors[called.processor] = known
            made.attributes.append(("processor", f"staticmethod({known})"))
        if called.unpad:
            self.carrier.import_name("typing", "Any")
            sizes = {key: self._late(m, f"{key}_sizes", tuple(value)) for key, value in called.unpad.items()}
            constant = {
                key: text if text.startswith("lambda") or text.isidentifier() else f"lambda s: {text}"
                for key, text in sizes.items()
            }
            made.attributes.append(("unpad", "{" + ", ".join(f"{literal(k)}: {v}" for k, v in constant.items()) + "}"))
        if called.text is not None:
            made.methods.append(self._function("text", called.text, "Any", layout=False))
            self.carrier.import_name("typing", "Any")


def _varying(layout: Layout) -> frozenset[Any]:
    return frozenset(leaf for leaf in layout.leaves() if not static(leaf))


def _told(m: Modality) -> str:
    """What the spec says of a modality, in a line."""
    ways = " or ".join(map(repr, m.update))
    kind = type(m.item).__name__
    told = [f"{m.item!r}, placed by {ways}", f"{kind} items, placed by {ways}", f"{kind} items"]
    clean = [re.sub(r"\s+", " ", text).replace("\\", "\\\\").replace('"""', "'''") for text in told]
    return next((text for text in clean if len(text) + len(m.name) < 105), clean[-1])


def _features(spec: ModelSpec) -> frozenset[str]:
    """What a spec uses, for the ``# only`` comments of the runtime."""
    found: set[str] = set()
    for m in spec.modalities:
        found.add(type(m.item).__name__.lower())
        if isinstance(m.process, HF):
            found.add("hf")
            found |= {"unpad"} if m.process.unpad else set()
            found |= {"text"} if m.process.text is not None else set()
        else:
            found.add("own")
        found |= {"embeds"} if m.embeds else set()
        found |= {"cache"} if m.cache is not True else set()
        found |= {"when"} if m.when is not True else set()
        every = m.layout.leaves() | (m.embeds.leaves() if isinstance(m.embeds, Layout) else frozenset())
        every = every.union(*(update.leaves() for update in m.update))
        if item.index in every or any(isinstance(leaf, Opaque) for leaf in every):
            found.add("index")
        if any(u.kind == "replace" and _varying(u.target) == {item.index} for u in m.update):
            found.add("numbered")
        if any(u.kind == "replace" and not _varying(u.target) for u in m.update):
            found.add("fixed")
    for layout in (spec.prompt, spec.decoder_prompt):
        if layout is not None:
            found |= {"prompt"} if around_prompt(layout) is None else {"prompt", "around"}
    return frozenset(found)


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}


def _joined(sections: list[str]) -> str:
    """Statements with blank lines between them: two, or none between short constants."""
    made = sections[0]
    for before, after in pairwise(sections):
        short = all(re.match(r"\w+(: \w+)? = ", text) and "\n" not in text for text in (before, after))
        close = before.startswith('"""') or before.startswith("from __future__")
        made += ("\n" if short else "\n\n" if close else "\n\n\n") + after
    return made


def _rule(title: str) -> str:
    return f"# -- {title} ".ljust(120, "-")
