"""The plugin that SGLang runs in each of its processes, before anything else.

It imports the modules that MMKIT_MODULES names, separated by commas. A package that ships a model
declares an entry point of its own in the group ``sglang.srt.plugins``, and needs no variable.
"""

from __future__ import annotations

from ..plugin import load as load
