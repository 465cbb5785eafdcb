"""What a plugin answers for each of the tables that its entry claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recd_plugins.errors import PluginError
from recd_plugins.interfaces import Plugin, Table
from recd_plugins.words import did_you_mean


def check_answers(
    plugin: Plugin,
    method: str,
    answers: object,
    tables: Sequence[Table],
    wanted: type,
    *,
    expected: str,
) -> None:
    """Refuse answers for other tables, and those of another type.

    Args:
        plugin: whose answers they are.
        method: it was asked by, as ``constraints``.
        answers: by table name; tables may be missing.
        tables: that it was asked about.
        wanted: type of an answer.
        expected: the type in words.

    Raises:
        PluginError: what is wrong, with the name that was meant where one is close.
    """
    if not isinstance(answers, Mapping):
        raise PluginError(
            f"{plugin.title}: {method} are {answers!r}; expected {expected} by table name"
        )
    names = [table.name for table in tables]
    for name, answer in answers.items():
        if name not in names:
            raise PluginError(
                f"{plugin.title}: {method} name {name}, which is none of its tables"
                + (did_you_mean(name, names) or f"; its tables: {', '.join(names)}")
            )
        if not isinstance(answer, wanted):
            raise PluginError(
                f"{plugin.title}: {method} of table {name} are {answer!r}; expected {expected}"
            )
