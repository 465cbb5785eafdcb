"""Numbers and ids into buckets between borders: TorchArrow's bucketize."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StrictFloat, StrictInt, field_validator

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn

Border = (
    Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    | Annotated[StrictFloat, Field(ge=-(2**63), lt=2**63)]
)


class Bucketize(ModulePreprocessing):
    """Replace a value by the number of its bucket, as TorchArrow's bucketize does."""

    name = "recd.bucketize"
    scope = "id"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        """The borders of the buckets."""

        borders: tuple[Border, ...] = Field(
            min_length=1,
            description="ascending; a value's bucket is the number of borders below it, so that a "
            "border itself is the last value of its bucket",
        )

        @field_validator("borders")
        @classmethod
        def _ascending(cls, borders: tuple[float, ...]) -> tuple[float, ...]:
            for before, border in pairwise(borders):
                if border < before:
                    raise ValueError(f"{border} comes after {before}; borders ascend")
            for border, count in Counter(borders).items():
                if count > 2:
                    raise ValueError(f"{border} stands {count} times, twice is the most")
            return borders

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.Bucketize(self.options.borders)
