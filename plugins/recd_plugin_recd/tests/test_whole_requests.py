"""Dataset wrapper ``recd.whole_requests``: whole requests, equal costs, exact losses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from tests.small_registry import write_registry

from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugin_recd.whole_requests import WholeRequests
from recd_plugins.data.list_dict import Layout, to_list_dict
from recd_plugins.interfaces import FeatureSchema, Rows
from recd_plugins.testing.contracts import DatasetContract
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.result import Result
from recd_plugins.training.trainer import Job, train

# Three ranks and batches of 12 rows: requests cross batches.
SIZES = [5, 3, 7, 2, 4, 6, 1, 8, 3, 5, 9, 2, 6, 4, 5, 7, 3, 8, 2, 6, 4, 5, 9, 6]


def write_table(path: Path, sizes: list[int], seed: int = 0) -> Path:
    """One request per size, each with a history of its own; lengths follow Zipf's law."""
    draw = np.random.default_rng(seed)
    lengths = np.minimum(draw.zipf(1.5, len(sizes)), 60)
    histories = [draw.integers(0, 50, length).tolist() for length in lengths]
    request = np.repeat(np.arange(len(sizes)), sizes)
    num_rows = len(request)
    table = pa.table(
        {
            "session_id": request,
            "ts": np.arange(num_rows, dtype=np.float64),
            "label": draw.integers(0, 2, num_rows).astype(np.int8),
            "number": np.arange(num_rows, dtype=np.float32) / num_rows,
            "history": pa.array([histories[n] for n in request], pa.list_(pa.int64())),
            "item": pa.array(draw.integers(0, 50, (num_rows, 1)).tolist(), pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, path, row_group_size=40)
    return path


def wrapped(path: Path, **options: Any) -> WholeRequests:
    plugin = WholeRequests(WholeRequests.Options.model_validate(options))
    made = plugin.over(SessionParquet(SessionParquet.Options(path=path)), None)  # type: ignore[arg-type]
    made.prepare()
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("requests") / "table.parquet", SIZES)


class TestContract(DatasetContract):
    batch_size = 8

    @pytest.fixture
    def plugin(self, path: Path) -> WholeRequests:
        return wrapped(path)


def read(dataset: WholeRequests, world_size: int) -> list[list[Any]]:
    sizes: dict[str, Any] = {"world_size": world_size, "batch_size": 12, "split": "train"}
    readers = [dataset.session_reader(rank=rank, **sizes) for rank in range(world_size)]
    return [list(steps) for steps in zip(*readers, strict=True)]


def numbers(batches: Iterable[Rows]) -> list[float]:
    return [number for rows in batches for number in rows.data["number"].to_pylist()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_requests_stay_whole_and_ranks_get_equal_costs(path: Path, world_size: int) -> None:
    dataset = wrapped(path)
    steps = read(dataset, world_size)
    batches = [rows for step in steps for rows in step]
    seen = [set(rows.data["session_id"].to_pylist()) for rows in batches]
    cut = sum(map(len, seen)) - len(set.union(*seen))
    # Each rank's stream starts where the stream of another rank ends.
    assert cut <= world_size - 1
    if world_size > 1:
        for step in steps:
            costs = [dataset.costs(rows, request_starts(rows)) for rows in step]
            of_ranks = [each.sum() for each in costs]
            assert max(of_ranks) - min(of_ranks) <= max(each.max() for each in costs)


def request_starts(rows: Rows) -> NDArray[np.int64]:
    return np.flatnonzero(np.diff(rows.data["session_id"].to_numpy(), prepend=-1))


def test_cuts_of_requests_larger_than_a_batch_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = wrapped(write_table(tmp_path / "table.parquet", [4, 30, 2, 9, 15]))
    reader = dataset.reader(rank=0, world_size=1, batch_size=12, split="train")
    sizes = [len(rows) for rows in reader]
    assert sizes == [4, 20, 12, 9, 15]  # the request of 30 rows is cut once
    assert "cut 1 times in an epoch" in caplog.text
    caplog.clear()
    assert [len(rows) for rows in dataset.sample(12)] == sizes
    assert not caplog.text


@pytest.mark.parametrize("layout", ["list", "list_dict"])
def test_the_cost_of_a_request(layout: Layout) -> None:
    lists = pa.array([[1, 2], [1, 2], [3], [1, 2, 3], []], pa.list_(pa.int64()))
    columns = {"history": lists, "tags": lists, "session_id": pa.array([1, 1, 1, 2, 2])}
    if layout == "list_dict":
        columns["history"] = to_list_dict(lists).dictionary_encode()
    table = pa.record_batch(columns)
    dataset = WholeRequests(WholeRequests.Options(row_cost=10, attention_cost=0.5))
    features = FeatureSchema(("history", "tags"), (), "label")
    tables = [Mock(pooled=False, features=["history"]), Mock(pooled=True, features=["tags"])]
    made = dataset.over(Mock(schema=lambda: features), Mock(tables=tables))
    rows = Rows(table, ())
    assert made.costs(rows, request_starts(rows)).tolist() == [30 + 2 + 2 + 2.5, 20 + 3 + 3 + 1.5]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_position_goes_on_with_any_number_of_ranks(path: Path, world_size: int) -> None:
    dataset = wrapped(path)
    reader = dataset.reader(rank=0, world_size=2, batch_size=12, split="train")
    steps = [numbers(rows for rows in step) for step in read(dataset, 2)]
    batches = iter(reader)
    next(batches), next(batches)
    state = reader.state_dict()
    assert state["carried"], "a request crosses this step's batches"
    rest: list[float] = []
    for rank in range(world_size):
        other = dataset.reader(rank=rank, world_size=world_size, batch_size=12, split="train")
        other.load_state_dict(state)
        rest += numbers(other)
    assert len(rest) == len(set(rest))
    assert set(steps[0] + steps[1]).isdisjoint(rest)
    if world_size == 2:
        assert sorted(rest) == sorted(chain(*steps[2:]))


def train_each(rank: int, world_size: int, jobs: list[Job]) -> list[Result]:
    return [train(rank, world_size, job) for job in jobs]


def test_losses_are_those_of_even_batches(tmp_path: Path) -> None:
    """Requests of four rows end with the batches, so that both runs have equal steps."""
    table = write_table(tmp_path / "table.parquet", [4] * 18)
    dataset = {"use": "recd.session_parquet", "options": {"path": str(table)}}
    training = {"batch_size": 12, "learning_rate": 0.1, "optimizer": "sgd", "epochs": 2}
    jobs = []
    for number, wrap in enumerate([[], [{"use": "recd.whole_requests"}]]):
        path = write_registry(
            tmp_path,
            f"{number}.yaml",
            dataset={**dataset, "wrap": wrap},
            converter={"use": "recd.ikjt"},
            pooling=[{"use": "recd.mean", "features": ["history"]}],
            model={"num_embeddings": 50, "bottom_mlp": [8], "top_mlp": [8]},
            training={**training, "evaluate": False, "device": "auto"},
        )
        jobs.append(Job(path))
    sizes = {len(rows) for step in read(wrapped(table), 3) for rows in step}
    assert len(sizes) > 1
    even, whole = run_on_ranks(train_each, 3, jobs)[0]
    assert whole.losses == pytest.approx(even.losses, abs=1e-6)
    assert len(whole.losses) == 4
