"""Tables that an earlier run kept, of all ranks: gone on with as wholes, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recd_plugin_scars.runtime.mapped_file import FileStore
from recd_plugin_scars.runtime.store_folder import kept_stores
from recd_plugins.api import DataError
from recd_plugins.api.distributed import tell_all


@dataclass(frozen=True)
class _OfRank:
    """What a rank has, by folder: the tables.

    Attributes:
        new: made by this run.
        kept: by an earlier one, which this one goes on with.
        there: kept ones, whether this run goes on with them or not.
    """

    new: Mapping[str, list[str]]
    kept: Mapping[str, list[str]]
    there: Mapping[str, list[str]]


def check_kept(stores: Iterable[FileStore], folders: Iterable[Path], group: Any) -> None:
    """Refuse a table that an earlier run kept in part, or on other ranks. A collective call.

    A part that is made anew would start from the seed beside others that are trained.

    Args:
        stores: of this rank, all of those of a module that are to be kept; a rank may have none.
        folders: of stores that are to be kept.
        group: of the ranks that have the module.

    Raises:
        DataError: on all ranks; nothing on the disks has changed then.
    """
    own = list(stores)
    there: dict[str, list[str]] = {}
    for parent in set(folders):
        there |= {str(path): tables for path, tables in kept_stores(parent).items()}
    ranks = tell_all(
        "opening kept tables",
        _OfRank(
            {str(store.path): store.tables for store in own if not store.is_kept},
            {str(store.path): store.tables for store in own if store.is_kept},
            there,
        ),
        group,
    )
    gone_on_with = {path for rank in ranks for path in rank.kept}
    for number, rank in enumerate(ranks):
        for path, tables in rank.new.items():
            for table in tables:
                if elsewhere := _kept_elsewhere(table, ranks, gone_on_with):
                    for store in own:
                        store.give_up()
                    raise DataError(
                        f"table {table}: rank {number} has no rows of an earlier run in {path}, "
                        f"and {elsewhere}, so that one part would start anew and another not: put "
                        "back what is missing, or remove the folders of the table on all ranks to "
                        "make it anew (a checkpoint fills it), or give another folder"
                    )


def _kept_elsewhere(table: str, ranks: Iterable[_OfRank], gone_on_with: set[str]) -> str:
    """Where an earlier run kept rows of a table, in words; empty where it did not."""
    for number, rank in enumerate(ranks):
        for path, tables in rank.kept.items():
            if table in tables:
                return f"rank {number} has some in {path}"
    for number, rank in enumerate(ranks):
        for path, tables in rank.there.items():
            if table in tables and path not in gone_on_with:
                return f"where rank {number} is some are in {path}, which this run does not use"
    return ""
