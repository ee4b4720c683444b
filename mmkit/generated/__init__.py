"""Where the generated classes live: ``from mmkit.generated.examples.terra.spec.TERRA import TerraProcessor``."""

from .. import generate  # noqa: F401  (installs the import hook)
