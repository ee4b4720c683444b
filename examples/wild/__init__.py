"""Public models with unusual modalities as specs, one file per model: molecules, graphs, point clouds, DNA, heartbeats.

A file has the whole multimodal side of a model. Its class is a language model of transformers with an encoder:
``mmkit.serve_transformers`` lets vLLM run it. docs/data/wild.md compares each with the model's own code.
"""
