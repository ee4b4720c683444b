"""The laws of `mmkit.testing` on vLLM's own processors: `python -m tools.survey`, or `make
survey`."""
