"""Names of features that TorchRec takes for those of others."""

from __future__ import annotations

from collections.abc import Iterable

from recd_plugins.errors import SetupError
from recd_plugins.words import shortened


def refuse_at_signs(features: Iterable[str], what: str) -> None:
    """Refuse an @ where outputs are told apart by name, feature@table of a shared feature.

    TorchRec (1.6 to 1.9) takes what stands before the first one for the feature's name.

    Args:
        features: of a module.
        what: has to tell them apart, for the message.

    Raises:
        SetupError: a name has one.
    """
    if found := sorted({name for name in features if "@" in name}):
        raise SetupError(
            f"features {shortened(found)} have an @ in their names, and {what}, for which TorchRec "
            "takes what stands before an @ for the name of a feature: rename them"
        )
