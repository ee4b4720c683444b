"""The model class: LLaVA's, whose answers are actions."""

from examples.llava_like.model import LlavaLikeForConditionalGeneration

from .spec import VLA


@VLA.register
class VlaForActionPrediction(LlavaLikeForConditionalGeneration):
    """Any LLaVA 1.5 checkpoint whose vocabulary ends with the bins of actions."""
