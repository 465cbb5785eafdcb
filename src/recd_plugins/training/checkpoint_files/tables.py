"""Which entry of a checkpoint is an embedding table."""

from __future__ import annotations

from pathlib import Path

from recd_plugins.errors import RecdError
from recd_plugins.training.checkpoint_files.metadata import read_metadata
from recd_plugins.words import did_you_mean, shortened

# TorchRec's collections keep their tables in these.
_HOLDERS = ("embedding_bags", "embeddings")


def table_entry(checkpoint: Path, table: str) -> str:
    """The name of a table's weights in the model.

    Raises:
        RecdError: there is no such table; names those that there are.
    """
    tables = {}
    for name, entry in read_metadata(checkpoint).entries.items():
        parts = name.split(".")
        is_weight = entry is not None and parts[0] == "model" and parts[-1] == "weight"
        if is_weight and len(parts) > 3 and parts[-3] in _HOLDERS:
            tables[parts[-2]] = name.removeprefix("model.")
    if table not in tables:
        raise RecdError(
            f"{checkpoint}: no table {table}"
            + (did_you_mean(table, tables) or f"; the tables: {shortened(list(tables))}")
        )
    return tables[table]
