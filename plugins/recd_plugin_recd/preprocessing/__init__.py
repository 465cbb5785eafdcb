"""Preprocessing plugins: transforms of ids and numbers, TorchArrow's where it defines them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, field_validator, model_validator

from recd_plugins.api import PluginOptions, Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModulePreprocessing(Preprocessing):
    """Preprocessing by the scriptable module of the same name, which takes the options."""

    @cached_property
    def module(self) -> nn.Module:
        """The module that ``transform`` runs."""
        from recd_plugin_recd.preprocessing import modules

        module: nn.Module = getattr(modules, type(self).__name__)(**dict(self.options))
        return module

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.module(values, offsets)
        return result


class BoxCox(ModulePreprocessing):
    """Make (y^lambda1 - 1) / lambda1 of y = x + lambda2, as Caffe2's BatchBoxCox does."""

    name = "recd.box_cox"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        lambda1: float = Field(
            allow_inf_nan=False, description="the exponent; with 0 the result is log(y)"
        )
        lambda2: float = Field(
            default=0.0, allow_inf_nan=False, description="added to numbers, so that y > 0"
        )

    options: Options


Id = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Border = Id | Annotated[StrictFloat, Field(ge=-(2**63), lt=2**63)]


class Bucketize(ModulePreprocessing):
    """Replace a value by the number of its bucket, as TorchArrow's bucketize does."""

    name = "recd.bucketize"
    scope = "id"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        borders: tuple[Border, ...] = Field(
            min_length=1,
            description="ascending; a value's bucket is the number of borders below it, so that a "
            "border itself is the last value of its bucket",
        )

        @field_validator("borders")
        @classmethod
        def _ascending(cls, borders: tuple[float, ...]) -> tuple[float, ...]:
            if list(borders) != sorted(borders):
                raise ValueError("borders ascend")
            return borders

    options: Options


Bound = Id | Annotated[StrictFloat, Field(allow_inf_nan=False)]


class Clamp(ModulePreprocessing):
    """Move values outside [lower, upper] to the nearer bound, as TorchArrow's clamp does."""

    name = "recd.clamp"
    scope = "id"
    takes: tuple[Literal["ids", "numbers"], ...] = ("ids", "numbers")

    class Options(PluginOptions):
        lower: Bound | None = Field(default=None, description="smaller values become this")
        upper: Bound | None = Field(default=None, description="larger values become this")

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.lower is not None and self.upper is not None and self.lower > self.upper:
                raise ValueError(f"lower {self.lower} is above upper {self.upper}")
            return self

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        bounds = [b for b in (self.options.lower, self.options.upper) if b is not None]
        if not all(b == int(b) and -(2**63) <= b < 2**63 for b in bounds):
            self.takes = ("numbers",)


class FirstX(ModulePreprocessing):
    """Keep the first x ids of each row, as TorchArrow's firstx does."""

    name = "recd.first_x"

    class Options(PluginOptions):
        x: int = Field(ge=0, lt=2**31, description="ids that a row keeps, from its start")

    options: Options

    def kept_lengths(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(max=self.options.x)


class Logit(ModulePreprocessing):
    """Make log(x / (1 - x)) of numbers from 0 to 1, as Caffe2's Logit does."""

    name = "recd.logit"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        eps: float = Field(
            default=1e-6, gt=0, lt=0.5, description="numbers are moved into [eps, 1 - eps] first"
        )

    options: Options


class MapId(ModulePreprocessing):
    """Map chosen ids to fixed ones; others become a default, or stay."""

    name = "recd.map_id"
    scope = "id"

    class Options(PluginOptions):
        mapping: tuple[tuple[Id, Id], ...] = Field(
            min_length=1, description="pairs of an id and what it becomes"
        )
        default: Id | None = Field(
            default=None, description="what other ids become; null leaves them as they are"
        )

        @field_validator("mapping")
        @classmethod
        def _each_once(cls, mapping: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            if len(dict(mapping)) < len(mapping):
                raise ValueError("an id is mapped twice")
            return mapping

    options: Options


class NGram(ModulePreprocessing):
    """Make one id of each n neighbouring ids of a row: a 63-bit hash of them in order."""

    name = "recd.ngram"

    class Options(PluginOptions):
        n: int = Field(default=2, ge=2, le=16, description="neighbours that become one id")
        salt: int = Field(
            default=0, ge=-(2**63), lt=2**63, description="another salt gives other collisions"
        )

    options: Options


class Onehot(ModulePreprocessing):
    """Make of each value v as many zeros as there are classes, with a 1 at place v."""

    name = "recd.onehot"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        classes: int = Field(ge=1, le=2**20, description="values from 0 to classes - 1")

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self.width = self.options.classes


class SigridHash(ModulePreprocessing):
    """Hash ids of any size into [0, buckets), as TorchArrow's sigrid_hash does."""

    name = "recd.sigrid_hash"
    scope = "id"

    class Options(PluginOptions):
        buckets: int = Field(
            gt=0, le=2**48, description="ids become 0 to buckets - 1; the rows of the table"
        )
        salt: int = Field(
            default=0, ge=-(2**63), lt=2**63, description="another salt gives other collisions"
        )

    options: Options


_PLUGINS = (BoxCox, Bucketize, Clamp, FirstX, Logit, MapId, NGram, Onehot, SigridHash)
__all__ = [plugin.__name__ for plugin in _PLUGINS]
