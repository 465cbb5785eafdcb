"""What can be wrong with a checkpoint."""

from collections.abc import Sequence

from recd_plugins.errors import RecdError


class DamagedError(RecdError):
    """A file of a checkpoint is missing, is not what was written, or holds what none needs."""


def damaged(problems: Sequence[str]) -> DamagedError:
    """The error of the first of what is wrong with a checkpoint, and what to do."""
    return DamagedError(f"{problems[0]}; name another checkpoint (recd checkpoint verify)")
