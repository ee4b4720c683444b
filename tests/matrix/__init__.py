"""The same specs on many versions of vLLM: `python -m tests.matrix`, or `make matrix`."""
