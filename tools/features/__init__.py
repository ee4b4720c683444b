"""Features of vLLM, with vLLM's own class and with mmkit's: ``python -m tools.features --help``."""
