"""The poolings of a registry, put into a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from recd_plugins.errors import Problem, RecdError, RegistryError
from recd_plugins.interfaces import TargetPooling
from recd_plugins.model.sequence_pooling import SequencePooling
from recd_plugins.model_tables import rows_by_feature, tables_of
from recd_plugins.registry import RunConfig, at_entry
from recd_plugins.words import did_you_mean, shortened

logger = logging.getLogger(__name__)


def put_poolings(registry: RunConfig, model: nn.Module) -> None:
    """Fill the SequencePooling modules of ``model``.

    Raises:
        RecdError: a sequence feature has no pooling, or its plugin makes none.
        RegistryError: a pooling does not suit the model, or its target is no feature of it.
    """
    modules = [m for m in model.modules() if isinstance(m, SequencePooling)]
    claims = registry.claim("pooling", [f for module in modules for f in module.features])
    for module in modules:
        for feature in module.features:
            entry = claims.get(feature)
            if entry is not None:
                with at_entry(registry.path, entry):
                    module.put(feature, entry.plugin)
                logger.info("%s pools %s", entry.plugin.name, feature)
            elif feature not in module.pooled_by:
                raise RecdError(
                    f"{registry.path}: nothing pools the sequence feature {feature}; "
                    "name it in a pooling: entry"
                )
    _check_targets(registry, model, modules)


def _check_targets(
    registry: RunConfig, model: nn.Module, modules: Sequence[SequencePooling]
) -> None:
    features = list(rows_by_feature(tables_of(model)))
    unknown = {t for module in modules for t in module.targets if t not in features}
    problems = [
        Problem(
            str(registry.path),
            entry.line,
            f"{entry.field}.options.target",
            f"{entry.plugin.target} is no feature that the model looks up"
            + (
                did_you_mean(entry.plugin.target, features)
                or f"; the features: {shortened(features)}"
            ),
        )
        for entry in registry.pooling
        if isinstance(entry.plugin, TargetPooling) and entry.plugin.target in unknown
    ]
    if problems:
        raise RegistryError(problems)
