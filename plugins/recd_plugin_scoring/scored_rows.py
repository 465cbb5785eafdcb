"""Rows of a dataset that are scored, and their keys; what is wrong with them is its plugin's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from recd_plugin_scoring.score_format import SCORE
from recd_plugins.api import Dataset, PluginError, Rows
from recd_plugins.api.registry import plugin_call, plugin_items


def keys_of(dataset: Dataset) -> dict[str, str]:
    """What ``Dataset.keys`` says.

    Raises:
        PluginError: two keys have one name, or one has that of the scores; or it failed.
    """
    with plugin_call(dataset, "keys"):
        keys = dict(dataset.keys())
    names = list(keys.values())
    for name in names:
        if name == SCORE or names.count(name) > 1:
            raise PluginError(
                f"{dataset.title}: keys() names a column {name!r}, and files of scores have "
                "another one of that name; give each a name of its own"
            )
    return keys


def scanned(dataset: Dataset, keys: Collection[str]) -> Iterator[Rows]:
    """Every row of the dataset, in stored order.

    Args:
        dataset: of ``to_score``.
        keys: columns that ``keys_of`` says.

    Raises:
        DataError: the table is wrong.
        PluginError: a column of ``keys`` is missing; ``scan`` failed, or yields no Rows.
    """
    with plugin_call(dataset, "scan"):
        rows = dataset.scan("train")
    for each in plugin_items(dataset, "scan", rows):
        if not isinstance(each, Rows):
            raise PluginError(f"{dataset.title}: scan yields a {type(each).__name__}, no Rows")
        there = each.data.schema.names
        if missing := [name for name in keys if name not in there]:
            raise PluginError(
                f"{dataset.title}: scan yields no column {missing[0]}, which keys() names; it "
                f"yields {', '.join(there)}"
            )
        yield each
