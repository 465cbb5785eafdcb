"""What stands for the data of a training where a trained model goes on without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from recd_plugins.errors import DataError
from recd_plugins.interfaces import Dataset, FeatureSchema
from recd_plugins.registry import RunConfig
from recd_plugins.registry.run_config import NoDataset
from recd_plugins.training.identity import read_kinds, read_schema

R = TypeVar("R", bound=RunConfig)


class AbsentData(NoDataset):
    """A dataset of which the columns are known and no row is there.

    Args:
        dataset: of the registry.
        schema: as a checkpoint has it.
        trained_kinds: likewise; None: the checkpoint is of a version that did not keep them.
        error: what is wrong with its data; whoever needs rows has it raised.
    """

    def __init__(
        self,
        dataset: Dataset,
        schema: FeatureSchema,
        trained_kinds: Mapping[str, str] | None,
        error: DataError,
    ) -> None:
        super().__init__(dataset.options)
        # An identity says these.
        said = {name: getattr(dataset, name) for name in ("name", "free_options", "row_options")}
        vars(self).update(said)
        self.error = error
        self.knows_kinds = trained_kinds is not None
        self.trained_kinds = trained_kinds or {}
        self._dataset, self._schema = dataset, schema

    def prepare(self) -> NoReturn:
        """See ``Dataset.prepare``."""
        raise self.error

    def schema(self) -> FeatureSchema:
        """See ``Dataset.schema``."""
        return self._schema

    def identity(self) -> dict[str, Any]:
        """Nothing is known of the rows."""
        return {}

    def texts(self, feature: str) -> Mapping[int, str]:
        """See ``Dataset.texts``."""
        return self._dataset.texts(feature)

    def to_score(self, location: str) -> Dataset:
        """See ``Dataset.to_score``."""
        self._dataset.trained_schema = self._schema
        self._dataset.trained_kinds = self.trained_kinds
        return self._dataset.to_score(location)


def with_trained_columns(registry: R, checkpoint: Path, *, rows: bool = True) -> R:
    """The registry with its data prepared; or with an AbsentData where that is not there.

    Args:
        registry: that a model was trained by.
        checkpoint: of the model, which says what columns it was trained on.
        rows: are needed; else nothing is prepared, and columns that are known will do.

    Raises:
        DamagedError: the checkpoint does not say.
        RecdError: a plugin failed.
    """
    try:
        if rows:
            registry.dataset.prepare()
        registry.dataset.schema()
    except DataError as error:
        schema, kinds = read_schema(checkpoint), read_kinds(checkpoint)
        absent = AbsentData(registry.dataset, schema, kinds, error)
        return replace(registry, dataset=absent, wrappers=())
    return registry
