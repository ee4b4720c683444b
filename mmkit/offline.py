"""Additions to vLLM's offline `LLM` for models with a spec. Importing this module imports vLLM."""

from .vllm_api.offline import render_processes

__all__ = ["render_processes"]
