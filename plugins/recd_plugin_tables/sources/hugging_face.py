"""Datasets of Hugging Face: a folder of ``save_to_disk``, or a name behind hf://."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from recd_plugin_tables.sources.batch_source import BatchSource
from recd_plugin_tables.sources.columnar import STREAM_END
from recd_plugin_tables.sources.source import BATCH_ROWS
from recd_plugins.api import DataError, optional_library

#: Names a dataset of the hub: hf://datasets/user/name or hf://user/name.
SCHEME = "hf://"


class HuggingFaceSource(BatchSource):
    """A dataset, or a split of one that has several.

    Args:
        location: the folder, or the name of one that ``load_dataset`` downloads.
        split: which split; None where there is one.

    Raises:
        DataError: it is none, or has several splits and none was chosen.
        SetupError: the library datasets is not installed.
    """

    def __init__(self, location: str, split: str | None) -> None:
        super().__init__(location, (ValueError, KeyError))
        datasets = optional_library("datasets", "huggingface", location)
        try:
            if location.startswith(SCHEME):
                name = location.removeprefix(SCHEME).removeprefix("datasets/").strip("/")
                if not name:
                    raise DataError(f"{location}: names no dataset; write {SCHEME}user/name")
                found = datasets.load_dataset(name)
            else:
                found = datasets.load_from_disk(location)
        except self._errors as error:
            raise self._damaged(error) from error
        if isinstance(found, datasets.DatasetDict):
            found = found[_chosen(location, list(found), split)]
        elif split is not None:
            raise DataError(f"{location}: has no splits; leave source.table out")
        self._dataset = found

    @property
    def num_rows(self) -> int | None:
        return int(self._dataset.num_rows)

    def identity(self) -> dict[str, Any]:
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        sizes = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {"format": "huggingface", "rows": self.num_rows, "files": sizes}

    def read_schema(self) -> pa.Schema:
        return self._dataset.features.arrow_schema

    def read_batches(self, columns: list[str]) -> Iterable[pa.RecordBatch]:
        for file in self._dataset.cache_files:
            with pa.memory_map(file["filename"]) as stored:
                end = stored.read_at(len(STREAM_END), stored.size() - len(STREAM_END))
            if end != STREAM_END:
                raise DataError(
                    f"{self.location}: {file['filename']} was cut, so rows would be missing; save "
                    "or download the dataset anew"
                )
        chosen = self._dataset.select_columns(columns).with_format("arrow")
        for table in chosen.iter(batch_size=BATCH_ROWS):
            yield from table.combine_chunks().to_batches()


def _chosen(location: str, splits: list[str], split: str | None) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split not in splits:
        asked = f"no split {split}" if split else "several splits"
        raise DataError(
            f"{location}: {asked}; set source: {{table: SPLIT}} to one of {', '.join(splits)}"
        )
    return split
