"""The model side: the base class of vLLM model classes, and what keeps requests apart there.

- `mixin`: the base class;
- `serving`, `transformers_backend`: models of transformers that vLLM runs as they are, and the base
  of their classes, which are below `generated`;
- `weight_names`: the names that such a class reads from a checkpoint;
- `registration`: what a class must have for a spec;
- `mrope`: M-RoPE positions of a prompt;
- `sampling`: which ids may be sampled, by request.
"""
