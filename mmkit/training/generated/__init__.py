"""The package of the generated processors for transformers.

``from mmkit.training.generated.my_package.spec.ROBOT import RobotHFProcessor``
"""

from ... import generate  # noqa: F401  (installs the import hook)
