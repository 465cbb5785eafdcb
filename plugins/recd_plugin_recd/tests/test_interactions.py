from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from recd_plugin_recd.interactions import Interactions
from recd_plugins.runtime.errors import DataError
from recd_plugins.testing.contracts import DatasetContract

Event = tuple[int, int | str, float, int]
MINUTE = 60

# User, item, rating, second. Two users, whose events lie mixed and out of order.
LOG: list[Event] = [
    (1, 10, 5, 0),
    (2, 10, 2, 50 * MINUTE),
    (1, 11, 3, 10 * MINUTE),
    (1, 12, 4, 40 * MINUTE),
    (1, 13, 1, 71 * MINUTE),
    (2, 11, 4, 40 * MINUTE),
    (1, 10, 5, 71 * MINUTE),
    (2, 13, 3, 51 * MINUTE),
]


def inter(events: Sequence[Event]) -> str:
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    return head + "".join("\t".join(map(str, event)) + "\n" for event in events)


def dat(events: Sequence[Event]) -> str:
    return "".join("::".join(map(str, event)) + "\n" for event in events)


def csv(events: Sequence[Event]) -> str:
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, each)) for each in events)]
    return "".join(f"{line}\r\n" for line in lines)


def dataset(path: Path, **options: Any) -> Interactions:
    options = {"test_fraction": 0, **options}
    return Interactions(Interactions.Options.model_validate({"path": path, **options}))


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "log.inter").write_text(inter(LOG))
    return tmp_path / "log.inter"


def read(data: Interactions, split="train", batch_size: int = 1) -> list[dict[str, Any]]:
    batches = data.reader(rank=0, world_size=1, batch_size=batch_size, split=split)
    return [
        {**row, "file_row": rows.origin_of(index)[1]}
        for rows in batches
        for index, row in enumerate(rows.data.to_pylist())
    ]


def test_rows_are_by_session_or_by_time(path):
    """Pauses of 30 minutes stay in a session, of 31 do not; sessions follow by their starts."""
    for order in ("session", "time"):
        data = dataset(path, order=order)
        assert [row["file_row"] for row in read(data)] == [0, 2, 3, 5, 1, 7, 4, 6]
    mixed = [(1, 1, 5, 0), (2, 2, 5, 1), (1, 3, 5, 2)]
    path.write_text(inter(mixed))
    assert [row["file_row"] for row in read(dataset(path, order="time"))] == [0, 1, 2]
    assert [row["file_row"] for row in read(dataset(path))] == [0, 2, 1]


@pytest.mark.parametrize(
    ("refresh", "seen"),
    [
        ({"per": "event"}, [[], [10], [10, 11], [10, 11, 12], [10, 11, 12, 13]]),
        ({"per": "request", "impressions": 2}, [[], [], [10, 11], [10, 11, 12], [10, 11, 12]]),
        ({"per": "session"}, [[], [], [], [10, 11, 12], [10, 11, 12]]),
    ],
)
def test_refresh_says_when_a_users_features_change(path, refresh, seen):
    rows = [row for row in read(dataset(path, refresh=refresh)) if row["user_id"] == [1]]
    assert [row["history_seen"] for row in rows] == seen
    assert [row["item_id"] for row in rows] == [[10], [11], [12], [13], [10]]


def test_threshold_decides_the_label(path):
    rows = read(dataset(path, positive_threshold=3))
    assert {row["file_row"] for row in rows if not row["label"]} == {1, 4}


def test_a_label_column_needs_no_threshold(tmp_path):
    path = tmp_path / "clicks.tsv"
    path.write_text("user\titem\tclick\tat\nu1\ta\t1\t5\nu1\tb\t0\t6\n")
    names = {"user": "user", "item": "item", "timestamp": "at"}
    data = dataset(path, label="click", value=None, **names)
    assert [row["label"] for row in read(data)] == [1, 0]
    with pytest.raises(ValidationError, match="'value' and 'label' are both null"):
        dataset(path, value=None, **names)
    path.write_text("user\titem\tclick\tat\nu1\ta\t1\t5\nu1\tb\t3\t6\n")
    with pytest.raises(DataError, match=r"column 'click' contains 3 in row 1 .* must be 0 or 1"):
        dataset(path, label="click", value=None, **names).prepare()


def test_test_split_is_the_end_of_the_time(path):
    data = dataset(path, test_fraction=0.25)
    assert data.splits() == ("train", "test")
    train, test = read(data, "train"), read(data, "test")
    assert sorted(row["file_row"] for row in train) == [0, 1, 2, 3, 5, 7]
    assert sorted(row["file_row"] for row in test) == [4, 6]
    assert test[1]["history_seen"] == [10, 11, 12, 13]
    assert dataset(path).splits() == ("train",)


@pytest.mark.parametrize(
    ("name", "write", "options"),
    [
        ("ratings.dat", dat, {}),
        ("u.data", lambda events: dat(events).replace("::", "\t"), {}),
        ("ratings.csv", csv, {"user": "userId", "item": "movieId"}),
        ("log.txt", lambda events: dat(events).replace("::", "|"),
         {"separator": "|", "header": False}),
        ("log.csv", lambda events: csv(events).partition("\n")[2],
         {"header": ["who", "what", "rating", "timestamp"], "user": "who", "item": "what"}),
        ("quoted.csv", lambda events: csv(events).replace(",5,", ',"5",'),
         {"user": "userId", "item": "movieId"}),
        ("ms.inter", lambda events: inter([(*event[:3], event[3] * 1000) for event in events]),
         {"timestamp_unit": "ms"}),
    ],
)  # fmt: skip
def test_every_format_reads_the_same(path, tmp_path, name, write, options):
    other = tmp_path / name
    other.write_bytes(write(LOG).encode())
    assert read(dataset(other, **options)) == read(dataset(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (inter(LOG).replace("2\t11\t4\t", "2\t11\tfour\t"),
         "log.inter: .*Row #7: .* invalid value 'four'"),
        (inter(LOG).replace("\t4260", "\t", 1),
         "log.inter: column 'timestamp', row .*: the number"),
        (inter(LOG).replace("1\t12", "\t12"), "log.inter: column 'user_id': an id is empty"),
        (inter(LOG).replace("rating:float", "stars:float"),
         "option 'value' names column 'rating'.* one of: 'user_id', 'item_id', 'stars"),
        (inter([]), "no interactions"),
        (inter([(1, 1, 5, 1_700_000_000_000)]), "Set timestamp_unit: ms"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(path, content, message):
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        dataset(path).prepare()


def test_state_of_a_changed_file_or_of_other_options_is_refused(path):
    def reader(**options: Any):
        return dataset(path, **options).reader(rank=0, world_size=1, batch_size=2, split="train")

    state = reader().state_dict()
    reader(prefetch=0).load_state_dict(state)
    with pytest.raises(DataError, match="order' was 'session' and is now 'time'"):
        reader(order="time").load_state_dict(state)
    path.write_text(inter([(*event[:2], 5, event[3]) for event in LOG]))
    with pytest.raises(DataError, match="'events' was"):
        reader().load_state_dict(state)


class TestContract(DatasetContract):
    @pytest.fixture
    def plugin(self, tmp_path) -> Interactions:
        path = tmp_path / "log.inter"
        path.write_text(inter([(i % 7, i * 5 % 11, i % 5 + 1, i * 400) for i in range(120)]))
        return dataset(path, test_fraction=0.1)


# Of LOG, by user and oldest first: 1 has 10, 11, 12, 13 and 10, 2 has 11, 10 and 13.
LEAVE_ONE_OUT = {"by": "leave_one_out"}


def items_and_histories(data: Interactions, split: str) -> list[tuple[int, int, list[int]]]:
    rows = read(data, split)
    return [(row["user_id"][0], row["item_id"][0], row["history_seen"]) for row in rows]


def test_leave_one_out_tests_the_last_event_of_each_user(path):
    data = dataset(path, test=LEAVE_ONE_OUT, refresh={"per": "session"})
    assert data.splits() == ("train", "test")
    # All that was known right before it, whenever features are refreshed.
    assert items_and_histories(data, "test") == [(2, 13, [11, 10]), (1, 10, [10, 11, 12, 13])]
    trained = [(1, 10), (1, 11), (1, 12), (2, 11), (2, 10), (1, 13)]
    assert [row[:2] for row in items_and_histories(data, "train")] == trained
    # With a validation split, which has the last event but one.
    data = dataset(path, test={**LEAVE_ONE_OUT, "validation": True})
    assert [row[:2] for row in items_and_histories(data, "train")] == trained[:4]


def test_a_shuffled_order_keeps_requests_together_and_is_another_in_each_epoch(path):
    events = [(user, 10 * user + i, 5, 100 * i + user) for user in range(8) for i in range(6)]
    path.write_text(inter(events))
    data = dataset(path, order="shuffled", refresh={"per": "request", "impressions": 3})
    reader = data.reader(rank=0, world_size=1, batch_size=3, split="train")
    epochs = []
    for _ in range(2):
        requests = [rows.data.to_pylist() for rows in reader]
        for rows in requests:
            assert len({(row["user_id"][0], *row["history_seen"]) for row in rows}) == 1
            items = [row["item_id"][0] for row in rows]
            assert items == sorted(items)
        epochs.append([row["item_id"][0] for rows in requests for row in rows])
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(event[1] for event in events)
    assert epochs[0] != epochs[1]
    assert [row["item_id"][0] for row in read(data)] == epochs[0]
