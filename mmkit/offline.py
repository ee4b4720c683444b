"""vLLM's offline `LLM` with models of mmkit. Importing this imports vLLM."""

from .vllm_api.offline import render_processes

__all__ = ["render_processes"]
