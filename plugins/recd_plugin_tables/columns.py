"""Options of columns: how each column of a table is used."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from recd_plugins.api import PluginOptions

Role = Literal[
    "id", "ids", "number", "numbers", "session", "time", "request", "key", "label", "unused"
]
#: Roles of features; a column has at most one of them.
FEATURES: tuple[Role, ...] = ("id", "ids", "number", "numbers")
#: Roles of columns that predictions carry.
KEYS: tuple[Role, ...] = ("session", "time", "request", "key")
#: What ``missing`` can be besides a value.
RULES = ("error", "drop", "empty")

Missing = Literal["error", "empty", "drop"] | float | int | str
Unit = Literal[
    "s", "ms", "us", "ns", "YYYYMMDD", "YYMMDDHH", "YYYYMMDDHH", "YYYYMMDDHHMM", "YYYYMMDDHHMMSS"
]


class ColumnOptions(PluginOptions):
    """What a column of the table is used for."""

    roles: tuple[Role, ...] = Field(
        alias="as",
        min_length=1,
        description="id, ids, number, numbers, session, time, request, key, label or unused; "
        "several in a list, as [session, id].",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^\w+$",
        description="Of the feature; null: that of the column, dots as underscores.",
    )
    missing: Missing | None = Field(
        default=None,
        description="What becomes of a null, and of a NaN among numbers: error, drop (the row), "
        "empty (no id; in lists the element is left out), or a value, but none of times. null: "
        "empty for ids, on_nan of the dataset for numbers, a session of its own for rows without, "
        "error for others.",
    )
    unit: Unit | None = Field(
        default=None,
        description="Unit of a numeric time: s (default), ms, us or ns since 1970, or date digits "
        "such as YYYYMMDD.",
    )
    by: Literal["hour", "weekday", "day"] | None = Field(
        default=None,
        description="What of a time is the feature: hour of the day, day of the week (Monday is 0) "
        "or days since 1970. A number has the fraction too.",
    )
    separator: str | None = Field(
        default=None, min_length=1, description="Between the ids of a text, as in Action|Comedy."
    )
    integers: bool = Field(
        default=False,
        description="The ids of a text are whole numbers, equal to those of columns of numbers; "
        "without it they are hashed as text.",
    )
    texts: bool = Field(
        default=False,
        description="Keep the text of each id beside the import, for tables of embeddings.",
    )
    width: int | None = Field(
        default=None, ge=1, description="Numbers in a list; null: as many as in the first one."
    )
    positive_from: float | None = Field(
        default=None, description="A label from here on is 1, one below is 0."
    )
    positive: tuple[str | float | bool, ...] | None = Field(
        default=None, min_length=1, description="Values of a label that are 1; others are 0."
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"as": given} if isinstance(given, str | list | tuple) else given

    @field_validator("separator", mode="before")
    @classmethod
    def _unescaped(cls, separator: Any) -> Any:
        return unescaped(separator)

    @field_validator("roles", mode="before")
    @classmethod
    def _listed(cls, roles: Any) -> Any:
        return [roles] if isinstance(roles, str) else roles

    @model_validator(mode="after")
    def _fit_together(self) -> ColumnOptions:
        if problems := ". ".join(self._problems()):
            raise ValueError(problems)
        return self

    def _problems(self) -> Iterator[str]:
        roles = set(self.roles)
        alone = [role for role in self.roles if role in ("label", "unused")]
        if alone and len(roles) > 1:
            yield f"a column that is {alone[0]} is nothing else"
        features = dict.fromkeys(role for role in self.roles if role in FEATURES)
        if len(features) > 1:
            yield f"as: {' and '.join(features)} are two features; choose one"
        for option, needed in _ONLY_FOR.items():
            if getattr(self, option) is not None and not roles & set(needed):
                yield f"{option} is for columns that are {' or '.join(needed)}"
        numeric = {"number", "numbers", "label", "time"} & roles
        if numeric and isinstance(self.missing, str) and self.missing not in ("error", "drop"):
            yield f"missing: {self.missing} is no value of {' and '.join(numeric)}"
        elif "time" in roles and isinstance(self.missing, int | float):
            yield f"missing: {self.missing} would be the time of such rows; say drop or error"

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "roles"}
        # 0 is a value, though it equals False.
        return {"as": [*self.roles]} | {
            name: each for name, each in given.items() if each is not None and each is not False
        }

    @property
    def feature(self) -> Role | None:
        """Role that makes the column a feature of the model."""
        return next((role for role in self.roles if role in FEATURES), None)


Columns = Annotated[dict[str, ColumnOptions], Field(min_length=1)]

_ONLY_FOR: dict[str, tuple[Role, ...]] = {
    "name": FEATURES,
    "unit": ("time", "id", "number"),
    "by": ("id", "number"),
    "separator": ("ids",),
    "width": ("numbers",),
    "positive": ("label",),
    "positive_from": ("label",),
}


def unescaped(separator: Any) -> Any:
    r"""Decode a separator that is written as ``\t`` or ``\x01``."""
    if isinstance(separator, str) and re.fullmatch(r"\\(t|x[0-9a-fA-F]{2})", separator):
        return codecs.decode(separator, "unicode_escape")
    return separator


def feature_name(column: str) -> str:
    """Return the column's name with underscores in place of other characters."""
    return re.sub(r"\W", "_", column)
