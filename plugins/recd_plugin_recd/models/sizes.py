"""Sizes of the models that ``recd init`` writes, at any scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recd_plugins.api import RecdError

ModelName = Literal["papercal", "rm1", "rm2", "rm3"]


@dataclass(frozen=True)
class ModelSizes:
    """Widths and rows of a model.

    Attributes:
        embedding_dim: of every table.
        sequence_rows: rows of the table of a sequence feature.
        other_rows: rows of the table of any other feature.
        bottom_mlp: hidden layers over dense features.
        top_mlp: hidden layers over the interaction.
    """

    embedding_dim: int
    sequence_rows: int
    other_rows: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]


def sizes_of(name: ModelName, scale: float) -> ModelSizes:
    """Widths in proportion to ``scale``, rows to its square.

    Raises:
        RecdError: ``scale`` is not in (0, 1], or the model has one size and it is not 1.
    """
    if not 0 < scale <= 1:
        raise RecdError(f"scale is {scale}; it is above 0 and at most 1")
    if name == "papercal":
        if scale != 1:
            raise RecdError("papercal has one size; scale is for rm1, rm2 and rm3")
        return ModelSizes(16, 100_000, 100_000, (64,), (128, 64))
    return ModelSizes(
        embedding_dim=_scaled(128, scale, multiple_of=4),
        sequence_rows=_scaled(4_000_000, scale**2, multiple_of=100),
        other_rows=_scaled(2_000_000, scale**2, multiple_of=100),
        bottom_mlp=tuple(_scaled(width, scale, multiple_of=4) for width in (512, 256)),
        top_mlp=tuple(_scaled(width, scale, multiple_of=4) for width in (512, 512, 256)),
    )


def _scaled(size: int, scale: float, *, multiple_of: int) -> int:
    """The multiple that is nearest, at least one."""
    return multiple_of * max(1, round(size * scale / multiple_of))
