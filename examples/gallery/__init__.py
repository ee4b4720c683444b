"""The classic vision-language processors as specs, one file per model: what vLLM has, or had, written by hand.

A file needs nothing but mmkit (and, where the model has a geometry of its own, numpy or torch). To serve one of the
models that vLLM has, register the spec on vLLM's own class: ``BLIP2.register(Blip2ForConditionalGeneration)``.
"""
