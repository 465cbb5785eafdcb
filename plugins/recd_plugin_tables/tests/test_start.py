"""``recd init TABLE``: every column stands in the file, with what it is taken for and why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML
from tests import forked

from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guess import Wanted, guess
from recd_plugin_tables.start.registry_text import registry_text
from recd_plugin_tables.start.survey import survey
from recd_plugin_tables.tests.helpers import write
from recd_plugins import load_registry
from recd_plugins.api import sparse_column, wrapped_dataset
from recd_plugins.cli import main
from recd_plugins.config.document import read_yaml
from recd_plugins.model.build import build_model
from recd_plugins.runtime.errors import DataError

ROWS = 400


def impressions() -> dict[str, Any]:
    draw = np.random.default_rng(5)
    seconds = 1_700_000_000 + draw.integers(0, 10**6, ROWS)
    users = draw.integers(0, 30, ROWS)
    return {
        "impression_no": np.arange(ROWS) + 10_000,
        "userId": [f"u{user}" for user in users],
        "ad_id": draw.integers(0, 90, ROWS) * 7_919,
        "brand": np.array(["acme", "beta", None, "gamma"])[draw.integers(0, 4, ROWS)],
        "price": np.exp(draw.normal(4, 2, ROWS)),
        "age": draw.integers(18, 90, ROWS),
        "genres": [["Action|War", "War", "Drama|War|Action", "Drama"][i % 4] for i in range(ROWS)],
        "last_viewed": [list(range(i % 11 + 5)) for i in range(ROWS)],
        "embedding": [list(draw.normal(size=4)) for _ in range(ROWS)],
        "title": ["word " * 40 + str(i) for i in range(ROWS)],
        "site": ["a"] * ROWS,
        "nothing": pa.nulls(ROWS),
        "user": [{"vip": bool(i % 3), "height": i / 7} for i in range(ROWS)],
        "shown_at": pa.array(seconds * 1000, pa.timestamp("ms")),
        "day_text": [f"2024-05-{i % 28 + 1:02} 10:{i % 60:02}:00" for i in range(ROWS)],
        "day": [f"2024-05-{i % 28 + 1:02}" for i in range(ROWS)],
        "clicked": draw.integers(0, 2, ROWS),
    }


def roles(path: Path, **wanted: Any) -> dict[str, str]:
    guesses = guess(survey(open_source(path)), Wanted(**wanted))
    return {each.name: ", ".join(each.roles) for each in guesses.columns}


def test_columns_are_taken_for_what_they_are(tmp_path: Path) -> None:
    assert roles(write(tmp_path / "t.parquet", impressions())) == {
        "impression_no": "key",
        "userId": "session, id",
        "ad_id": "id",
        "brand": "id",
        "price": "number",
        "age": "number",
        "genres": "ids",
        "last_viewed": "ids",
        "embedding": "numbers",
        "title": "unused",
        "site": "unused",
        "nothing": "unused",
        "user.vip": "id",
        "user.height": "number",
        "shown_at": "time, id",
        "day_text": "id",
        "day": "id",
        "clicked": "label",
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("is_click", [0, 1] * 9),
        ("target", [True, False] * 9),
        ("rating", [1, 2, 3, 4, 5, 3] * 3),
        ("anything", [0, 1] * 9),
    ],
)
def test_the_label_is_found_by_name_or_by_its_two_values(
    tmp_path: Path, name: str, values: list[Any]
) -> None:
    columns = {"user_id": list(range(6)) * 3, name: values}
    assert roles(write(tmp_path / "t.parquet", columns))[name] == "label"


@pytest.mark.parametrize(
    ("value", "share"),
    [("unknown", 0.87), ("a99f214a", 0.87), ("", 0.03), ("00000000-0000-0000", 0.03), (0, 0.03)],
)
def test_an_id_with_a_dominant_value_is_no_session(
    tmp_path: Path, value: Any, share: float
) -> None:
    draw = np.random.default_rng(0)
    unknown = draw.random(5000) < share
    users = [type(value)(user * 7_919) for user in draw.integers(1, 500, 5000)]
    columns = {
        "device_id": [value if no else user for no, user in zip(unknown, users, strict=True)],
        "site": draw.integers(0, 50, 5000),
        "click": draw.integers(0, 2, 5000),
    }
    path = write(tmp_path / "t.parquet", columns)
    found = {each.name: each for each in guess(survey(open_source(path)), Wanted()).columns}
    assert found["device_id"].roles == ("id",)
    assert f"{str(value)!r} is in {unknown.mean():.0%} of the rows" in found["device_id"].why
    assert roles(path, session="device_id")["device_id"] == "session, id"
    few = draw.integers(0, 7, 5000)
    numbered = np.where(draw.random(5000) < 0.03, 0, draw.integers(1, 500, 5000))
    for ordinary in (few, numbered):
        path = write(tmp_path / "f.parquet", {**columns, "device_id": ordinary})
        assert roles(path)["device_id"] == "session, id"


FLAGS = 10
OUTCOMES = [
    "is_like", "is_follow", "isFavorite", "long_view", "like", "share", "converted",
    "label_finish", "booking_bool", "skip_2", "play_time_ms", "dwell_time", "rating_after",
    "watch_ratio", "profile_stay_time", "ms_played", "rating", "pay_amount", "revenue",
    "order_amount", "gross_bookings_usd", "conversion_time",
]  # fmt: skip
FEATURES = [
    "is_weekend", "is_mobile", "is_new_user", "is_video_author", "is_rand", "prev_click",
    "has_video", "is_subscriber", "read_only", "is_paid", "avg_rating", "user_like_count",
    "like_count", "video_duration", "price", "hist_watch_time", "watch_time_7d", "total_spent",
    "sale_price", "response_time", "item_watch_time", "click_count", "private_label",
    "label_color", "annual_revenue", "stars",
]  # fmt: skip


def test_outcomes_are_no_features(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    item, click = draw.integers(0, 60, 1500), draw.integers(0, 2, 1500)
    columns = {"user_id": draw.integers(0, 40, 1500), "video_id": item, "is_click": click}
    for names in (OUTCOMES, FEATURES):
        for position, name in enumerate(names):
            columns[name] = draw.integers(0, 2 if position < FLAGS else 9, 1500)
    columns["item_watch_time"] = item % 9  # the same in all rows of an item
    columns["hotel"] = hotel = draw.integers(0, 300, 1500)
    columns["stars"] = hotel % 5
    columns["private_label"], columns["label_color"] = draw.integers(0, 2, (2, 1500))
    columns["conversion_time"] = click * 1_700_000_000 + click * draw.integers(0, 9, 1500)
    path = write(tmp_path / "t.parquet", columns)
    found = {e.name: e for e in guess(survey(open_source(path)), Wanted(label="is_click")).columns}
    assert [name for name in OUTCOMES if not found[name].unused] == []
    assert [name for name in FEATURES if found[name].unused] == []
    kept = "an outcome, by its name; set `as: id` if it is known before the label"
    assert found["is_like"].why == kept
    assert "`as: number` if it is known" in found["play_time_ms"].why
    assert roles(path, label="is_like")["is_click"] == "unused"


@pytest.mark.parametrize("name", ["barcode", "merchant", "lifetime", "cell", "serial"])
def test_long_numbers_are_no_time_of_the_rows(tmp_path: Path, name: str) -> None:
    digits = np.random.default_rng(0).integers(1_300_000_000_000, 1_999_999_999_999, 500)
    columns = {name: digits, "store": digits % 7, "label": digits % 2}
    assert "time" not in roles(write(tmp_path / "t.parquet", columns))[name]


def test_a_rating_is_the_label_beside_a_name_that_ends_like_one(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {
        "user_id": draw.integers(0, 40, 500),
        "rating": draw.integers(1, 6, 500),
        "verified_purchase": draw.integers(0, 2, 500),
    }
    found = roles(write(tmp_path / "t.parquet", columns))
    assert (found["rating"], found["verified_purchase"]) == ("label", "id")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (lambda y, noise: y + noise, "its AUC alone is 1.000"),
        (lambda y, noise: np.where(y, 4, noise * 3 // 1), "its AUC alone is 1.000"),
        (lambda y, noise: y * (noise < 0.2), "missing or 0 in every row of label 0"),
        (lambda y, noise: y + 2 * noise, ""),
    ],
)
def test_a_feature_that_tells_the_label_is_told(tmp_path: Path, values: Any, why: str) -> None:
    draw = np.random.default_rng(0)
    click = draw.integers(0, 2, 1500)
    columns = {
        "site": draw.integers(0, 40, 1500),
        "x": values(click, draw.random(1500)),
        "click": click,
    }
    path = write(tmp_path / "t.parquet", columns)
    done = CliRunner().invoke(main, ["init", str(path), str(tmp_path / "my.yaml")])
    said = f"x may leak the label ({why}). Mark it unused if it is known only after the label."
    assert (said in done.output) is bool(why)
    written = (tmp_path / "my.yaml").read_text()
    assert (f"# May leak the label ({why})." in written) is bool(why)


@pytest.mark.parametrize("name", ["ts", "time_ms", "impression_time_us", "eventTime", "recv"])
@pytest.mark.parametrize("rows_a_time", [1, 3])
@pytest.mark.parametrize(
    ("start", "unit"),
    [(1.7e9, "s"), (1.7e12, "ms"), (1.7e15, "us"), (1.7e18, "ns"), (14102100, "YYMMDDHH")],
)
def test_numbers_are_times_by_their_values(
    tmp_path: Path, name: str, rows_a_time: int, start: float, unit: str
) -> None:
    times = int(start) + np.repeat(np.arange(24), rows_a_time)
    columns = {
        "item_id": times % 7 + int(start),
        name: times,
        "was_shown_at": times,
        "user_id": times % 5,
        "click": times % 2,
    }
    found = guess(survey(open_source(write(tmp_path / "t.parquet", columns))), Wanted(time=name))
    uses = {each.name: (each.roles, each.options) for each in found.columns}
    by = {"unit": unit, "by": "hour"}
    assert uses[name] == (("time", "id"), by)
    assert uses["was_shown_at"] == (("id",), by)
    assert uses["item_id"][0] == ("id",)
    assert roles(tmp_path / "t.parquet", unused=("was_shown_at",))[name] == "time, id"


def test_anonymous_categories_are_ids(tmp_path: Path) -> None:
    codes = 15_700 + np.arange(ROWS * 9) * 7 % 602
    columns = {"C14": codes, "I14": codes, "cat_3": codes, "click": codes % 2}
    found = roles(write(tmp_path / "t.parquet", columns))
    assert [found[name] for name in columns] == ["id", "number", "id", "label"]


def test_a_missing_number_becomes_the_median(tmp_path: Path) -> None:
    price = [None if row % 10 == 0 else 100.004 + row for row in range(101)]
    columns = {"price": price, "user": [1, 2, 3] * 33 + [1, 2], "click": [0, *[0, 1] * 50]}
    path = write(tmp_path / "t.parquet", columns)
    done = CliRunner().invoke(main, ["init", str(path), str(tmp_path / "my.yaml")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "my.yaml").read_text(encoding="utf-8")
    assert "10.9% missing: they become the median" in text
    assert "price: {as: number, missing: 149}" in text


@pytest.mark.parametrize("kind", [int, str])
def test_whole_numbers_in_a_text_are_what_they_are_elsewhere(tmp_path: Path, kind: type) -> None:
    films = [[(user + n) % 20 for n in range(user % 5 + 1)] for user in range(300)]
    columns = {
        "item": [kind(row[0]) for row in films],
        "history": ["|".join(map(str, row)) for row in films],
        "tags": ["|".join(f"t{each}" for each in row) for row in films],
        "click": [row[0] % 2 for row in films],
    }
    write(tmp_path / "t.parquet", columns)
    target = tmp_path / "my.yaml"
    done = CliRunner().invoke(main, ["init", str(tmp_path / "t.parquet"), str(target)])
    assert done.exit_code == 0, done.output
    uses = YAML(typ="safe").load(target)["dataset"]["options"]["columns"]
    option = "integers" if kind is int else "texts"
    assert uses["history"] == {"as": "ids", "separator": "|", option: True}
    assert uses["tags"] == {"as": "ids", "separator": "|", "texts": True}


@pytest.mark.parametrize(
    ("between", "separator"),
    [
        (", ", ","),
        (" ,", ","),
        (" | ", "|"),
        ("; ", ";"),
        ("||", "|"),
        (" :: ", "::"),
        ("^", "^"),
        ("\x01", "\x01"),
        ("\t", "\t"),
        (" / ", " / "),
        ("  ", " "),
    ],
)
def test_the_separator_of_ids_in_a_text_is_found(tmp_path, between, separator):
    films = [[(user + n) % 20 for n in range(user % 5 + 1)] for user in range(300)]
    columns = {
        "history": [between.join(map(str, row)) for row in films],
        "click": [row[0] % 2 for row in films],
    }
    write(tmp_path / "t.parquet", columns)
    target = tmp_path / "my.yaml"
    done = CliRunner().invoke(main, ["init", str(tmp_path / "t.parquet"), str(target)])
    assert done.exit_code == 0, done.output
    use = load_registry(target).dataset.options.columns["history"]
    assert (use.separator, use.integers) == (separator, True)
    assert survey(open_source(tmp_path / "t.parquet"))["history"].distinct == 20


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e300])
def test_rows_of_an_infinite_number_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.chdir(tmp_path)
    price = [value if row == 7 else 100.5 + row for row in range(101)]
    write(
        Path("t.parquet"), {"price": price, "user": [1, 2] * 50 + [1], "click": [0, *[0, 1] * 50]}
    )
    done = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml"])
    assert done.exit_code == 0, done.output
    text = Path("my.yaml").read_text(encoding="utf-8")
    assert "; 1 infinite" in text
    assert "missing" not in text
    dataset = load_registry("my.yaml").dataset
    dataset.prepare()
    rows = sum(len(rows) for split in dataset.splits() for rows in dataset.scan(split))
    assert rows == 100


@pytest.mark.parametrize(
    ("at", "role"),
    [("2026-10-01 10:00:00", "unused"), ("noon", "time")],
    ids=["another time", "the only time"],
)
def test_names_of_folders_are_no_feature(tmp_path: Path, at: str, role: str) -> None:
    for day in (1, 2):
        folder = tmp_path / "log" / f"day=2026-10-0{day}" / f"part={day}"
        folder.mkdir(parents=True)
        rows = "".join(f"{row % 7},{row % 2},{at}\n" for row in range(20))
        (folder / "a.csv").write_text(f"user,click,at\n{rows}", encoding="utf-8")
    found = guess(survey(open_source(tmp_path / "log")), Wanted())
    columns = {each.name: each for each in found.columns}
    assert columns["day"].roles == (role,)
    assert columns["part"].roles == ("unused",)
    for name in ("day", "part"):
        assert "from the names of folders; a file to score has none" in columns[name].why
    made = CliRunner().invoke(main, ["init", str(tmp_path / "log"), str(tmp_path / "my.yaml")])
    assert made.exit_code == 0, made.output
    assert load_registry(tmp_path / "my.yaml").dataset.schema().sparse[0] == "user"


@pytest.mark.parametrize("twice", [False, True])
def test_the_id_that_tells_rows_of_a_request_apart_is_a_key(tmp_path: Path, twice: bool) -> None:
    hotels = [f"h{row * 7 % 40}" for row in range(ROWS)]
    columns = {
        "search_id": [row // 5 for row in range(ROWS)],
        "user_id": [row // 10 % 20 for row in range(ROWS)],
        "hotel_id": ["h0"] * 2 + hotels[2:] if twice else hotels,
        "device": [row % 3 for row in range(ROWS)],
        "click": [row % 2 for row in range(ROWS)],
    }
    path = write(tmp_path / "t.parquet", columns)
    found = roles(path)
    assert found["hotel_id"] == ("id" if twice else "key, id")
    assert (found["search_id"], found["device"]) == ("request", "id")
    file = tmp_path / "my.yaml"
    assert CliRunner().invoke(main, ["init", str(path), str(file)]).exit_code == 0
    dataset = load_registry(file).dataset
    assert ("hotel_id" in dataset.keys().values()) is not twice
    assert "hotel_id" in dataset.schema().sparse
    assert ("with search_id it tells rows apart" in file.read_text(encoding="utf-8")) is not twice


def test_a_day_has_no_hour(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", impressions())
    found = {each.name: each for each in guess(survey(open_source(path)), Wanted()).columns}
    parts = {name: found[name].options.get("by") for name in ("shown_at", "day_text", "day")}
    assert parts == {"shown_at": "hour", "day_text": "hour", "day": "weekday"}
    assert found["day"].why == "a date; its day of the week"


def test_candidates_of_a_request_become_rows(tmp_path: Path) -> None:
    shown = [[{"news": j, "click": j == i % 3} for j in range(3 + i % 4)] for i in range(40)]
    nested = write(tmp_path / "a.parquet", {"user_id": [i % 7 for i in range(40)], "shown": shown})
    assert survey(open_source(nested)).explode == ("shown",)
    assert roles(nested) == {"user_id": "session, id", "shown.news": "id", "shown.click": "label"}

    beside = {
        "user_id": [i % 7 for i in range(40)],
        "history": [[1, 2, 3]] * 40,
        "news": [[each["news"] for each in row] for row in shown],
        "click": [[int(each["click"]) for each in row] for row in shown],
    }
    parallel = write(tmp_path / "b.parquet", beside)
    assert survey(open_source(parallel)).explode == ("news", "click")
    assert roles(parallel)["history"] == "ids"


def test_a_label_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"user_id": [1, 2] * 9, "item_id": list(range(18))})
    with pytest.raises(DataError, match=r"--label COLUMN, or say --implicit"):
        roles(path)
    assert roles(path, implicit=True) == {"user_id": "session, id", "item_id": "id"}
    two = write(tmp_path / "u.parquet", {"user_id": [1, 2] * 9, "a": [0, 1] * 9, "b": [1, 0] * 9})
    with pytest.raises(DataError, match=r"could be a, b"):
        roles(two)
    assert roles(two, label="b")["a"] == "id"
    one = write(tmp_path / "o.parquet", {"user_id": [1, 2] * 9, "click": [1] * 18})
    with pytest.raises(DataError, match=r"click is always 1;"):
        roles(one)
    missing = write(tmp_path / "m.parquet", {"user_id": [1, 2, 3] * 9, "y": [0.0, 1, np.nan] * 9})
    assert roles(missing)["y"] == "label"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label", "cliked"], "no column cliked, which --label names; did you mean clicked?"),
        (["--label", "embedding"], "column embedding is list<element: double>, no label"),
        (["--label", "clicked", "--implicit"], "--label and --implicit exclude each other"),
        (["--explode", "age"], "column age is int64, no list that could be exploded"),
        (["--format", "excel"], "--format"),
    ],
)
def test_a_mistake_is_told_and_writes_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    path = write(tmp_path / "t.parquet", impressions())
    file = tmp_path / "my.yaml"
    result = CliRunner().invoke(main, ["init", str(path), str(file), *arguments])
    assert result.exit_code != 0
    assert said in result.output
    assert isinstance(result.exception, SystemExit)
    assert not file.exists()


def test_the_file_names_every_column_and_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = impressions()
    write(Path("t.parquet"), {**columns, "yes": columns["age"], "a b: c": columns["price"]})
    result = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml"])
    assert result.exit_code == 0, result.output
    text = Path("my.yaml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100

    document = YAML(typ="safe").load(text)
    named = document["dataset"]["options"]["columns"]
    leaves = {"user.vip", "user.height", "yes", "a b: c", *columns} - {"user"}
    assert named.keys() == leaves
    registry = load_registry(Path("my.yaml"))
    registry.dataset.prepare()
    schema = registry.dataset.schema()
    tables = document["model"]["tables"]
    assert {f"t_{feature}" for feature in schema.sparse} == tables.keys()
    scaled = [each for each in document["preprocessing"] if each["use"] == "tables.standardise"]
    dense = {"price", "age", "user_height", "yes", "a_b__c", "embedding_*"}
    assert set(scaled[0]["features"]) == dense

    again = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml"])
    assert again.exit_code == 1
    assert "exists already" in again.output
    assert Path("my.yaml").read_text(encoding="utf-8") == text


def test_a_log_of_positives_gets_negatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("recd_plugin_ranking")
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(1)
    columns = {
        "user": [f"u{i % 9}" for i in range(ROWS)],
        "product": [f"p{number}" for number in draw.integers(0, 50, ROWS)],
        "colour": draw.integers(0, 4, ROWS),
    }
    write(Path("t.parquet"), columns)
    result = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml", "--implicit"])
    assert result.exit_code == 0, result.output
    assert "negatives are other values of product" in result.output

    assert "and recd rank my.yaml --user user" in result.output
    assert "user: [user]" in Path("my.yaml").read_text(encoding="utf-8")  # colour is of neither

    registry = load_registry(Path("my.yaml"))
    dataset = wrapped_dataset(registry)
    dataset.prepare()
    size = registry.training.batch_size
    reader = dataset.reader(rank=0, world_size=1, batch_size=size, split="train")
    rows = next(iter(reader))
    labels = rows.data.column("label").to_pylist()
    assert labels == [1, 0, 0, 0, 0] * (size // 5)
    ids, offsets = sparse_column(rows, "product")
    products = ids[offsets[:-1]].reshape(-1, 5)
    assert (products[:, 1:] != products[:, :1]).all()


@pytest.mark.parametrize(
    ("length", "same", "options", "converter"),
    [
        (0, True, [], "recd.kjt"),  # ids alone, however often they repeat
        (3, True, [], "recd.kjt"),
        (12, True, [], "recd.ikjt"),
        (12, False, [], "recd.kjt"),
        (12, False, ["--implicit"], "recd.ikjt"),  # a row and its negatives share the list
    ],
)
def test_equal_rows_are_stored_once_where_that_is_faster(
    tmp_path: Path, length: int, same: bool, options: list[str], converter: str
) -> None:
    draw = np.random.default_rng(3)
    of = draw.integers(0, 500, (ROWS, length))
    lists = of[SESSIONS if same else slice(None)].tolist()
    columns = {
        "user_id": SESSIONS,
        "item_id": draw.integers(0, 9, ROWS),
        **({"seen": lists} if length else {}),
        **({} if options else {"click": draw.integers(0, 2, ROWS)}),
    }
    path = write(tmp_path / "t.parquet", columns)
    result = CliRunner().invoke(main, ["init", str(path), str(tmp_path / "my.yaml"), *options])
    assert result.exit_code == 0, result.output
    written = YAML(typ="safe").load(tmp_path / "my.yaml")
    assert written["converter"]["use"] == converter


SESSIONS = np.repeat(np.arange(80), 5)
SECONDS = 1_700_000_000 + 10_000 * SESSIONS + 60 * (np.arange(ROWS) % 5)


@pytest.mark.parametrize(
    ("session", "columns", "history"),
    [
        ("session_id", {}, {"of": "item_id", "last": 20}),
        ("request_id", {"ts": SECONDS}, {"of": "item_id", "last": 20}),
        ("visit", {"ts": SECONDS, "user_id": SESSIONS % 9}, {"of": "item_id", "last": 20}),
        # A day is the same for all rows of a session: their order in the table tells.
        (
            "session_id",
            {"at": pa.array(SECONDS // 86_400, pa.int32()).cast(pa.date32())},
            {"of": "item_id", "last": 20, "ties": "stored"},
        ),
    ],
)
def test_clicks_of_sessions_without_users_are_ranked_by_what_came_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    session: str,
    columns: dict[str, Any],
    history: dict[str, Any],
) -> None:
    pytest.importorskip("recd_plugin_ranking")
    monkeypatch.chdir(tmp_path)
    items = np.random.default_rng(2).integers(0, 50, ROWS)
    write(Path("t.parquet"), {session: SESSIONS, "item_id": items, **columns})
    result = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml", "--implicit"])
    assert result.exit_code == 0, result.output
    assert "and recd rank my.yaml --seen history" in result.output
    registry = load_registry(Path("my.yaml"))
    options = YAML(typ="safe").load(Path("my.yaml"))["dataset"]["options"]
    assert options["histories"] == {"history": history}
    registry.dataset.prepare()
    model = build_model(registry, registry.dataset.schema())
    assert hasattr(model, "user_vectors")


def test_rows_without_an_item_are_left_out_of_a_log_of_positives(tmp_path: Path) -> None:
    items = [None if row % 10 == 0 else row % 37 for row in range(ROWS)]
    path = write(tmp_path / "t.parquet", {"session_id": SESSIONS, "item_id": items})
    file = tmp_path / "my.yaml"
    result = CliRunner().invoke(main, ["init", str(path), str(file), "--implicit"])
    assert result.exit_code == 0, result.output
    columns = YAML(typ="safe").load(file)["dataset"]["options"]["columns"]
    assert columns["item_id"] == {"as": "id", "missing": "drop"}


@pytest.mark.slow
def test_what_it_writes_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("t.parquet"), impressions())
    runner = CliRunner()
    assert runner.invoke(main, ["init", "t.parquet", "my.yaml"]).exit_code == 0
    command = [forked.RECD, "run", "my.yaml", "training.batch_size=64", "--json", "r.json"]
    done = forked.run(command, check=True)
    losses = json.loads(Path("r.json").read_text())["losses"]
    assert losses
    assert "predicted step" not in done.stdout + done.stderr
    rest = 360 - 64 * len(losses)
    assert f"{rest} of 360 training rows fill no batch on every rank" in done.stderr
    again = forked.run([*command, "--resume"], check=True)
    assert "training.epochs is 1: there is nothing to train" in again.stderr
    assert json.loads(Path("r.json").read_text())["losses"] == losses


def test_a_label_that_is_0_in_all_rows_looked_at_is_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("t.parquet"), {**impressions(), "clicked": np.zeros(ROWS, np.int64)})
    made = CliRunner().invoke(main, ["init", "t.parquet", "my.yaml", "--label", "clicked"])
    assert made.exit_code == 0, made.output
    assert "clicked: label" in Path("my.yaml").read_text(encoding="utf-8")


_HOSTILE = [
    *("\n", "\r", "\t", "\x01", "\x1b", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "\uffff"),
    *("\U0001f600", "\U000e0001", "é", "'", '"', "\\", ": ", " #", "- ", "{", "%", "&a", "!b"),
]


@pytest.mark.parametrize("name", [*_HOSTILE, "".join(_HOSTILE), "x\ncallbacks: [{use: a}]\n# "])
def test_any_name_is_itself_in_the_file(name: str, tmp_path: Path) -> None:
    columns = {f"a{name}b": [f"v{i % 7}" for i in range(60)], "click": [i % 2 for i in range(60)]}
    guesses = guess(survey(open_source(write(tmp_path / "t.parquet", columns))), Wanted())
    text = registry_text(
        guesses,
        location=f"{name}/t.parquet",
        file=Path(f"{name}.yaml"),
        source={"table": name},
        test=0.1,
    )
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    document = read_yaml(tmp_path / "my.yaml").data
    options = document["dataset"]["options"]
    assert list(options["columns"]) == list(columns)
    assert (options["path"], options["source"]) == (f"{name}/t.parquet", {"table": name})
    assert "callbacks" not in document
