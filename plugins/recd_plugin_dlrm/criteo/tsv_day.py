"""A day of Criteo's TSV, plain or compressed."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from recd_plugin_dlrm.criteo.day import UNIT_ROWS, Day, Stretch, even_starts
from recd_plugin_dlrm.criteo.rows import RawRows
from recd_plugin_dlrm.criteo.tsv import BadLines, TsvStream, compression_of
from recd_plugin_dlrm.criteo.tsv_index import TsvIndex, stamp
from recd_plugins.api import DataError, Origin


class TsvDay(Day):
    """Rows of a file whose index is known.

    Of a plain file reading begins at any unit. A compressed one is read through to where reading
    begins, decompressed but not parsed: forward that is done once.
    """

    def __init__(self, name: str, path: Path, index: TsvIndex) -> None:
        self.name = name
        self.can_jump = compression_of(path) is None
        self.num_rows = index.num_rows
        self.starts = even_starts(index.num_rows)
        self._path = path
        self._index = index

    def identity(self) -> list[Any]:
        return [self.name, self.num_rows, self._index.checksum]

    def read(
        self, stretches: Iterable[Stretch]
    ) -> Generator[tuple[RawRows, tuple[Origin, ...]], None, None]:
        index = self._index
        if stamp(self._path) != (index.size, index.mtime_ns):
            raise self._replaced()
        # Those that the index passed over are passed over again.
        bad_lines = BadLines(limit=index.num_bad_lines)
        with TsvStream(self._path, bad_lines) as stream:
            row = 0
            for stretch in stretches:
                unit = stretch.first_row // UNIT_ROWS
                if not unit * UNIT_ROWS <= row <= stretch.first_row:
                    stream.seek(index.offsets[unit])
                    bad_lines.count, row = 0, unit * UNIT_ROWS
                if row < stretch.first_row:
                    self._rows(stream, stretch.first_row - row)
                rows = self._rows(stream, stretch.num_rows)
                row = stretch.first_row + stretch.num_rows
                origin = Origin(str(self._path), stretch.first_row, stretch.num_rows)
                yield rows, (origin,)

    def _rows(self, stream: TsvStream, num_rows: int) -> RawRows:
        rows = stream.read(num_rows)
        if len(rows) != num_rows:
            raise self._replaced()
        return rows

    def _replaced(self) -> DataError:
        return DataError(f"{self._path} was replaced while it was in use; start anew")
