"""What becomes of rows, ready to be used: made once by a trainer, and sent to its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recd_plugins.data.model_input import Placement
from recd_plugins.data.preprocess import Preprocess, build_preprocess
from recd_plugins.interfaces import Converter, FeatureSchema

if TYPE_CHECKING:
    from recd_plugins.registry import Registry


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
    def of(cls, registry: Registry) -> Transforms:
        """Those of a registry whose converter is fitted.

        Raises:
            RegistryError: a pattern matches no feature.
        """
        # Imported here: the demo model's placement needs torchrec's modules, readers do not.
        from recd_plugins.data.placement import plan_placement

        schema, prepared = registry.dataset.schema(), registry.prepared
        return cls(
            schema,
            registry.converter,
            build_preprocess(registry, schema),
            prepared.placement if prepared else plan_placement(registry, schema),
            prepared.num_embeddings if prepared else {},
        )
