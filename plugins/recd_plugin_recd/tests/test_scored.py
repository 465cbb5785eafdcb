"""Tables that are scored: every row in stored order, with the features of another table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recd_plugin_recd.interactions import Interactions
from recd_plugin_recd.session_parquet import SessionParquet
from recd_plugins.api import DataError, Dataset, Split


def table(rows: int, **more: list[Any]) -> pa.Table:
    ids = pa.array([[row] for row in range(rows)], pa.list_(pa.int64()))
    session = pa.array([row // 2 for row in range(rows)])
    columns = {"session_id": session, "ts": pa.array(range(rows)), "a": ids, **more}
    return pa.table({**columns, "number": pa.array([0.5] * rows, pa.float32())})


def trained(folder: Path, **options: Any) -> SessionParquet:
    pq.write_table(table(8, label=[0, 1] * 4), folder / "train.parquet")
    options = {"path": folder / "train.parquet", **options}
    return SessionParquet(SessionParquet.Options.model_validate(options))


def rows_of(dataset: Dataset, split: Split = "train") -> list[dict[str, Any]]:
    return [row for rows in dataset.scan(split) for row in rows.data.to_pylist()]


@pytest.mark.parametrize("more", [{}, {"label": [None] * 7, "other": [[1]] * 7}])
def test_every_row_comes_in_stored_order(tmp_path: Path, more: dict[str, list[Any]]) -> None:
    dataset = trained(tmp_path, where=[["ts", "<", 3]], shuffle=True)
    (tmp_path / "new").mkdir()
    new = table(7, **more).select(["number", "a", "ts", "session_id", *more])
    pq.write_table(new.slice(0, 4), tmp_path / "new" / "a.parquet", row_group_size=3)
    pq.write_table(new.slice(4), tmp_path / "new" / "b.parquet")
    scored = dataset.to_score(str(tmp_path / "new"))
    scored.prepare()
    assert scored.schema() == dataset.schema()
    assert tuple(scored.keys()) == ("session_id", "ts")
    found = rows_of(scored)
    assert [row["ts"] for row in found] == list(range(7))
    assert [row["a"] for row in found] == [[row] for row in range(7)]
    assert {row["label"] for row in found} == {0}


@pytest.mark.parametrize(("column", "kind"), [("a", "ids"), ("number", "numbers")])
def test_a_feature_of_another_type_is_named(tmp_path: Path, column: str, kind: str) -> None:
    dataset = trained(tmp_path)
    new = table(2).drop_columns([column]).append_column(column, pa.array(["x", "y"]))
    pq.write_table(new, tmp_path / "new.parquet")
    said = f"'{column}' has the type string, but contains {kind} in"
    with pytest.raises(DataError, match=rf"new.parquet: column {said} .*train.parquet"):
        dataset.to_score(str(tmp_path / "new.parquet")).prepare()


HEAD = "user_id,item_id,rating,timestamp\n"


def log(folder: Path, lines: str) -> Interactions:
    (folder / "log.csv").write_text(HEAD + lines)
    return Interactions(Interactions.Options(path=folder / "log.csv", test_fraction=0.5))


def scored_log(dataset: Interactions, folder: Path, text: str) -> Dataset:
    (folder / "new.csv").write_text(text)
    return dataset.to_score(str(folder / "new.csv"))


def test_events_come_in_the_order_of_their_file(tmp_path: Path) -> None:
    dataset = log(tmp_path, "1,2,5,5\n2,3,1,6\n1,4,5,7\n")
    lines = "2,9,,30\n1,8,3,20\n2,7,5,10\n2,6,,40\n1,5,4,25\n"
    scored = scored_log(dataset, tmp_path, HEAD + lines)
    scored.prepare()
    found = rows_of(scored)
    assert [row["item_id"] for row in found] == [[9], [8], [7], [6], [5]]
    assert [row["history_seen"] for row in found] == [[7], [], [], [7], [8]]
    assert [row["history_liked"] for row in found] == [[7], [], [], [7], []]
    assert [row["history_disliked"] for row in found] == [[], [], [], [], [8]]


def test_a_log_to_score_says_outcomes(tmp_path: Path) -> None:
    dataset = log(tmp_path, "1,2,5,5\n2,3,1,6\n")
    without = "user_id,item_id,timestamp\n2,9,30\n"
    with pytest.raises(DataError, match=r"column 'rating'.* Add the column"):
        scored_log(dataset, tmp_path, without).prepare()
    with pytest.raises(DataError, match=r"new.csv: .*Row #3: .* invalid value 'good'"):
        scored_log(dataset, tmp_path, HEAD + "2,9,,30\n2,9,good,31\n").prepare()
    with pytest.raises(DataError, match=r"log.csv: column 'rating', row 0"):
        log(tmp_path, "1,2,,5\n").prepare()


@pytest.mark.parametrize("there", [True, False], ids=["log", "checkpoint"])
def test_ids_are_of_the_kind_that_is_trained_on(tmp_path: Path, there: bool) -> None:
    whole = log(tmp_path, "1,2,5,5\n2,3,1,6\n")
    texts = Interactions(whole.options.model_copy(update={"path": tmp_path / "texts.csv"}))
    (tmp_path / "texts.csv").write_text(HEAD + "u1,2,5,5\n2,x3,1,6\n")
    kinds = {"user_id": "text", "item_id": "text"}
    assert (whole.kinds(), texts.kinds()) == (dict.fromkeys(kinds, "numbers"), kinds)
    ids = [row["user_id"][0] for split in texts.splits() for row in rows_of(texts, split)]
    if not there:
        for dataset in (whole, texts):
            known = dataset.kinds()
            dataset.options.path.unlink()
            dataset.trained_kinds = known
            del dataset._events
    found = rows_of(scored_log(texts, tmp_path, HEAD + "2,7,5,10\n"))
    assert found[0]["user_id"][0] in ids
    said = r"new.csv: column 'user_id' contains text, but"
    with pytest.raises(DataError, match=said):
        scored_log(whole, tmp_path, HEAD + "2,7,5,10\nguest,7,5,10\n").prepare()
