"""A log of interactions whose events a model that was trained on another one scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recd_plugin_recd.interactions import Interactions
from recd_plugins.api import Split


class ScoredInteractions(Interactions):
    """Every event of a log, in the order of the file; what a row knows is of that log alone.

    Args:
        trained: the dataset that the model was trained on.
        location: of the file.
    """

    def __init__(self, trained: Interactions, location: str) -> None:
        values = {**trained.options.model_dump(), "path": location, "test_fraction": 0}
        super().__init__(type(trained.options).model_validate(values))

    needs_outcome = False

    def _places(self, split: Split) -> NDArray[np.int64]:  # noqa: ARG002
        return np.argsort(self._log.file_rows)
