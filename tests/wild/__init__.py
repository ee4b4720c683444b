"""Public models with unusual modalities: what their own code makes of a request, and tiny models of the same shape.

A module for each spec of examples/wild. Each has a plain account of what the public repository does, written from its
description, a tokenizer and a config like those of the published checkpoint, and requests that are drawn.
"""
