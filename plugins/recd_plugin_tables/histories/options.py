"""Option ``histories`` of ``tables.table``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_serializer, model_validator

from recd_plugin_tables.kinds import ColumnOptions, Role, feature_name
from recd_plugin_tables.plan import REQUEST, SESSION
from recd_plugins.api import PluginOptions


class HistoryOptions(PluginOptions):
    """A list feature: ids of earlier rows of the session, or of earlier events of the user."""

    of: str | None = Field(
        default=None,
        description="Column whose ids in earlier rows of the session form the history. It needs "
        "role id.",
    )
    store: Path | None = Field(
        default=None,
        description="File that recd histories build wrote. The user's events before the row's time "
        "form the history. Use either `store` or `of`.",
    )
    user: str | None = Field(
        default=None,
        description="For store: column of the user. Default: the session column.",
    )
    item: str | None = Field(
        default=None, description="Item column of the store. Default: the first one."
    )
    last: PositiveInt = Field(default=50, description="Maximum number of ids; the latest are kept.")
    ties: Literal["apart", "stored"] = Field(
        default="apart",
        description="Handling of session rows with equal times. apart: neither row appears in the "
        "other's history. stored: the order of the table decides. Applies to `of` only.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.of is None) == (self.store is None):
            raise ValueError(
                "a history needs option 'of' (a column of this table) or 'store' (a file of recd "
                "histories build). Set one of them"
            )
        if self.store is None and (self.user or self.item):
            raise ValueError("options 'user' and 'item' need option 'store'. Remove them")
        if self.store is not None and self.ties == "stored":
            raise ValueError(
                "ties: stored does not apply to a store, which returns only events before the "
                "row's time. Remove option ties"
            )
        return self

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        if self.store is None:
            return {name: given[name] for name in ("of", "last", "ties")}
        return {name: given[name] for name in ("store", "user", "item", "last")}

    def user_column(self, columns: Mapping[str, ColumnOptions]) -> str | None:
        """Return the user column. Default: the session column, or else the request column."""
        return self.user or _with_role(columns, "session") or _with_role(columns, "request")


def key_of_user(column: str, use: ColumnOptions) -> str:
    """Return the import's column with the user ids of ``column``, a column of the table."""
    if "session" in use.roles:
        return SESSION
    return REQUEST if "request" in use.roles else use.name or feature_name(column)


def stored_problems(
    histories: Mapping[str, HistoryOptions], columns: Mapping[str, ColumnOptions]
) -> Iterator[str]:
    """Yield an error message for each history whose user or time column is missing or unusable."""
    time = _with_role(columns, "time")
    for name, history in histories.items():
        user = history.user_column(columns)
        if user is None:
            yield f"histories.{name}: no column identifies the user. Set option user"
        elif user not in columns or not {"id", "session", "request"} & {*columns[user].roles}:
            yield (
                f"histories.{name}.user: {user!r} is not a column with role 'id', 'session' or "
                "'request'. Give it one of these roles in columns"
            )
        if time is None:
            yield (
                f"histories.{name}: the events before a row need its time, but no column has the "
                "role 'time'. Set this role in columns"
            )


def _with_role(columns: Mapping[str, ColumnOptions], role: Role) -> str | None:
    return next((name for name, use in columns.items() if role in use.roles), None)
