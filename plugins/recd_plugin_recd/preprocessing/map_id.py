"""Chosen ids become others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, StrictInt, field_validator

from recd_plugin_recd.preprocessing.module_preprocessing import ModulePreprocessing
from recd_plugins.api import PluginOptions

if TYPE_CHECKING:
    from torch import nn

Id = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]


class MapId(ModulePreprocessing):
    """Map chosen ids to fixed ones; others become a default, or stay."""

    name = "recd.map_id"
    scope = "id"

    class Options(PluginOptions):
        """Which ids become which."""

        mapping: tuple[tuple[Id, Id], ...] = Field(
            min_length=1, description="pairs of an id and what it becomes"
        )
        default: Id | None = Field(
            default=None, description="what other ids become; null leaves them as they are"
        )

        @field_validator("mapping")
        @classmethod
        def _each_once(cls, mapping: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            seen: set[int] = set()
            for source, _ in mapping:
                if source in seen:
                    raise ValueError(f"{source} is mapped twice; keep one of the pairs")
                seen.add(source)
            return mapping

    options: Options

    def build(self) -> nn.Module:
        from recd_plugin_recd.preprocessing import modules

        return modules.MapId(dict(self.options.mapping), self.options.default)
