"""``encode.py`` and an exported model score raw rows like ``recd predict``."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests import forked

from recd_plugin_runs.encode import Encoder
from recd_plugins import load_registry

REGISTRY = """
version: 1
dataset:
  use: tables.table
  options:
    path: train.parquet
    on_nan: zero
    columns:
      user: [session, id]
      when: time
      hour: {as: id, by: hour}
      day: {as: number, by: day}
      stamp: {as: number, by: weekday, unit: YYYYMMDDHH}
      born: id
      city: {as: id, missing: nowhere}
      geo.zip: id
      seen: ids
      tags: {as: ids, separator: ","}
      numbers: {as: ids, separator: "|", integers: true}
      uid: id
      price: {as: number, missing: 3.5}
      small: number
      took: number
      vector: numbers
      flag: id
      click: label
converter: {use: recd.ikjt}
preprocessing:
  - {use: tables.vocabulary, features: ["*"], options: {rows: 80}}
  - {use: tables.standardise, features: ["*"]}
model: {embedding_dim: 8, num_embeddings: 80, bottom_mlp: [8], top_mlp: [8]}
training: {batch_size: 32, steps: 8, learning_rate: 1.0, dense_learning_rate: 0.1, device: cpu,
  checkpoint: {path: runs}}
"""
SHARED = ("user", "city", "seen", "price", "geo")


def rows_of(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.2 else value

    rows = []
    for _ in range(count):
        time = datetime.datetime(2024, 5, 1) + datetime.timedelta(minutes=draw.randrange(20_000))
        words = [draw.choice("abcdefghij") for _ in range(draw.randrange(5))]
        row = {
            "user": f"u{draw.randrange(30)}",
            "when": time,
            "hour": maybe(time),
            "day": maybe(time),
            "stamp": maybe(int(time.strftime("%Y%m%d%H"))),
            "born": maybe(time.date()),
            "city": maybe(draw.choice(["Bonn", "Köln", ""])),
            "geo": maybe({"zip": maybe(draw.choice(["01", "1"]))}),
            "seen": maybe([maybe(word) for word in words]),
            "tags": maybe("[" + ", ".join(words) + "]"),
            "numbers": maybe("|".join(str(ord(word)) for word in words)),
            "uid": maybe(draw.randbytes(3)),
            "price": draw.choice([None, float("nan"), float("inf"), draw.random()]),
            "small": draw.random(),
            "took": maybe(datetime.timedelta(seconds=draw.randrange(100))),
            "vector": maybe([draw.random(), draw.random()]),
            "flag": maybe(draw.random() < 0.5),
            "click": draw.randrange(2),
        }
        rows.append(row)
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    at = table.schema.get_field_index("small")
    pq.write_table(table.set_column(at, "small", table["small"].cast(pa.float32())), path)


def recd(folder: Path, *words: str) -> None:
    forked.run([forked.RECD, *words], cwd=folder, check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encode")
    write(folder / "train.parquet", rows_of(400, 0))
    (folder / "r.yaml").write_text(REGISTRY)
    recd(folder, "run", "r.yaml", "training.evaluate=false")
    recd(folder, "export", "r.yaml", "-o", "exported")
    return folder


def scores_of(folder: Path, name: str, rows: list[dict[str, Any]]) -> list[float]:
    write(folder / f"{name}.parquet", rows)
    recd(folder, "predict", "r.yaml", f"{name}.parquet", "-o", f"{name}.jsonl")
    return [json.loads(line)["score"] for line in (folder / f"{name}.jsonl").open()]


def test_encoded_rows_have_the_scores_of_predict(folder: Path) -> None:
    encoder = Encoder(folder / "exported")
    program = torch.export.load(folder / "exported" / "model.pt2").module()
    rows = rows_of(60, 1)
    expected = scores_of(folder, "new", rows)
    assert max(expected) - min(expected) > 0.01
    found = program(*encoder.encode(rows).tensors()).tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    # A request in JSON, with times as text and bytes as hex digits.
    request = {name: rows[0][name] for name in SHARED}
    own = [{name: row[name] for name in row if name not in SHARED} for row in rows]
    expected = scores_of(folder, "request", [{**request, **row} for row in own])
    for row in own:
        row["uid"] = row["uid"] and row["uid"].hex()
        row["took"] = row["took"] and row["took"].total_seconds()
    sent = json.loads(json.dumps([request, own], default=str))
    inputs = encoder.encode(sent[1], sent[0])
    assert inputs.lengths["seen"] == [len(inputs.values["seen"])]
    assert program(*inputs.tensors()).tolist() == pytest.approx(expected, abs=1e-6)


def test_encoded_rows_may_use_another_on_nan(folder: Path) -> None:
    write(folder / "endless.parquet", rows_of(40, 4))
    for rule in ("zero", "drop"):
        setting, output = f"dataset.options.on_nan={rule}", f"{rule}.jsonl"
        recd(folder, "predict", "r.yaml", "endless.parquet", "-o", output, setting)
        assert len((folder / output).read_text().splitlines()) == 40


def test_a_changed_role_is_told(folder: Path) -> None:
    (folder / "other.yaml").write_text(REGISTRY.replace("small: number", "small: id"))
    words = ["predict", "other.yaml", "train.parquet", "-o", "x.csv"]
    done = forked.run([forked.RECD, *words], cwd=folder)
    assert done.returncode == 1
    assert 'dataset.options.columns.small.as was ["number"] and is now ["id"]' in done.stderr
    assert "cannot be read" not in done.stderr


def test_a_sample_request_can_be_scored(folder: Path) -> None:
    table = folder / "train.parquet"
    table.rename(folder / "away.parquet")
    try:
        recd(folder, "export", "r.yaml", "-o", "without_table")
    finally:
        (folder / "away.parquet").rename(table)
    for name in ("exported", "without_table"):
        sent = json.loads((folder / name / "sample_request.json").read_text())
        (candidate,) = sent["candidates"]
        assert {"seen", "tags", "numbers"} <= set(sent["request"])
        assert None not in candidate.values()
        inputs = Encoder(folder / name).encode(sent["candidates"], sent["request"])
        program = torch.export.load(folder / name / "model.pt2").module()
        assert 0 < program(*inputs.tensors()).item() < 1
        assert (candidate["geo.zip"] in ("01", "1")) == (name == "exported")


WRONG = [
    ({"city": 3}, "row 1: column 'city' is 3. Ids of this column are text."),
    ({"seen": "a b"}, "column 'seen' is 'a b'. This column needs a list"),
    ({"seen": 5}, "column 'seen' is 5. This column needs a list of ids"),
    ({"numbers": ["x"]}, "Ids of this column are digits"),
    ({"flag": 0.5}, "Ids of this column are true and false"),
    ({"flag": "maybe"}, "Ids of this column are true and false"),
    ({"flag": 2**64}, "Send a smaller number"),
    ({"small": "1"}, "column 'small' is '1'. This column needs a number"),
    ({"small": 10**400}, "too large"),
    ({"vector": [1.0]}, "needs a list of 2 numbers"),
    ({"stamp": 2024}, "needs a date in the form YYYYMMDDHH"),
    ({"stamp": 2024139900}, "needs a date in the form YYYYMMDDHH"),
    ({"hour": "noon"}, "needs a time, such as 2024-05-01 10:00:00"),
]


@pytest.mark.parametrize(("change", "told"), WRONG)
def test_wrong_values_are_told(folder: Path, change: dict[str, Any], told: str) -> None:
    rows = rows_of(2, 2)
    rows[1] |= change
    with pytest.raises(ValueError, match=told):
        Encoder(folder / "exported").encode(rows)


def test_columns_are_sent_once(folder: Path) -> None:
    encoder = Encoder(folder / "exported")
    rows: list[Any] = rows_of(2, 2)
    with pytest.raises(ValueError, match="row 0: column 'user' is in the row and in shared"):
        encoder.encode(rows, {"user": "u1"})
    del rows[1]["geo"], rows[1]["flag"], rows[1]["small"]
    with pytest.raises(ValueError, match="row 1: column 'small' is missing"):
        encoder.encode(rows)
    rows[1]["small"] = 0.5
    lengths = encoder.encode(rows).lengths  # these are null in some rows of the training table
    assert (lengths["geo_zip"][1], lengths["flag"][1]) == (0, 0)
    rows[1]["flga"] = True
    with pytest.raises(ValueError, match=r"row 1: unknown column 'flga'\. Did you mean 'flag'\?"):
        encoder.encode(rows)
    del rows[1]["flga"]
    rows[1]["smal"] = 0.5
    encoder.encode(rows)
    strict = Encoder(folder / "exported", strict=True)
    for row in rows:
        del row["when"], row["click"]  # not features
    with pytest.raises(ValueError, match=r"row 1: unknown column 'smal'\. Did you mean 'small'\?"):
        strict.encode(rows)
    rows[1]["other"] = rows[1].pop("smal")
    with pytest.raises(ValueError, match=r"row 1: unknown column 'other'\. Remove the column"):
        strict.encode(rows)
    rows[1] = None
    with pytest.raises(ValueError, match="row 1 is not an object"):
        encoder.encode(rows)
    with pytest.raises(ValueError, match="list of rows is empty"):
        encoder.encode([])


@pytest.mark.parametrize("lengths", [[3, -1], [1, 2], [2**63 - 1, -(2**63) + 3], [1, 0]])
def test_lengths_must_fit_the_ids(folder: Path, lengths: list[int]) -> None:
    program = torch.export.load(folder / "exported" / "model.pt2").module()
    dense, values, all_lengths, rows = Encoder(folder / "exported").encode(rows_of(2, 3)).tensors()
    values["seen"], all_lengths["seen"] = torch.tensor([1, 2]), torch.tensor(lengths)
    with pytest.raises(RuntimeError, match=r"lengths\['seen'\]: a length is negative"):
        program(dense, values, all_lengths, rows)
    all_lengths["seen"] = torch.tensor([2, 0])
    assert program(dense, values, all_lengths, rows).shape == (2,)


def test_wrong_rows_and_numbers_are_told(folder: Path) -> None:
    program = torch.export.load(folder / "exported" / "model.pt2").module()
    sent = rows_of(2, 3)
    for row, text in zip(sent, ("TRUE", "false"), strict=True):
        row["flag"] = text
    dense, values, lengths, rows = Encoder(folder / "exported").encode(sent).tensors()
    assert values["flag"].tolist() == [1, 0]
    for index in (2, -1):
        with pytest.raises(RuntimeError, match=r"rows\['seen'\]: an index is negative, or is not"):
            program(dense, values, lengths, rows | {"seen": torch.tensor([0, index])})
    for number in (torch.nan, torch.inf):
        dense[1, 0] = number
        with pytest.raises(RuntimeError, match="dense: a number is NaN or infinite"):
            program(dense, values, lengths, rows)


LOG = """
version: 1
dataset:
  use: tables.table
  options:
    path: log.csv
    implicit: true
    columns: {user: [session, id], when: {as: time, unit: s}, item: id, price: number}
    histories: {clicked: {of: item, last: 2}}
converter: {use: recd.ikjt}
"""


def test_a_history_is_encoded_like_its_items(cwd: Path) -> None:
    Path("log.csv").write_text("user,when,item,price\nu,1,a,1.5\nu,2,b,2\nu,3,c,3\nu,4,d,4\n")
    Path("log.yaml").write_text(LOG)
    data: Any = load_registry(Path("log.yaml")).dataset
    data.prepare()
    found = data.to_score("").encodings()
    Path("signature.json").write_text(json.dumps({"features": found}))
    row = {"user": "u", "item": "d", "clicked": ["a", "b", "c"], "price": 4}
    inputs = Encoder("").encode([row])
    assert Encoder("").encode([{**row, "user": ""}]).values["user"] == []  # null in a CSV file
    (rows,) = data.scan("train")
    assert inputs.values == {name: rows.data[name][3].as_py() for name in data.schema().sparse}
    assert inputs.dense == [[4.0]]
    schema, kinds = data.schema(), data.kinds()
    Path("log.csv").unlink()
    absent: Any = load_registry(Path("log.yaml")).dataset
    absent.trained_schema, absent.trained_kinds = schema, kinds
    assert absent.to_score("").encodings() == found
