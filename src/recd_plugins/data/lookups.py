"""Which rows of tables samples look up, as a registry's preprocessing leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from recd_plugins.errors import SetupError
from recd_plugins.interfaces import Dataset, FeatureLookups, Lookups, Rows, Table, TablePart

if TYPE_CHECKING:
    from torch import Tensor

    from recd_plugins.data.preprocess import Preprocess
    from recd_plugins.registry import RunConfig


class RegistryLookups(Lookups):
    """The lookups of a registry. They travel to readers by pickle.

    Args:
        registry: its preprocessing is used.
        tables: of the model; None where none is prepared.
        parts: what its entries do to them.
    """

    def __init__(
        self,
        registry: RunConfig,
        tables: Sequence[Table] | None = None,
        parts: Sequence[TablePart] = (),
    ) -> None:
        self._registry = registry
        self._tables = tables
        self._parts = parts

    @property
    def tables(self) -> Sequence[Table]:
        """See ``Lookups.tables``."""
        if self._tables is None:
            raise self._no_model()
        return self._tables

    @property
    def parts(self) -> Sequence[TablePart]:
        """See ``Lookups.parts``."""
        if self._tables is None:
            raise self._no_model()
        return self._parts

    def of(self, rows: Rows, features: Sequence[str]) -> Mapping[str, FeatureLookups]:
        """See ``Lookups.of``. Of a feature in layout ``list_dict`` each list is preprocessed once.

        Other features are not searched for lists that are the same: that takes longer than to look
        at each.
        """
        import torch

        from recd_plugins.data.arrow import dictionary_column, sparse_column
        from recd_plugins.sparse.from_columns import ikjts_from_dictionaries, kjt_from_columns
        from recd_plugins.values.batch import Batch

        dictionaries, columns = {}, {}
        for name in features:
            if (dictionary := dictionary_column(rows, name)) is not None:
                dictionaries[name] = dictionary
            else:
                columns[name] = sparse_column(rows, name)
        nothing = torch.empty(len(rows), 0)
        batch = self._preprocess(
            Batch(
                nothing,
                nothing.sum(1),
                kjt_from_columns(columns, len(rows)) if columns else None,
                ikjts_from_dictionaries(
                    [{name: column} for name, column in dictionaries.items()], len(rows)
                ),
            )
        )
        found = {}
        if batch.kjt is not None:
            for name, jagged in batch.kjt.to_dict().items():
                found[name] = _lookups(jagged.values(), jagged.lengths(), None)
        for ikjt in batch.ikjts:
            inverse = ikjt.inverse_lookup().long()
            for name, jagged in ikjt.to_unique_kjt().to_dict().items():
                found[name] = _lookups(jagged.values(), jagged.lengths(), inverse)
        return found

    def _no_model(self) -> SetupError:
        return SetupError(
            f"{self._registry.path}: which tables there are is known when prepare has "
            "seen the model: read by what it returns, as prepared.dataloader()"
        )

    @cached_property
    def _preprocess(self) -> Preprocess:
        from recd_plugins.data.fitted_steps import fitted_steps
        from recd_plugins.data.preprocess import Preprocess

        steps = fitted_steps(self._registry, self._registry.dataset.schema())
        return Preprocess(steps)


def wrapped_dataset(registry: RunConfig) -> Dataset:
    """The dataset of a registry in its wrappers, which know no model."""
    return registry.wrap_dataset(RegistryLookups(registry))


def _lookups(values: Tensor, lengths: Tensor, inverse: Tensor | None) -> FeatureLookups:
    offsets = np.concatenate(([0], np.cumsum(lengths.numpy(), dtype=np.int64)))
    return FeatureLookups(values.numpy(), offsets, None if inverse is None else inverse.numpy())
