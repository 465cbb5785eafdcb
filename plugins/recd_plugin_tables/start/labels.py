"""Several labels in ``recd init --label``, such as ``click,liked=rating>=4,rating``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recd_plugin_tables.kinds import feature_name

_ITEM = re.compile(r"(?:(?P<name>\w+)=(?!=))?(?P<column>.+?)(?:>=(?P<start>-?[\d.]+))?")


@dataclass(frozen=True)
class WantedLabel:
    """One label that the user named: ``COLUMN``, ``COLUMN>=VALUE`` or ``NAME=COLUMN>=VALUE``."""

    name: str
    column: str
    positive_from: float | None = None

    def options(self, guessed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entry of option ``label``.

        ``guessed`` are the options of the column as the only label. A column of numbers is a
        regression unless the user named its smallest positive value.
        """
        found: dict[str, Any] = {"name": self.name}
        if self.column != self.name:
            found["column"] = self.column
        if self.positive_from is not None:
            return {**found, "positive_from": self.positive_from}
        if "positive_from" in guessed:
            return {**found, "type": "regression"}
        return {**found, **guessed}


def wanted_labels(text: str | None, columns: Collection[str]) -> tuple[WantedLabel, ...]:
    """Parse ``--label`` of a table with these columns; () unless it names several labels."""
    if text is None or text in columns:
        return ()
    found = []
    for item in text.split(","):
        item = item.strip()
        parts = re.fullmatch(_ITEM, item)
        if item in columns or parts is None:
            found.append(WantedLabel(feature_name(item), item))
            continue
        column, start = parts["column"], parts["start"]
        name = parts["name"] or feature_name(column)
        found.append(WantedLabel(name, column, None if start is None else float(start)))
    single = len(found) == 1 and found[0].positive_from is None
    return () if single and found[0].column == text else tuple(found)
