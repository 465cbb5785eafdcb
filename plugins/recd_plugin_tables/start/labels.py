"""Several labels in ``recd init --label``, such as ``click,liked=rating>=4,rating``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recd_plugin_tables.kinds import feature_name
from recd_plugin_tables.start.survey import Seen

# A squared error of larger numbers would outweigh the losses of other labels.
_LARGE = 50

_ITEM = re.compile(r"(?:(?P<name>\w+)=(?!=))?(?P<column>.+?)(?:>=(?P<start>-?[\d.]+))?")


@dataclass(frozen=True)
class WantedLabel:
    """One label that the user named: ``COLUMN``, ``COLUMN>=VALUE`` or ``NAME=COLUMN>=VALUE``."""

    name: str
    column: str
    positive_from: float | None = None

    def options(self, guessed: Mapping[str, Any], seen: Seen) -> dict[str, Any]:
        """Return the entry of option ``label``.

        A column of numbers is a regression unless the user named its smallest positive value.

        Args:
            guessed: options of the column if it were the only label.
            seen: statistics of the column. Large numbers are predicted on a log scale.
        """
        found: dict[str, Any] = {"name": self.name}
        if self.column != self.name:
            found["column"] = self.column
        if self.positive_from is not None:
            return {**found, "positive_from": self.positive_from}
        if "positive_from" in guessed:
            is_large = seen.least is not None and seen.least >= 0 and (seen.largest or 0) > _LARGE
            log = {"loss": "log_mse"} if is_large else {}
            return {**found, "type": "regression", **log}
        return {**found, **guessed}


def wanted_labels(text: str | None, columns: Collection[str]) -> tuple[WantedLabel, ...]:
    """Parse option ``--label``. Return an empty tuple if it is a plain column name."""
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
