"""Public bugs of vLLM under the laws: `python -m tools.recall`, or `make recall`."""
