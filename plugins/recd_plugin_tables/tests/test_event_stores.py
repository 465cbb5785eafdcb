"""Histories from stores of events: the last events before a row's time, and no later ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from tests.commands import recd, refusal

from recd_plugin_tables import spill
from recd_plugin_tables.histories import build, windows
from recd_plugin_tables.histories.build import EventColumns, build_store
from recd_plugin_tables.histories.store import EventStore
from recd_plugin_tables.sources import open_source
from recd_plugin_tables.tests.helpers import table, write
from recd_plugin_tables.values import text_id
from recd_plugins.api import arrow
from recd_plugins.runtime.errors import DataError
from recd_plugins.training.session import session
from recd_plugins.training.trainer import Job

START = 1_700_000_000
USES = {
    "user": ["session", "id"],
    "ts": {"as": "time", "unit": "s"},
    "shown": "id",
    "row": "number",
    "click": "label",
}


def log(num_events: int = 900) -> dict[str, list]:
    draw = np.random.default_rng(0)
    return {
        "who": [f"u{user}" for user in draw.integers(0, 20, num_events)],
        "when": ((START + draw.integers(0, 90, num_events)) * 1000).tolist(),
        "item": [f"i{item}" for item in draw.integers(0, 50, num_events)],
        "kind": draw.integers(0, 3, num_events).tolist(),
    }


def impressions(num_rows: int = 200) -> dict[str, list]:
    draw = np.random.default_rng(1)
    return {
        "user": [f"u{user}" for user in draw.integers(0, 25, num_rows)],  # u20 to u24 are unknown
        "ts": (START + draw.integers(-5, 95, num_rows)).tolist(),
        "shown": [f"i{item}" for item in draw.integers(0, 50, num_rows)],
        "row": list(range(num_rows)),
        "click": draw.integers(0, 2, num_rows).tolist(),
    }


def store(folder, given: dict[str, list] | None = None, **changes: Any):
    source = open_source(write(folder / "log.parquet", log() if given is None else given))
    columns = {"user": "who", "time": "when", "items": ("item", "kind"), "unit": "ms", **changes}
    path = folder / "clicks.parquet"
    build_store(source, path, EventColumns(**columns), lambda _: None)
    return path


def expected(events: dict[str, list], rows: dict[str, list], last: int, item: str) -> list[list]:
    found = []
    for user, ts in zip(rows["user"], rows["ts"], strict=True):
        before = [
            (when, number)
            for number, (who, when) in enumerate(zip(events["who"], events["when"], strict=True))
            if who == user and when < ts * 1000
        ]
        found.append([events[item][number] for _, number in sorted(before)][-last:])
    return found


def read(dataset, name: str, split: str = "train") -> dict[int, list[int]]:
    found = {}
    for rows in dataset.scan(split):
        ids, offsets = arrow.sparse_column(rows, name)
        lists = np.split(ids, offsets[1:-1])
        found |= zip(rows.data["row"].to_pylist(), (each.tolist() for each in lists), strict=True)
    return found


def test_a_history_has_the_last_events_before_the_row_and_no_later_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(spill, "_ROWS", 100)
    monkeypatch.setattr(build, "_MEMORY", 10_000)
    monkeypatch.setattr(build, "_ROW_GROUP_EVENTS", 128)
    monkeypatch.setattr(windows, "_MOST_IDS", 50)
    events, rows = log(), impressions()
    path = store(tmp_path, events)
    assert pq.ParquetFile(path).num_row_groups > 3
    histories = {
        "clicks": {"store": path, "last": 7},
        "kinds": {"store": path, "item": "kind", "user": "user", "last": 1000},
    }
    place, split = write(tmp_path / "rows.parquet", rows), {"by": "time", "test": 0.3}
    data = table(place, columns=USES, histories=histories, split=split)
    data.prepare()
    assert data.schema().sparse == ("user", "shown", "clicks", "kinds")
    clicks = expected(events, rows, 7, "item")
    kinds = expected(events, rows, 1000, "kind")
    assert [] in clicks
    assert max(map(len, kinds)) > 20
    texts = [[text_id(item) for item in each] for each in clicks]
    both = read(data, "clicks") | read(data, "clicks", "test")
    assert [both[row] for row in range(200)] == texts
    both = read(data, "kinds") | read(data, "kinds", "test")
    assert [both[row] for row in range(200)] == kinds
    scored = read(data.to_score(str(tmp_path / "rows.parquet")), "clicks")
    assert [scored[row] for row in range(200)] == texts
    for imported in (tmp_path / "imports").glob("rows-*/train/*"):
        assert not {"clicks", "kinds"} & {*pq.read_schema(imported).names}


def late(tmp_path, rows: dict[str, list] | None = None, columns=None, **history: object):
    histories = {"clicks": {"store": tmp_path / "clicks.parquet", "last": 5, **history}}
    place = write(tmp_path / "rows.parquet", impressions() if rows is None else rows)
    return table(place, columns=columns or USES, histories=histories)


def test_rows_of_a_request_share_one_history(tmp_path):
    events, rows = log(), impressions()
    rows["ts"] = [START + 60] * 200  # one request per user
    store(tmp_path, events)
    data = late(tmp_path, rows)
    data.prepare()
    (found,) = data.reader(rank=0, world_size=1, batch_size=200, split="train")
    column = arrow.dictionary_column(found, "clicks")
    assert len(column.bounds) - 1 == len({*rows["user"]} & {*events["who"]}) + 1


def test_users_without_events_have_empty_histories(tmp_path, capfd):
    store(tmp_path)
    rows = impressions(30)
    rows["user"] = ["u1", None, "nobody"] * 10
    data = late(tmp_path, rows)
    data.prepare()
    found = read(data, "clicks")
    assert all(found[row] == [] for row in range(30) if row % 3)
    assert "is empty" not in capfd.readouterr().err
    late(tmp_path, {**rows, "user": ["nobody"] * 30}).prepare()
    assert "history 'clicks' is empty in the first 30 rows" in capfd.readouterr().err
    late(tmp_path, {**rows, "ts": [START - 1] * 30}).prepare()
    assert "no events before 2023-11-14 in" in capfd.readouterr().err


def test_a_store_of_other_times_or_users_is_refused(tmp_path):
    events = log()
    store(tmp_path, events, unit="us")
    said = r"end at 1970-01-20 \(unit 'us'\).* at 2023.* \(unit 's'\)"
    with pytest.raises(DataError, match=said):
        late(tmp_path).prepare()
    store(tmp_path, {**events, "who": [int(who[1:]) for who in events["who"]]})
    numbers = impressions()
    numbers["user"] = [int(user[1:]) for user in numbers["user"]]
    late(tmp_path, numbers).prepare()
    with pytest.raises(DataError, match=r"users are numbers in .*clicks.parquet, but text in"):
        late(tmp_path).prepare()


def test_other_files_and_unsorted_events_are_refused(tmp_path):
    path = store(tmp_path)
    with pytest.raises(DataError, match=r"has no item column 'price'. Use one of: 'item', 'kind'"):
        late(tmp_path, item="price").prepare()
    events = pq.read_table(path)
    user, when = (events[name].to_numpy() for name in ("who", "when"))
    first = int((user == user[0]).sum())
    for order in (np.arange(len(events))[::-1], np.argsort(-when[:first], kind="stable")):
        with build._writer(path, events.schema) as writer:
            writer.write_table(events.take(pa.array(order)))
        with pytest.raises(DataError, match=r"row \d+ \(from 0\): the events are not sorted"):
            EventStore(path).check()
    pq.write_table(events, path)
    with pytest.raises(DataError, match=r"'when' is encoded or compressed, so another program"):
        EventStore(path).check()
    pq.write_table(events.replace_schema_metadata(None), path)
    with pytest.raises(DataError, match=r"not a store of events. Write one with recd histories"):
        late(tmp_path).prepare()
    path.unlink()
    with pytest.raises(DataError, match=r"the file does not exist. Write it with recd histories"):
        late(tmp_path).prepare()


def test_a_reader_does_not_continue_with_other_events(tmp_path):
    store(tmp_path)
    states = []
    for events in (log(), log(), log(800)):
        store(tmp_path, events)
        data = late(tmp_path)
        data.prepare()
        reader = data.reader(rank=0, world_size=1, batch_size=50, split="train")
        next(iter(reader))
        states.append((reader, reader.state_dict(), data.identity()))
    assert states[0][1:] == states[1][1:]
    assert states[0][2] != states[2][2]
    with pytest.raises(DataError, match="'histories' was"):
        states[2][0].load_state_dict(states[0][1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"of": "shown"}, "'of' .* or 'store'"),
        ({"user": "row"}, "'row' is not a column with role 'id', 'session' or 'request'"),
        ({"columns": {**USES, "ts": "number"}}, "no column has the role 'time'"),
        ({"ties": "stored"}, "only events before the row's time"),
    ],
)
def test_options_of_stores_that_do_not_fit_are_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        late(tmp_path, **changes)


RUN = """
version: 1
dataset:
  use: tables.table
  options:
    path: {folder}/{table}.parquet
    cache: {folder}/imports
    columns:
      user: [session, id]
      ts: {{as: time, unit: s}}
      shown: id
      row: number
      click: label
      {lists}
    split: {{by: time, test: 0.2}}
    {histories}
converter: {{use: recd.list_dict, options: {{groups: [[clicks]]}}}}
preprocessing:
  - {{use: tables.vocabulary, features: [shown, clicks], options: {{rows: 60, shared: true}}}}
  - {{use: tables.vocabulary, features: [user], options: {{rows: 40}}}}
pooling:
  - {{use: recd.mean, features: [clicks]}}
model: {{embedding_dim: 4, num_embeddings: 60, bottom_mlp: [4], top_mlp: [4]}}
training: {{batch_size: 32, ranks: 1, steps: 4, checkpoint: {{path: {folder}/{table}}}}}
"""


def test_a_run_learns_the_same_as_from_lists_in_the_table(tmp_path):
    events, rows = log(), impressions()
    path = store(tmp_path, events)
    write(tmp_path / "late.parquet", rows)
    write(tmp_path / "lists.parquet", {**rows, "clicks": expected(events, rows, 9, "item")})
    late = {"lists": "", "histories": f"histories: {{clicks: {{store: {path}, last: 9}}}}"}
    results = []
    for name, lines in (("late", late), ("lists", {"lists": "clicks: ids", "histories": ""})):
        registry = tmp_path / f"{name}.yaml"
        registry.write_text(RUN.format(folder=tmp_path, table=name, **lines), encoding="utf-8")
        with session(Job(registry)) as trainer:
            results.append(trainer.train("plugins"))
    assert len(results[0].losses) == 4
    assert results[0].losses == results[1].losses

    predict = "predict", tmp_path / "late.yaml", tmp_path / "late.parquet", "--output"
    recd(*predict, tmp_path / "before.parquet")
    moved = path.rename(tmp_path / "moved.parquet")
    elsewhere = f"dataset.options.histories.clicks.store={moved}"
    recd(*predict, tmp_path / "after.parquet", elsewhere)
    assert pq.read_table(tmp_path / "after.parquet") == pq.read_table(tmp_path / "before.parquet")


def test_init_finds_a_log_beside_the_table(cwd):
    events, rows = log(), impressions()
    write(cwd / "shown.parquet", rows)
    renamed = {"who": "user", "item": "shown"}
    write(cwd / "log.parquet", {renamed.get(name, name): each for name, each in events.items()})

    init = ["init", "shown.parquet", "my.yaml", "--time", "ts"]
    to_score = {name: each for name, each in rows.items() if name != "click"}
    write(cwd / "a_new_table.parquet", to_score)
    assert "repeat this command with --histories log.parquet --force" in recd(*init)
    recd(*init, "--histories", "log.parquet", "--force")
    registry = YAML(typ="safe").load(cwd / "my.yaml")
    (history,) = registry["dataset"]["options"]["histories"].values()
    assert history["store"] == "log.events.parquet"
    assert registry["converter"]["use"] == "recd.list_dict"
    shared = [each["features"] for each in registry["preprocessing"] if len(each["features"]) > 1]
    assert ["shown", "history"] in shared
    recd("validate", "my.yaml")
    said = recd("histories", "build", "log.parquet", "log.events.parquet", "--force")
    assert "900 events" in said
    assert "time 'when' (ms), items 'shown'" in said


def test_files_that_are_no_stores_are_not_replaced(cwd):
    write(cwd / "shown.parquet", impressions())
    renamed = {"who": "user", "item": "shown"}
    events = {renamed.get(name, name): each for name, each in log().items()}
    before = write(cwd / "log.events.parquet", events).read_bytes()
    for command in (
        ["histories", "build", "log.events.parquet", "log.events.parquet", "--force"],
        ["init", "shown.parquet", "my.yaml", "--time", "ts", "--histories", "log.events.parquet"],
    ):
        assert "log.events.parquet: this file is not a store of events" in refusal(*command)
    assert (cwd / "log.events.parquet").read_bytes() == before
