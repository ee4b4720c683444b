"""The same specs on many versions of vLLM: `python -m tools.matrix`, or `make matrix`."""
