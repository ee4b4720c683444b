"""The language: what an author may write in a spec, checked when it is declared.

Nothing of this room imports vLLM or transformers.

- `expr`: recorded values, `cfg`, `item`, `fields`, `tok`, `proc`, `kwargs`;
- `layout`: the tokens of an item, and how they get into a prompt;
- `items`: what a caller may send;
- `field`: how a tensor is split into items, and who makes it;
- `modality`, `spec`: what is declared of an item, and of a model and its outputs;
- `policy`: how a robot drives a model;
- `named_part`: what these have in common;
- `node`: what all parts of a spec have in common;
- `vocabulary`: tokens as ids and as text;
- `names`, `messages`: names that a spec cannot give, and the parts of a chat message.
"""
