"""Sorts a partition with Arrow and numba, on as many cores as the process has.

Sessions and times are read first, to find cuts that divide the rows into ranges of equal size.
Then all columns are read once, and each row goes to the spill file of its range. At last ranges are
loaded one by one, sorted and written. A partition that fits into memory is not spilled.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa

from recd_plugin_recd.cluster.memory import Budget, Plan, of_libraries
from recd_plugin_recd.cluster.options import ClusterOptions, Progress
from recd_plugin_recd.cluster.ranges import Range, deal, together
from recd_plugin_recd.cluster.reading import Input
from recd_plugin_recd.cluster.sample import Sample
from recd_plugin_recd.cluster.write import RangeWriter, part_name
from recd_plugin_recd.source import ParquetSource, Partition, SessionTable
from recd_plugins.api import DataError
from recd_plugins.api.files import read_note, write_note
from recd_plugins.api.reading import prefetch
from recd_plugins.api.tables import Layout

#: More spill files at once would make many small writes of each batch; ranges that are too large
#: for that are dealt again.
_MOST_RANGES = 64
#: A part of so many bytes is worth a file and a thread of its own.
_SMALLEST_PART = 64 << 20
#: Ranges are aimed at this share of what fits: their sizes follow a sample.
_FILL = 0.8
_READ_AHEAD = 2
_RANGES = "ranges.json"


def run_budget(source: SessionTable, options: ClusterOptions) -> Budget:
    """The memory of a run that sorts all partitions of ``source``.

    Raises:
        DataError: it is too small for one of them, by its first rows.
    """
    base = of_libraries(isinstance(source, ParquetSource))
    budget = Budget(options.memory, base, options.row_group_rows, len(source.schema))
    inputs = [Input(source, partition, options) for partition in source.partitions]
    budget.check([each.row_size for each in inputs if each.peek()])
    return budget


class EmbeddedEngine:
    """Sorts one partition of ``source`` into Parquet files.

    Args:
        scratch: a folder for what a killed run leaves: spilled ranges once all are spilled, and
            finished files. A run that is started again goes on from there.
        layouts: of the features; None where the first rows are to decide.
        budget: of the run, from ``run_budget``.
    """

    def __init__(
        self,
        source: SessionTable,
        partition: Partition,
        options: ClusterOptions,
        scratch: Path,
        layouts: dict[str, Layout] | None,
        budget: Budget,
    ) -> None:
        self._budget = budget
        self._keys, self._options, self._scratch = source.keys, options, scratch
        self._input = Input(source, partition, options)
        self._parts = scratch / "parts"
        self.layouts = layouts

    def run(self, progress: Progress) -> Path:
        """Sort into files ``part-*.parquet`` of the folder that is returned.

        Raises:
            DataError: the input is wrong, memory too small or the disk full.
        """
        filled = self._input.peek()
        ranges = self._spilled()
        if ranges is None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._parts.mkdir(parents=True)
            ranges = self._deal(progress) if filled else []
        else:
            progress(sum(each.num_rows for each in ranges), 0)
        writer = RangeWriter(
            self._input.schema, self._keys, self._options, self._parts, self.layouts
        )
        if ranges:
            writer.write(ranges, self._plan().workers, progress)
        self.layouts = writer.layouts
        return self._parts

    def _plan(self) -> Plan:
        return self._budget.plan(self._input.row_size)

    def _deal(self, progress: Progress) -> list[Range]:
        """Read all rows into ranges that fit into memory, sorted among each other."""
        sample = Sample()
        for sessions, times in self._input.sessions_and_times():
            sample.add(sessions, times)
        plan = self._plan()
        size = int(sample.num_rows * self._input.row_size.bytes)
        if size <= plan.whole_bytes:
            cuts = sample.cuts(min(plan.workers, 1 + size // _SMALLEST_PART))
            with closing(self._counted(progress)) as rows:
                whole = deal(rows, self._input.schema, self._keys, cuts, most=plan.whole_bytes)
            if whole is not None:
                return self._checked(whole, sample)
            # Rows became larger than the first ones.
            return self._deal(lambda _read, _written: None)
        # As many for each worker: else one of them sorts the last range alone.
        rounds = 1 + int(size / (_FILL * plan.range_bytes)) // plan.workers
        cuts = sample.cuts(min(_MOST_RANGES, rounds * plan.workers))
        paths = self._spill_paths("range", len(cuts) + 1)
        with closing(self._counted(progress)) as rows:
            spilled = deal(rows, self._input.schema, self._keys, cuts, paths=paths)
        assert spilled is not None, "without a limit nothing exceeds it"
        most = self._plan().range_bytes
        ranges = [part for each in self._checked(spilled, sample) for part in self._fit(each, most)]
        self._remember(ranges)
        return ranges

    def _counted(self, progress: Progress) -> Generator[pa.RecordBatch, None, None]:
        def rows() -> Iterator[pa.RecordBatch]:
            return self._input.rows(lambda count: progress(count, 0))

        yield from prefetch(rows, _READ_AHEAD)

    def _checked(self, ranges: list[Range], sample: Sample) -> list[Range]:
        """The ranges that are not empty."""
        num_rows = sum(each.num_rows for each in ranges)
        if num_rows != sample.num_rows:
            raise DataError(
                f"{self._options.source} was changed while it was read: it had {sample.num_rows} "
                f"rows to sort, then {num_rows}; start anew"
            )
        for each in ranges:
            if not each.num_rows:
                each.drop()
        return [each for each in ranges if each.num_rows]

    def _fit(self, whole: Range, most: int) -> list[Range]:
        """A spilled range as it is if it has at most ``most`` bytes, else in parts that do."""
        if whole.num_bytes <= most:
            return [whole]
        if whole.num_rows == 1:
            raise DataError(
                f"{self._options.source}: a row of {whole.num_bytes / 1e6:,.0f} MB does not fit "
                f"into --memory {self._options.memory / 1e6:,.0f}MB; give more"
            )
        sample = Sample()
        for batch in whole.read():
            sample.add(batch.column(self._keys.session), batch.column(self._keys.timestamp))
        cuts = sample.cuts(min(_MOST_RANGES, 2 + int(whole.num_bytes / (_FILL * most))))
        assert whole.path is not None, "what is in memory fits into it"
        paths = self._spill_paths(whole.path.stem, len(cuts) + 1)
        parts = deal(
            together(whole.read()),
            self._input.schema,
            self._keys,
            cuts,
            paths=paths,
            goes_on=whole.goes_on,
        )
        whole.drop()
        return [
            part for each in self._checked(parts or [], sample) for part in self._fit(each, most)
        ]

    def _spill_paths(self, name: str, count: int) -> list[Path]:
        return [self._scratch / f"{name}-{number:02d}.arrow" for number in range(count)]

    def _remember(self, ranges: list[Range]) -> None:
        """Note the ranges: from now on they are not made again."""
        paths = [each.path for each in ranges if each.path is not None]
        entries = [
            [path.name, path.stat().st_size, each.goes_on, each.num_rows, each.num_bytes]
            for path, each in zip(paths, ranges, strict=True)
        ]
        write_note(self._scratch / _RANGES, entries)

    def _spilled(self) -> list[Range] | None:
        """The ranges that an earlier run spilled, None if it did not come so far."""
        entries = read_note(self._scratch / _RANGES)
        if entries is None:
            return None
        for unfinished in self._parts.glob(".*"):
            unfinished.unlink()
        ranges: list[Range] = []
        file = -1
        for name, size, goes_on, num_rows, num_bytes in entries:
            path = self._scratch / name
            file += not (goes_on and ranges)
            ranges.append(Range(path, goes_on, num_rows, num_bytes))
            done = (self._parts / part_name(file)).exists()
            if not done and not (path.exists() and path.stat().st_size == size):
                return None
        return ranges
