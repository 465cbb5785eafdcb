"""The contract of ingestions."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from torch import Tensor

from recd_plugins.config import Entry, RegistrySpec, RunConfig
from recd_plugins.data.loader import DataLoader, build_dataloader
from recd_plugins.data.reader import Piece, PlannedReader, ReadPlan, Unit
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.data.workers import WorkerContext
from recd_plugins.interfaces import (
    Converter,
    Dataset,
    FeatureSchema,
    Ingestion,
    Origin,
    PluginOptions,
    Preprocessing,
    Reader,
    Rows,
    Split,
)
from recd_plugins.interfaces.batch import Batch, ModelInput
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts.plugin import PluginContract, assert_equal

_FILE = "numbers.log"
_ROWS, _UNIT, _BATCH = 112, 20, 8
_SPLITS: tuple[Split, ...] = ("train", "test")

Batches = list[tuple[ModelInput, dict[str, Any]]]


class Numbers(Dataset):
    """A dataset whose item is the row number. The three rows of a session have equal visits."""

    name = "contract.numbers"

    class Options(PluginOptions):
        broken_row: int | None = None
        shuffle: bool = True

    options: Options

    def prepare(self) -> None:
        pass

    def schema(self) -> FeatureSchema:
        return FeatureSchema(("item", "visits"), ("number",), "label")

    def splits(self) -> tuple[Split, ...]:
        return _SPLITS

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        num_rows = _ROWS if split == "train" else _ROWS // 2
        units = [
            Unit(0, group, first, min(_UNIT, num_rows - first))
            for group, first in enumerate(range(0, num_rows, _UNIT))
        ]
        plan, what = (
            ReadPlan(tuple(units), batch_size, self.options.shuffle),
            f"the {split} split of {_FILE}",
        )
        ranks = {"rank": rank, "world_size": world_size}
        return PlannedReader(plan, self._read, data={"split": split}, what=what, **ranks, ahead=0)

    def _read(self, pieces: Iterator[Piece]) -> Generator[Rows, None, None]:
        for piece in pieces:
            first = piece.unit.first_row + piece.skip
            numbers = range(first, first + piece.num_rows)
            if self.options.broken_row in numbers:
                raise DataError(f"{_FILE}: row {self.options.broken_row} is broken")
            visits = [[row // 3, 7][: row // 3 % 3] for row in numbers]
            columns = {
                "item": pa.array(numbers, pa.int64()),
                "visits": pa.array(visits, pa.list_(pa.int64())),
                "number": pa.array(numbers, pa.float32()),
                "label": pa.array([row % 2 for row in numbers], pa.int8()),
            }
            origin = Origin(_FILE, first, piece.num_rows)
            yield Rows(pa.RecordBatch.from_pydict(columns), (origin,))


class Unrepeatable(Converter):
    """A converter that deduplicates ``visits``. Only the trainer can fit it, and only once."""

    name = "contract.unrepeatable"

    class Options(PluginOptions):
        trainer: int

    options: Options

    def fit(self, sample: Rows, schema: FeatureSchema) -> None:  # noqa: ARG002
        if os.getpid() != self.options.trainer or hasattr(self, "_kept"):
            raise DataError("the converter was fitted again, by a reader")
        self._kept = random.random()

    def convert(self, rows: Rows, schema: FeatureSchema) -> Batch:
        from recd_plugins.data.arrow import dense_features, labels, sparse_column
        from recd_plugins.sparse.dedup import Deduplicator
        from recd_plugins.sparse.from_columns import ikjts_from_columns, kjt_from_columns

        if not hasattr(self, "_kept"):
            raise DataError("the reader's converter is not fitted")
        visits = {"visits": sparse_column(rows, "visits")}
        return Batch(
            dense_features(rows, schema.dense),
            labels(rows, schema.label),
            kjt_from_columns({"item": sparse_column(rows, "item")}, len(rows)),
            ikjts_from_columns([visits], len(rows), Deduplicator()),
        )


class Noise(Preprocessing):
    """A preprocessing that adds a random number per object to ids, and fails at one id."""

    name = "contract.noise"

    class Options(PluginOptions):
        fails_at: int | None = None

    options: Options

    def __init__(self, options: PluginOptions) -> None:
        super().__init__(options)
        self._added = random.SystemRandom().randrange(2**40)

    def transform(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if self.options.fails_at is not None and bool((values == self.options.fails_at).any()):
            raise ValueError("this id brings bad luck")
        return values + self._added, offsets


class IngestionContract(PluginContract):
    """Tests of an ingestion: override the fixture ``plugin``.

    The data has 112 rows, a batch has 8, and a block has at most 20. The other plugins are defined
    in this module, so readers need this package with its test dependencies.
    """

    def left_over(self) -> Sequence[object]:
        """Return resources that must be released soon after a feed is closed.

        Override it for resources other than multiprocessing processes and Python threads.
        """
        return [*multiprocessing.active_children(), *threading.enumerate()]

    @pytest.fixture
    def registry(self, plugin: Ingestion) -> RunConfig:
        return _registry(plugin)

    @pytest.mark.parametrize("split", _SPLITS)
    @pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
    def test_batches_and_positions_are_those_of_the_rank_alone(
        self, registry: RunConfig, split: Split, rank: int, world_size: int
    ) -> None:
        alone = build_dataloader(replace(registry, ingestion=None), rank, world_size, split)
        with build_dataloader(registry, rank, world_size, split) as loader:
            for _epoch in range(2):
                expected = _read(alone)
                assert len(expected) == len(loader)
                _assert_same(_read(loader), expected)
                assert loader.state_dict() == alone.state_dict()

    def test_goes_on_at_any_batch(self, registry: RunConfig) -> None:
        """A feed starts at any position, even after an unfinished iteration."""
        alone = build_dataloader(replace(registry, ingestion=None), 0, 2)
        start = alone.state_dict()
        expected = _read(alone)
        positions = [start, *(position for _, position in expected)]
        with build_dataloader(registry, 0, 2) as loader:
            for step, position in enumerate(positions[:-1]):
                loader.load_state_dict(json.loads(json.dumps(position)))
                _assert_same(list(islice(_each(loader), 2)), expected[step : step + 2])
            loader.load_state_dict(positions[2])
            _assert_same(_read(loader), expected[2:])

    def test_feeds_of_several_ranks_and_splits_at_once(self, registry: RunConfig) -> None:
        numbers: list[float] = []
        with (
            build_dataloader(registry, 0, 2) as first,
            build_dataloader(registry, 1, 2) as second,
            build_dataloader(registry, 0, 1, "test") as test,
        ):
            next(iter(test))
            for pair in zip(first, second, strict=True):
                for batch in pair:
                    numbers += batch.dense_features.flatten().tolist()
        assert sorted(numbers) == list(range(_ROWS))

    @pytest.mark.parametrize(
        ("kind", "options"),
        [(DataError, {"broken_row": 50}), (ValueError, {"fails_at": 50})],
    )
    def test_errors_are_those_of_the_rank_alone(
        self, plugin: Ingestion, kind: type[Exception], options: Mapping[str, int]
    ) -> None:
        """Each attempt raises the same error at the same batch."""
        registry = _registry(plugin, **options)
        expected, before = _failure(build_dataloader(replace(registry, ingestion=None), 0, 1))
        assert type(expected) is kind
        *_, (_, position) = before
        with build_dataloader(registry, 0, 1) as loader:
            for _attempt in range(2):
                error, batches = _failure(loader)
                assert (type(error), str(error)) == (kind, str(expected))
                _assert_same(batches, before)
                assert loader.state_dict() == position, "that after the last batch handed out"
                before = []  # the second attempt starts at the error

    def test_nothing_is_left_when_it_is_closed(self, plugin: Ingestion) -> None:
        """One feed was read in part, the other not at all."""
        plugin.check()
        registry = _registry(plugin)
        with build_dataloader(registry, 0, 1) as warm_up:
            next(iter(warm_up))
        before = {id(item) for item in self.left_over()}
        loader, unread = build_dataloader(registry, 0, 1), build_dataloader(registry, 0, 1)
        next(iter(loader))
        reports = [loader.report()]
        for each in (loader, unread, loader):  # the second call does nothing
            each.close()
        for report in (*reports, loader.report()):
            assert all(type(value) in (int, float) for value in report.values())
            json.dumps(dict(report), allow_nan=False)
        left = _wait(lambda: [item for item in self.left_over() if id(item) not in before])
        assert not left, f"there are {left}"

    def test_nothing_is_left_of_a_killed_trainer(self, plugin: Ingestion) -> None:
        """Nothing closes the feed of a killed trainer, so readers must detect its end."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        trainer = WorkerContext().Process(target=_train, args=(plugin, sender))
        trainer.start()
        sender.close()
        try:
            assert receiver.recv(), "it reads"
            started = psutil.Process(trainer.pid).children(recursive=True)
        finally:
            trainer.kill()
            trainer.join()
        left = _wait(lambda: [process for process in started if _runs(process)])
        for process in left:
            process.kill()
        advice = "call recd_plugins.api.processes.end_with_parent in each process"
        assert not left, f"there are {left}; {advice}"


def _wait(left: Callable[[], list[Any]]) -> list[Any]:
    """Return the leftovers after at most ten seconds."""
    for _ in range(200):
        if not left():
            return []
        threading.Event().wait(0.05)
    return left()


def _train(plugin: Ingestion, sender: Connection) -> None:
    """Stop in the middle of an epoch, until killed."""
    batches = iter(build_dataloader(_registry(plugin), 0, 1))
    sender.send(len(next(batches).labels))
    threading.Event().wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _registry(
    plugin: Ingestion, broken_row: int | None = None, fails_at: int | None = None
) -> RunConfig:
    spec = {"version": 1, "training": {"batch_size": _BATCH}}
    registry = RunConfig(
        path=Path("registry.yaml"),
        spec=RegistrySpec.model_validate(spec),
        dataset=Numbers(Numbers.Options(broken_row=broken_row)),
        converter=Unrepeatable(Unrepeatable.Options(trainer=os.getpid())),
        preprocessing=(
            Entry(Noise(Noise.Options(fails_at=fails_at)), ("item",), "preprocessing[0]", 1),
            Entry(Noise(Noise.Options()), ("visits",), "preprocessing[1]", 1),
        ),
        pooling=(),
        sharding=(),
        cache=(),
        ingestion=Entry(plugin, (), "ingestion", 1),
    )
    fit_converter(registry)
    return registry


def _each(loader: DataLoader) -> Iterator[tuple[ModelInput, dict[str, Any]]]:
    for batch in loader:
        yield batch, loader.state_dict()


def _read(loader: DataLoader) -> Batches:
    return list(_each(loader))


def _failure(loader: DataLoader) -> tuple[Exception, Batches]:
    batches: Batches = []
    with pytest.raises((DataError, ValueError)) as caught:
        batches.extend(_each(loader))
    return caught.value, batches


def _assert_same(batches: Batches, expected: Batches) -> None:
    for step, ((one, position), (other, at)) in enumerate(zip(batches, expected, strict=True)):
        assert position == at, f"the position after batch {step}"
        assert_equal(one, other, f"batch {step}")
