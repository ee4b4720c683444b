"""No models: what SGLang imports in place of all of its own, see `registration`."""
