"""What can be wrong with a checkpoint."""

from recd_plugins.errors import RecdError


class DamagedError(RecdError):
    """A file of a checkpoint is missing, is not what was written, or holds what none needs."""
