"""The package of the generated vLLM classes.

``from mmkit.generated.my_package.spec.ROBOT import RobotProcessor``
"""

from .. import generate  # noqa: F401  (installs the import hook)
