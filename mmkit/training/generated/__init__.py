"""The generated processors for transformers can be imported from here.

For example ``from mmkit.training.generated.my_package.spec.ROBOT import RobotHFProcessor``.
"""

from ... import generate  # noqa: F401  (installs the import hook)
