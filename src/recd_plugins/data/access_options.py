"""Options of plugins that choose by access frequency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictInt

from recd_plugins.interfaces import PlanContext, PluginOptions, Table
from recd_plugins.interfaces.access import AccessProfile


class AccessOptions(PluginOptions):
    """Options of plugins that choose by access frequency: a file, or rows to count at start."""

    profile: Path | None = Field(
        default=None,
        description="Access profile, as recd profile writes it; null counts at start, on every "
        "rank.",
    )
    profile_rows: Annotated[StrictInt, Field(gt=0)] | None = Field(
        default=65_536,
        description="Rows of the training split, the first ones, that are counted at start; null "
        "counts all.",
    )

    def accesses(
        self, tables: Sequence[Table], setting: PlanContext, *, deduplicated: bool = True
    ) -> AccessProfile:
        """Return access counts of the rows of ``tables``.

        Args:
            tables: of the model.
            setting: its data is counted if there is no file.
            deduplicated: as in ``TrainingData.access``; a file is taken as it is.

        Raises:
            DataError: the data cannot be read, or the file is no access profile.
        """
        if self.profile is None:
            return setting.data.access(tables, self.profile_rows, deduplicated=deduplicated)
        return AccessProfile.load(self.profile)
