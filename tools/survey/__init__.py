"""The laws of `mmkit.testing` on vLLM's own processors.

Run them with `python -m tools.survey`, or `make survey`.
"""
