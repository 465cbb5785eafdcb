"""Plugin ``my.wrap``: the same id transform as in ``reader.py``, ``id % num_embeddings``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from recd_plugins.api import PluginOptions, Preprocessing, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class Wrap(Preprocessing):
    """Replaces each id with ``id % num_embeddings``."""

    name = "my.wrap"

    class Options(PluginOptions):
        num_embeddings: int = Field(gt=0, description="Number of rows of the embedding table.")

    options: Options

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return values.remainder(self.options.num_embeddings), offsets


@hookimpl
def register_preprocessing() -> Sequence[type[Preprocessing]]:
    return [Wrap]
