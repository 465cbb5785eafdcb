"""Opens the tables of ``recd analyze`` and ``recd cluster`` in all formats of ``recd init``."""

from __future__ import annotations

import io
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import click

from recd_plugin_recd.sessions import DatasetSource, SessionTable, open_source
from recd_plugins.api import DataError, RecdError, list_dict, load_registry, parquet, write_registry


def open_any(
    path: Path,
    *,
    session: str | None = None,
    timestamp: str | None = None,
    label: str | None = None,
    plugins_dir: Path | None = None,
    needs_lists: bool = False,
) -> SessionTable:
    """Open a table in any format of ``recd init``, or the training data of a registry file.

    Other formats than Parquet are imported, with the column roles that ``recd init`` guesses.

    Args:
        path: a table, or a registry file.
        session, timestamp: session and time columns.
        label: label column of a table in another format than Parquet; None guesses it.
        plugins_dir: folder of plugin files that a registry file needs.
        needs_lists: whether to import Parquet tables that have no list of ids, too.

    Raises:
        DataError: the table cannot be read, or has no session column.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        url = str(path).replace(":/", "://", 1)
        raise DataError(
            f"{url}: this command reads URLs only through a registry file. Run recd init {url} "
            "my.yaml, and use my.yaml instead of the URL."
        )
    if path.exists() and path.suffix not in (".yaml", ".yml"):
        usable = _is_parquet(path)
        if usable and needs_lists:
            usable = bool(list_dict.id_features(parquet.ParquetTable(path).schema))
        if not usable:
            return _imported(path, session, timestamp, label, plugins_dir)
    return open_source(path, session=session, timestamp=timestamp, plugins_dir=plugins_dir)


def _is_parquet(path: Path) -> bool:
    if path.is_dir():
        # Files of Delta and Iceberg tables may contain deleted rows.
        other = [*path.glob("_delta_log"), *path.glob("metadata/*.metadata.json")]
        return not other and any(path.rglob("*.parquet"))
    with path.open("rb") as file:
        return path.suffix == ".parquet" or file.read(4) == b"PAR1"


def _imported(
    path: Path,
    session: str | None,
    timestamp: str | None,
    label: str | None,
    plugins_dir: Path | None,
) -> DatasetSource:
    """Import all rows of a table, sorted by session."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "registry.yaml"
        try:
            with redirect_stdout(io.StringIO()):  # the guesses
                write_registry(
                    click.get_current_context(),
                    str(path),
                    file,
                    force=True,
                    test=0.0,
                    session=session,
                    time=timestamp,
                    label=label,
                )
        except RecdError as error:
            if "--label" in str(error):
                text = re.sub(",? or --implicit[^.]*", "", str(error))
                raise DataError(text) from error
            if "recd init:" not in str(error):
                raise
            raise DataError(
                f"{error} To use the recd init option, run recd init {path} my.yaml with it, "
                f"and then this command with my.yaml instead of {path}."
            ) from error
        registry = load_registry(file, plugins_dir=plugins_dir)
    if registry.dataset.session_keys() is None:
        raise DataError(
            f"{path}: no column identifies users or sessions. Set one with --session COLUMN."
        )
    print(
        f"{path}: imported with the column roles that recd init guesses, and sorted by session. To "
        f"correct a role, write a registry file with recd init {path} my.yaml, and pass my.yaml "
        "instead of the table.",
        file=sys.stderr,
    )
    return DatasetSource(path, registry.dataset, registry.training.batch_size)
