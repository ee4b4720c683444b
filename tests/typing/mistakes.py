"""Typical mistakes in a spec: each line is one that mypy refuses, with the code that it gives.

`make lint` runs mypy over this file, and an ignored error that is none is an error (`warn_unused_ignores`), so every
line stays a mistake that an editor shows. pyright refuses the same lines; nothing here runs.
"""

from mmkit import (
    Image,
    Modality,
    ModelSpec,
    Tensor,
    batched,
    cfg,
    each,
    embed,
    ending_with,
    flat,
    insert,
    item,
    literal,
    replace,
    tok,
)

ITEM = Tensor(shape=(6, cfg.action_dim))
LAYOUT = embed(tok["<patch>"]) * 6
FIELDS = {"actions": batched()}

# a string could mean one token or a text
Modality("m", item=ITEM, layout="<patch>", update=replace(tok["<m>"]), fields=FIELDS)  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=LAYOUT, update=replace("<m>"), fields=FIELDS)  # type: ignore[arg-type]
embed("<patch>")  # type: ignore[arg-type]
LAYOUT + "<end>"  # type: ignore[operator]
ending_with("<end>")  # type: ignore[arg-type]
each(3, lambda i: "<tile>")  # type: ignore[arg-type, return-value]

# one kind of part in the place of another
Modality("m", item=ITEM, layout=LAYOUT, update=tok["<m>"], fields=FIELDS)  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=replace(tok["<m>"]), update=LAYOUT, fields=FIELDS)  # type: ignore[arg-type]
Modality("m", item=Tensor, layout=LAYOUT, update=replace(5), fields=FIELDS)  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=LAYOUT, update=replace(5), fields=[batched()])  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=LAYOUT, update=replace(5), fields={"x": 5})  # type: ignore[dict-item]
Modality("m", item=ITEM, layout=LAYOUT, update=replace(5), fields=FIELDS, limit="3")  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=LAYOUT, update=replace(5), fields=FIELDS, process=5)  # type: ignore[arg-type]
Modality("m", item=ITEM, layout=LAYOUT, update=replace(5), fields=FIELDS, cache=True)  # type: ignore[call-arg]
ModelSpec("m", [Modality("m", placeholder="<m>", tokens=5, item=ITEM, fields=FIELDS)])  # type: ignore[arg-type]
ModelSpec("m", prompt=tok["<end>"])  # type: ignore[arg-type]
Image(largest=336)  # type: ignore[arg-type]
Tensor(shape=6)  # type: ignore[arg-type]
insert(at="middle")  # type: ignore[arg-type]
insert(tok["<s>"])  # type: ignore[call-arg, arg-type]
batched(dtype=32)  # type: ignore[arg-type]
flat(dim=1)  # type: ignore[call-arg]
embed(LAYOUT)  # type: ignore[arg-type]

# what a value known later has not
item.width + "px"  # type: ignore[operator]
tok["<patch>"] * [3]  # type: ignore[operator]
literal(cfg.bos_token_id) * "3"  # type: ignore[operator]
int(item.width)  # type: ignore[call-overload]
cfg.get_size()  # type: ignore[operator]
list(item.shape)  # type: ignore[call-overload]
print("<patch>" in tok)  # type: ignore[operator]
