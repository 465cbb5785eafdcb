"""Preprocessing plugins, which transform the ids or numbers of a feature."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, field_validator, model_validator

from recd_plugins.api import PluginOptions, Preprocessing

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModulePreprocessing(Preprocessing):
    """Base of plugins that apply the module of the same class name in ``modules.py``."""

    @cached_property
    def module(self) -> nn.Module:
        """Return the module that ``transform`` applies, created from the options of the plugin."""
        from recd_plugin_recd.preprocessing import modules

        module: nn.Module = getattr(modules, type(self).__name__)(**dict(self.options))
        return module

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.module(values, offsets)
        return result


class BoxCox(ModulePreprocessing):
    """Compute (y^lambda1 - 1) / lambda1 with y = x + lambda2, like BatchBoxCox of Caffe2."""

    name = "recd.box_cox"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        lambda1: float = Field(
            allow_inf_nan=False, description="Exponent. If 0, the result is log(y)."
        )
        lambda2: float = Field(
            default=0.0,
            allow_inf_nan=False,
            description="Constant that is added to each number, to make it positive.",
        )

    options: Options


Id = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Border = Id | Annotated[StrictFloat, Field(ge=-(2**63), lt=2**63)]


class Bucketize(ModulePreprocessing):
    """Replace each value by the index of its bucket, like bucketize of TorchArrow."""

    name = "recd.bucketize"
    scope = "id"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        borders: tuple[Border, ...] = Field(
            min_length=1,
            description="Ascending borders of the buckets. The bucket of a value is the number of "
            "borders below the value, so a border itself is in the lower bucket.",
        )

        @field_validator("borders")
        @classmethod
        def _ascending(cls, borders: tuple[float, ...]) -> tuple[float, ...]:
            if list(borders) != sorted(borders):
                raise ValueError(
                    f"option 'borders' is {list(borders)}, which is not ascending. Sort the "
                    "borders."
                )
            return borders

    options: Options


Bound = Id | Annotated[StrictFloat, Field(allow_inf_nan=False)]


class Clamp(ModulePreprocessing):
    """Clamp values to the range [lower, upper], like clamp of TorchArrow."""

    name = "recd.clamp"
    scope = "id"
    takes: tuple[Literal["ids", "numbers"], ...] = ("ids", "numbers")

    class Options(PluginOptions):
        lower: Bound | None = Field(default=None, description="Lower bound.")
        upper: Bound | None = Field(default=None, description="Upper bound.")

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.lower is not None and self.upper is not None and self.lower > self.upper:
                raise ValueError(
                    f"option 'lower' ({self.lower}) is larger than option 'upper' ({self.upper}). "
                    "Change one of the two options."
                )
            return self

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        bounds = [b for b in (self.options.lower, self.options.upper) if b is not None]
        if not all(b == int(b) and -(2**63) <= b < 2**63 for b in bounds):
            self.takes = ("numbers",)


class FirstX(ModulePreprocessing):
    """Keep the first x ids of each row, like firstx of TorchArrow."""

    name = "recd.first_x"

    class Options(PluginOptions):
        x: int = Field(ge=0, lt=2**31, description="Maximum number of ids per row.")

    options: Options

    def kept_lengths(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(max=self.options.x)


class Logit(ModulePreprocessing):
    """Compute log(x / (1 - x)) of numbers from 0 to 1, like Logit of Caffe2."""

    name = "recd.logit"
    scope = "id"
    takes = ("numbers",)

    class Options(PluginOptions):
        eps: float = Field(
            default=1e-6, gt=0, lt=0.5, description="Numbers are first clamped to [eps, 1 - eps]."
        )

    options: Options


class MapId(ModulePreprocessing):
    """Replace ids according to a mapping. Ids that are not in the mapping get a default."""

    name = "recd.map_id"
    scope = "id"

    class Options(PluginOptions):
        mapping: tuple[tuple[Id, Id], ...] = Field(
            min_length=1, description="Pairs of an id and its new id."
        )
        default: Id | None = Field(
            default=None, description="New id of ids without a mapping; null keeps their value."
        )

        @field_validator("mapping")
        @classmethod
        def _each_once(cls, mapping: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            if len(dict(mapping)) < len(mapping):
                raise ValueError(
                    "option 'mapping' contains an id more than once. Map each id once."
                )
            return mapping

    options: Options


class NGram(ModulePreprocessing):
    """Replace the ids of a row by 63-bit hashes of each n consecutive ids. Order matters."""

    name = "recd.ngram"

    class Options(PluginOptions):
        n: int = Field(
            default=2,
            ge=2,
            le=16,
            description="Number of consecutive ids that are hashed together.",
        )
        salt: int = Field(
            default=0,
            ge=-(2**63),
            lt=2**63,
            description="Salt of the hash. A different salt gives different collisions.",
        )

    options: Options


class Onehot(ModulePreprocessing):
    """Replace each value v by ``classes`` values: 1 at index v, and 0 elsewhere."""

    name = "recd.onehot"
    takes = ("ids", "numbers")

    class Options(PluginOptions):
        classes: int = Field(
            ge=1, le=2**20, description="Number of classes. Values range from 0 to classes - 1."
        )

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self.width = self.options.classes


class SigridHash(ModulePreprocessing):
    """Hash ids to the range [0, buckets), like sigrid_hash of TorchArrow."""

    name = "recd.sigrid_hash"
    scope = "id"

    class Options(PluginOptions):
        buckets: int = Field(
            gt=0,
            le=2**48,
            description="Number of buckets, usually the number of rows of the table. Hashed ids "
            "are 0 to buckets - 1.",
        )
        salt: int = Field(
            default=0,
            ge=-(2**63),
            lt=2**63,
            description="Salt of the hash. A different salt gives different collisions.",
        )

    options: Options


_PLUGINS = (BoxCox, Bucketize, Clamp, FirstX, Logit, MapId, NGram, Onehot, SigridHash)
__all__ = [plugin.__name__ for plugin in _PLUGINS]
