"""Planted bugs: what people get wrong in a processor, a spec or a model, each with the law that must catch it.

A bug changes one thing in a correct base (`base.py`): `MIXED` (two modalities, text, kwargs) or `ROBOT` (ids only,
placeholders written by the caller) over a made-up checkpoint. Each is a named function that returns the broken subject
(`bug.py`); the files beside are named as those of mmkit/testing/laws, whose laws must catch them, and `table.py` has
all. docs/data/planted-bugs.md tells what each mistake is.
"""
