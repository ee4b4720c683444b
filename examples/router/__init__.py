"""A router of replicas of one model, which plans by outlines: its process imports neither vLLM nor transformers."""
