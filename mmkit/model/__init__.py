"""The model side: the base class of vLLM model classes, and what keeps requests apart on the
device."""
