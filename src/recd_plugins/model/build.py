"""The built-in model, as a registry describes it."""

from __future__ import annotations

from fnmatch import fnmatchcase

from recd_plugins.data.feature_steps import num_dense_inputs
from recd_plugins.data.placement import plan_placement
from recd_plugins.errors import RecdError, RegistryError
from recd_plugins.interfaces import FeatureSchema
from recd_plugins.model.dlrm import DLRM
from recd_plugins.model_tables import table_name
from recd_plugins.registry import Registry
from recd_plugins.registry.loader import read_yaml
from recd_plugins.words import did_you_mean, shortened


def build_model(registry: Registry, schema: FeatureSchema) -> DLRM:
    """The demo model of the registry's ``model:`` section, without pooling modules.

    Raises:
        RecdError: the registry has no ``model:`` section, or the demo model does not fit the data.
        RegistryError: a pattern of ``model.tables`` matches no table.
    """
    if registry.model is None:
        raise RecdError(
            f"{registry.path}: no model: section; add one, or bring a model of your own"
        )
    if not schema.sparse:
        raise RecdError(
            f"{registry.path}: the dataset has no sparse feature, which the demo model needs; name "
            "columns of ids in its option sparse, or bring a model of your own"
        )
    _check_tables(registry, [table_name(feature) for feature in schema.sparse])
    num_dense = num_dense_inputs(registry, schema)
    placement = plan_placement(registry, schema)
    bag_order = [feature for feature in schema.sparse if feature not in placement.sequence]
    return DLRM(registry.model, num_dense, placement, bag_order)


def _check_tables(registry: Registry, names: list[str]) -> None:
    """Refuse patterns of ``model.tables`` that match nothing: a table would keep its usual size."""
    assert registry.model is not None, "the caller builds a model"
    unmatched = [
        pattern
        for pattern in registry.model.tables
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if unmatched:
        document = read_yaml(registry.path)  # once more: it knows the lines
        raise RegistryError(
            [
                document.problem(
                    ("model", "tables", pattern),
                    "matches no table"
                    + (did_you_mean(pattern, names) or f"; the tables: {shortened(names)}"),
                )
                for pattern in unmatched
            ]
        )
