"""Values kept between bounds: TorchArrow's clamp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, model_validator

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn

Bound = (
    Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)


class Clamp(ModulePreprocessing):
    """Move values outside [lower, upper] to the nearer bound, as TorchArrow's clamp does."""

    name = "recd.clamp"
    scope = "id"
    takes: tuple[Literal["ids", "numbers"], ...] = ("ids", "numbers")

    class Options(PluginOptions):
        """The bounds; one of them at least."""

        lower: Bound | None = Field(default=None, description="smaller values become this")
        upper: Bound | None = Field(default=None, description="larger values become this")

        @model_validator(mode="after")
        def _in_order(self) -> Self:
            if self.lower is None and self.upper is None:
                raise ValueError("neither lower nor upper is given; give one, or both")
            if self.lower is not None and self.upper is not None and self.lower > self.upper:
                raise ValueError(f"lower {self.lower} is above upper {self.upper}")
            return self

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        bounds = [b for b in (self.options.lower, self.options.upper) if b is not None]
        if not all(b == int(b) and -(2**63) <= b < 2**63 for b in bounds):
            self.takes = ("numbers",)

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.Clamp(self.options.lower, self.options.upper)
