"""What becomes of rows, ready to be used: made once by a trainer, and sent to its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recd_plugins.data.feature_steps import feature_steps, num_ids_of
from recd_plugins.data.preprocess import Preprocess, build_preprocess
from recd_plugins.errors import Problem, RegistryError
from recd_plugins.interfaces import Converter, FeatureSchema
from recd_plugins.registry import RunConfig
from recd_plugins.values.model_input import Placement


@dataclass(frozen=True)
class Transforms:
    """The parts of ``RowPipeline``; pickled, they are those of the trainer.

    Attributes:
        schema: which columns of rows are what.
        converter: fitted.
        preprocess: the steps of every feature.
        placement: which features the model looks up how.
        num_embeddings: rows of the table of each feature, where that is known.
    """

    schema: FeatureSchema
    converter: Converter
    preprocess: Preprocess
    placement: Placement
    num_embeddings: Mapping[str, int]

    @classmethod
    def of(
        cls,
        registry: RunConfig,
        placement: Placement | None = None,
        num_embeddings: Mapping[str, int] | None = None,
    ) -> Transforms:
        """The transforms of a registry whose converter is fitted.

        Args:
            registry: its converter and preprocessing.
            placement: of the model's features; the demo model's without it.
            num_embeddings: rows of the table of each feature; ids of others are not checked.

        Raises:
            RecdError: a step of preprocessing cannot be fitted.
            RegistryError: a pattern matches no feature, or a step makes more ids than a table has
                rows.
        """
        # Imported here: the demo model's placement needs torchrec's modules, readers do not.
        from recd_plugins.data.placement import plan_placement

        schema = registry.dataset.schema()
        _check_tables(registry, schema, num_embeddings or {})
        return cls(
            schema,
            registry.converter,
            build_preprocess(registry, schema),
            plan_placement(registry, schema) if placement is None else placement,
            num_embeddings or {},
        )


def _check_tables(
    registry: RunConfig, schema: FeatureSchema, num_embeddings: Mapping[str, int]
) -> None:
    """Before a run, not at the first id that is too large, which may come late."""
    problems = []
    for feature, steps in feature_steps(registry, schema).items():
        made, rows = num_ids_of(steps[-1]) if steps else None, num_embeddings.get(feature)
        if made is None or rows is None or made <= rows:
            continue
        path, line, field = steps[-1].stands_at or (str(registry.path), 0, "preprocessing")
        message = (
            f"{steps[-1].name} makes {made:,} ids of {feature}, whose table has {rows:,} rows: "
            "give it as many (num_embeddings), or make fewer"
        )
        problems.append(Problem(path, line, field, message))
    if problems:
        raise RegistryError(problems)
