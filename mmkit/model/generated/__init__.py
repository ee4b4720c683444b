"""The package of vLLM's classes of models of transformers.

``from mmkit.model.generated.my_package.model.RobotForCausalLM import RobotForCausalLM``
"""

from ... import generate  # noqa: F401  (installs the import hook)
