"""``recd init TABLE``: every column stands in the file, with what it is taken for and why."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ruamel.yaml import YAML
from tests.commands import invoke, recd

from recd_plugin_tables.sources import open_source
from recd_plugin_tables.start.guess import Wanted, guess
from recd_plugin_tables.start.guesses import Guess
from recd_plugin_tables.start.registry_text import registry_text
from recd_plugin_tables.start.survey import survey
from recd_plugin_tables.tests.helpers import write
from recd_plugins import load_registry
from recd_plugins.api import RunConfig, arrow, prepared_data
from recd_plugins.config.document import read_yaml
from recd_plugins.model.build import build_model
from recd_plugins.runtime.errors import DataError, RegistryError

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


def guesses(path: Path, **wanted: Any) -> dict[str, Guess]:
    found = guess(survey(open_source(path)), Wanted(**wanted))
    return {each.name: each for each in found.columns}


def roles(path: Path, **wanted: Any) -> dict[str, str]:
    return {name: ", ".join(each.roles) for name, each in guesses(path, **wanted).items()}


class Made:
    def __init__(self, folder: Path, table: dict[str, Any] | Path, *arguments: str) -> None:
        self.path = table if isinstance(table, Path) else write(folder / "t.parquet", table)
        self.file = folder / "my.yaml"
        self.output = recd("init", self.path, self.file, *arguments)
        self.text = self.file.read_text(encoding="utf-8")
        self.document = YAML(typ="safe").load(self.text)
        self.options = self.document["dataset"]["options"]
        self.uses = self.options["columns"]

    def load(self) -> RunConfig:
        cache = f"dataset.options.cache={self.file.parent}/imports"
        registry = load_registry(self.file, settings=[cache])
        registry.dataset.prepare()
        return registry

    @property
    def shared(self) -> list[dict[str, Any]]:
        entries = self.document["preprocessing"]
        return [each for each in entries if each.get("options", {}).get("shared")]


@pytest.mark.parametrize(
    ("values", "option", "said"),
    [
        (["no", "yes"], {"positive": ["yes"]}, "'yes' becomes 1, 'no' becomes 0. To swap them,"),
        ([-1, 1], {"positive_from": 0.0}, "-1 becomes 0, 1 becomes 1."),
    ],
)
def test_labels_of_two_values(tmp_path: Path, values: Any, option: dict, said: str) -> None:
    table = {"tags": [[n % 7] for n in range(ROWS)], "bought": values * (ROWS // 2)}
    made = Made(tmp_path, table, "--label", "bought")
    assert made.uses["bought"] == {"as": "label", **option}
    assert f"Label 'bought': {said}" in made.output
    assert "No session column was found." in made.output


def test_a_misspelt_role_is_one_mistake(tmp_path: Path) -> None:
    made = Made(tmp_path, impressions())
    made.file.write_text(made.text.replace("last_viewed: ids", "last_viewed: idss"))
    with pytest.raises(RegistryError) as caught:
        load_registry(made.file)
    (problem,) = caught.value.problems
    assert str(problem).endswith("got 'idss'. Did you mean 'ids'?")


def test_columns_are_taken_for_what_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", impressions())
    by = {name: each.options.get("by") for name, each in guesses(path).items()}
    assert (by["shown_at"], by["day_text"], by["day"]) == ("hour", "hour", "weekday")
    assert roles(path) == {
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


DIGITS = np.random.default_rng(0).integers(1_300_000_000_000, 1_999_999_999_999, 500)
CODES = 15_700 + np.arange(3600) * 7 % 602
STARS = np.random.default_rng(0).integers(1, 6, 500)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"is_click": [0, 1] * 9}, {"is_click": "label"}),
        ({"target": [True, False] * 9}, {"target": "label"}),
        ({"rating": [1, 2, 3, 4, 5, 3] * 3}, {"rating": "label"}),
        ({"anything": [0, 1] * 9}, {"anything": "label"}),
        ({"y": [0.0, 1, np.nan] * 6}, {"y": "label"}),
        # A rating is the label beside a name that ends like one.
        (
            {"rating": STARS, "verified_purchase": STARS % 2},
            {"rating": "label", "verified_purchase": "id"},
        ),
        # Anonymous categories are ids.
        (
            {"C14": CODES, "I14": CODES, "cat_3": CODES, "click": CODES % 2},
            {"C14": "id", "I14": "number", "cat_3": "id"},
        ),
        ({"item": CODES, "click": CODES % 2}, {"item": "id"}),
        # Long numbers are no times of the rows.
        ({"barcode": DIGITS, "label": DIGITS % 2}, {"barcode": "key"}),
        ({"merchant": DIGITS, "label": DIGITS % 2}, {"merchant": "key"}),
        ({"lifetime": DIGITS, "label": DIGITS % 2}, {"lifetime": "id"}),
        # The last word of a quantity decides.
        ({"device_age_days": CODES, "click": CODES % 2}, {"device_age_days": "number"}),
        ({"item_price": CODES, "click": CODES % 2}, {"item_price": "number"}),
        ({"hours": CODES % 24, "click": CODES % 2}, {"hours": "number"}),
        ({"device_number": CODES, "click": CODES % 2}, {"device_number": "id"}),
    ],
)
def test_roles_by_name_and_value(
    tmp_path: Path, columns: dict[str, Any], expected: dict[str, str]
) -> None:
    rows = len(next(iter(columns.values())))
    path = write(tmp_path / "t.parquet", {"user_id": np.arange(rows) % 6, **columns})
    found = roles(path)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("value", "share"), [("a99f214a", 0.87), ("", 0.03), ("00000000-0000-0000", 0.03), (0, 0.03)]
)
def test_an_id_with_a_dominant_value_is_no_session(
    tmp_path: Path, value: Any, share: float
) -> None:
    draw = np.random.default_rng(0)
    unknown = draw.random(5000) < share
    users = [type(value)(user * 7_919) for user in draw.integers(1, 500, 5000)]
    ids = [value if no else user for no, user in zip(unknown, users, strict=True)]
    site, click = draw.integers(0, 50, 5000), draw.integers(0, 2, 5000)
    columns = {"device_id": ids, "site": site, "click": click}
    path = write(tmp_path / "t.parquet", columns)
    found = guesses(path)
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
    found = guesses(path, label="is_click")
    assert [name for name in OUTCOMES if not found[name].unused] == []
    assert [name for name in FEATURES if found[name].unused] == []
    kept = "named like an outcome; set `as: id` if it is known before the label"
    assert found["is_like"].why == kept
    assert "`as: number` if it is known" in found["play_time_ms"].why
    assert roles(path, label="is_like")["is_click"] == "unused"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (lambda y, noise: y + noise, "AUC 1.000 as the only feature"),
        (lambda y, noise: np.where(y, 4, noise * 3 // 1), "AUC 1.000 as the only feature"),
        (lambda y, noise: y * (noise < 0.2), "always missing or 0 if the label is 0"),
        (lambda y, noise: y + 2 * noise, ""),
    ],
)
def test_a_feature_that_tells_the_label_is_told(tmp_path: Path, values: Any, why: str) -> None:
    draw = np.random.default_rng(0)
    click = draw.integers(0, 2, 1500)
    site, x = draw.integers(0, 40, 1500), values(click, draw.random(1500))
    made = Made(tmp_path, {"site": site, "x": x, "click": click})
    assert (f"'x' may leak the label ({why})" in made.output) is bool(why)
    assert (f"# May leak the label ({why})." in made.text) is bool(why)


@pytest.mark.parametrize(
    ("name", "rows_a_time", "start", "unit"),
    [
        ("ts", 1, 1.7e9, "s"),
        ("impression_time_us", 3, 1.7e15, "us"),
        *(("recv", 3, 1.7 * 10 ** (9 + 3 * n), unit) for n, unit in enumerate(("s", "ms"))),
        ("recv", 1, 1.7e18, "ns"),
        ("recv", 3, 14102100, "YYMMDDHH"),
    ],
)
def test_numbers_are_times_by_their_values(
    tmp_path: Path, name: str, rows_a_time: int, start: float, unit: str
) -> None:
    times = int(start) + np.repeat(np.arange(24), rows_a_time)
    columns = {"item_id": times % 7 + int(start), name: times, "was_shown_at": times}
    columns |= {"user_id": times % 5, "click": times % 2}
    found = guesses(write(tmp_path / "t.parquet", columns), time=name)
    uses = {each: (guess.roles, guess.options) for each, guess in found.items()}
    by = {"unit": unit, "by": "hour"}
    assert uses[name] == (("time", "id"), by)
    assert uses["was_shown_at"] == (("id",), by)
    assert uses["item_id"][0] == ("id",)
    assert roles(tmp_path / "t.parquet", unused=("was_shown_at",))[name] == "time, id"


def test_dates_are_times_unless_each_user_or_item_has_one(tmp_path: Path) -> None:
    rows = np.arange(ROWS)
    days, births = 19_000 + rows // 9, rows % 30 * 400
    for kind in (pa.date32(), pa.string()):
        of = [pa.array(each.astype(np.int32), pa.date32()).cast(kind) for each in (births, days)]
        columns = {"born": of[0], "day": of[1], "user_id": rows % 30, "click": rows % 2}
        path = write(tmp_path / "t.parquet", columns)
        found = guesses(path)
        assert (found["day"].roles, found["born"].roles) == (("time", "id"), ("id",))
        assert found["day"].options == {"by": "weekday"}
        columns["shown"] = pa.array(rows * 1_000_000, pa.timestamp("us"))
        assert roles(write(path, columns))["shown"] == "time, id"


def lines(path: Path, *columns: Any, header: str = "") -> Path:
    rows = "".join("\t".join(map(str, row)) + "\n" for row in zip(*columns, strict=True))
    path.write_text(header + rows, encoding="utf-8")
    return path


def test_a_first_line_of_values_is_no_header(tmp_path: Path) -> None:
    path, numbers = tmp_path / "t.tsv", np.arange(ROWS)
    words = [f"w{number % 7}" for number in numbers]
    refused = r"t.tsv: the first line contains '.*--header f1,f2,f3"
    for columns in (
        (numbers % 2, words, [f"x{number}" for number in numbers], words),
        (numbers % 2, words, numbers * 7 % 11, numbers / 8),
        (["yes", "no"] * (ROWS // 2), words, [f"x{number}" for number in numbers]),
    ):
        with pytest.raises(DataError, match=refused):
            survey(open_source(lines(path, *columns)))
    usual = words, numbers % 2, numbers % 3, numbers % 5
    for header in ("user\t0\t1\t3\n", "w1\tclick\t7\tlevel\n", "user\tclick\tage\tlevel\n"):
        assert survey(open_source(lines(path, *usual, header=header))).rows == ROWS
    once = path.read_text(encoding="utf-8")
    path.write_text(once + once, encoding="utf-8")  # files joined with their headers
    assert survey(open_source(path)).rows == 2 * ROWS + 1


def test_ids_in_a_text_are_whole_numbers_or_texts(tmp_path: Path) -> None:
    films = [[(user + n) % 20 for n in range(user % 5 + 1)] for user in range(300)]
    columns = {
        "history": ["|".join(map(str, row)) for row in films],
        "tags": ["|".join(f"t{each}" for each in row) for row in films],
        "click": [row[0] % 2 for row in films],
    }
    uses = Made(tmp_path, columns).uses
    assert uses["history"] == {"as": "ids", "separator": "|", "integers": True}
    assert uses["tags"] == {"as": "ids", "separator": "|", "texts": True}


SEPARATORS = {
    ", ": ",", " ,": ",", " | ": "|", "; ": ";", "||": "|", " :: ": "::", "^": "^",
    "\x01": "\x01", "\t": "\t", " / ": " / ", "  ": " ",
}  # fmt: skip


def test_the_separator_of_ids_in_a_text_is_found(tmp_path: Path) -> None:
    films = [[(user + n) % 20 for n in range(user % 5 + 1)] for user in range(300)]
    columns = {
        f"c{number}": [between.join(map(str, row)) for row in films]
        for number, between in enumerate(SEPARATORS)
    }
    made = Made(tmp_path, {**columns, "click": [row[0] % 2 for row in films]})
    uses = load_registry(made.file).dataset.options.columns
    found = [(uses[name].separator, uses[name].integers) for name in columns]
    assert found == [(separator, True) for separator in SEPARATORS.values()]
    assert {survey(open_source(made.path))[name].distinct for name in columns} == {20}


def test_rows_of_an_infinite_number_are_left_out_and_missing_ones_are_the_median(
    tmp_path: Path,
) -> None:
    price = [None if row % 10 == 0 else 100.004 + row for row in range(101)]
    columns = {"price": price, "user": [1, 2] * 50 + [1], "click": [0, *[0, 1] * 50]}
    columns["cost"] = [math.inf if row == 7 else 100.5 + row for row in range(101)]
    made = Made(tmp_path, columns)
    assert "; 1 infinite" in made.text
    assert made.uses["price"] == {"as": "number", "missing": 149}
    dataset = made.load().dataset
    assert sum(len(rows) for split in dataset.splits() for rows in dataset.scan(split)) == 100


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

    rated = [[{**each, "click": each["news"] % 3} for each in row] for row in shown]
    path = write(tmp_path / "c.parquet", {"user_id": [i % 7 for i in range(40)], "shown": rated})
    recd("init", path, tmp_path / "c.yaml", "--label", "shown.click")
    assert load_registry(tmp_path / "c.yaml").dataset.options.explode == ("shown",)


def test_a_label_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"user_id": [1, 2] * 9, "item_id": list(range(18))})
    with pytest.raises(DataError, match=r"--label COLUMN, or --implicit"):
        roles(path)
    assert roles(path, implicit=True) == {"user_id": "session, id", "item_id": "id"}
    two = write(tmp_path / "u.parquet", {"user_id": [1, 2] * 9, "a": [0, 1] * 9, "b": [1, 0] * 9})
    with pytest.raises(DataError, match=r"Candidates: 'a', 'b"):
        roles(two)
    assert roles(two, label="b")["a"] == "id"
    one = write(tmp_path / "o.parquet", {"user_id": [1, 2] * 9, "click": [1] * 18})
    with pytest.raises(DataError, match=r"'click' is always 1"):
        roles(one)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label", "cliked"], "--label: the table has no column 'cliked'. Did you mean 'clicked"),
        (["--label", "embedding"], "has type list<element: double>, which role 'label'"),
        (["--label", "clicked", "--implicit"], "--label and --implicit cannot be combined"),
        (["--explode", "age"], "column 'age' in option 'explode' is int64, not a list"),
        (["--format", "excel"], "--format"),
        (["--as", "age=float"], "--as 'age=float' is not COLUMN=ROLE. Use one of these roles: id"),
        (["--as", "agee=id"], "--as: the table has no column 'agee'. Did you mean 'age'?"),
        (["--as", "price=id"], "column 'price' has fractions. Ids must be 64-bit integers or text"),
        (["--as", "embedding=id"], "--as: column 'embedding' has type list<element: double>"),
    ],
)
def test_a_mistake_is_told_and_writes_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    path = write(tmp_path / "t.parquet", impressions())
    file = tmp_path / "my.yaml"
    result = invoke("init", path, file, *arguments)
    assert result.exit_code != 0
    assert said in result.output
    assert not file.exists()


def test_the_file_names_every_column_and_is_valid(tmp_path: Path) -> None:
    columns = impressions()
    made = Made(tmp_path, {**columns, "yes": columns["age"], "a b: c": columns["price"]})
    assert max(len(line) for line in made.text.splitlines() if "/" not in line) <= 100
    leaves = {"user.vip", "user.height", "yes", "a b: c", *columns} - {"user"}
    assert made.uses.keys() == leaves
    schema = made.load().dataset.schema()
    assert {f"t_{feature}" for feature in schema.sparse} == made.document["model"]["tables"].keys()
    entries = made.document["preprocessing"]
    scaled = [each for each in entries if each["use"] == "tables.standardise"]
    dense = {"price", "age", "user_height", "yes", "a_b__c", "embedding_*"}
    assert set(scaled[0]["features"]) == dense

    again = invoke("init", made.path, made.file)
    assert again.exit_code == 1
    assert "already exists" in again.output
    assert made.file.read_text(encoding="utf-8") == made.text


def test_a_role_that_as_sets_changes_all_sections(tmp_path: Path) -> None:
    ages = np.where(np.arange(3600) % 12, CODES, np.nan)
    path = write(tmp_path / "t.parquet", {"code": ages, "size": CODES, "click": CODES % 2})
    file = tmp_path / "my.yaml"
    for options in ([], ["--as", "code=number", "--as", "size=key,id", "--force"]):
        recd("init", path, file, *options)
        made = YAML(typ="safe").load(file.read_text())
        found, columns = load_registry(file), made["dataset"]["options"]["columns"]
        sparse, number = ("size", "code") if options else ("code", "size")
        assert found.dataset.schema().sparse == (sparse,)
        assert list(made["model"]["tables"]) == [f"t_{sparse}"]
        small = f"model.tables.t_{sparse}={{num_embeddings: 2}}"
        wrong = "training.batch_sze=1"
        settings = ([], [small], [small, wrong])
        told = [invoke("validate", file, *each) for each in settings]
        assert [each.exit_code for each in told] == [0, 1, 1]
        assert f"{wrong}: unknown key" in told[2].output
        assert "but the table has 2 rows" in told[2].output
        assert f"ids of feature '{sparse}', but the table has 2 rows" in told[1].output
        assert made["preprocessing"][0]["features"] == [sparse]
        assert all(each["features"] == [number] for each in made["preprocessing"][1:])
    assert columns["size"] == ["key", "id"]
    assert made["training"]["validation"] == {"patience": 1}
    assert columns["code"] == {"as": "number", "missing": float(np.round(np.nanmedian(ages), -2))}


def test_a_column_changed_by_hand_is_told_at_once(tmp_path: Path) -> None:
    ages = np.where(np.arange(3600) % 12, CODES, np.nan)
    made = Made(tmp_path, {"code": ages, "size": CODES, "click": CODES % 2})
    assert "      code: id" in made.text
    made.file.write_text(made.text.replace("      code: id", "      code: number"))
    done = invoke("run", made.file, f"dataset.options.cache={tmp_path}/imports")
    assert done.exit_code == 1
    for told in (
        "column 'code': the value is nan. The number is missing.",
        "preprocessing[0].features: 'tables.vocabulary' supports sparse features",
        "model.tables.t_code: the feature is a number",
    ):
        assert told in done.output


def test_a_log_of_positives_gets_negatives(tmp_path: Path) -> None:
    pytest.importorskip("recd_plugin_ranking")
    draw = np.random.default_rng(1)
    users, products = [f"u{i % 9}" for i in range(ROWS)], draw.integers(0, 50, ROWS)
    columns = {"user": users, "product": [f"p{number}" for number in products]}
    made = Made(tmp_path, columns | {"colour": draw.integers(0, 4, ROWS)}, "--implicit")
    assert "Negatives use other values of 'product'" in made.output
    assert f"run: recd rank {made.file} --user user" in made.output
    assert "user: [user]" in made.text  # colour is of neither
    registry = made.load()
    dataset = prepared_data.wrapped_dataset(registry)
    dataset.prepare()
    size = registry.training.batch_size
    reader = dataset.reader(rank=0, world_size=1, batch_size=size, split="train")
    rows = next(iter(reader))
    labels = rows.data.column("label").to_pylist()
    assert labels == [1, 0, 0, 0, 0] * (size // 5)
    ids, offsets = arrow.sparse_column(rows, "product")
    products = ids[offsets[:-1]].reshape(-1, 5)
    assert (products[:, 1:] != products[:, :1]).all()


@pytest.mark.parametrize(
    ("length", "same", "options", "converter"),
    [
        (0, True, [], "recd.kjt"),  # ids alone, however often they repeat
        (3, True, [], "recd.kjt"),
        (12, False, [], "recd.kjt"),
        (12, True, [], "recd.ikjt"),
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
    made = Made(tmp_path, columns, *options)
    assert made.document["converter"]["use"] == converter
    assert ("rows of a session repeat lists" in made.text) == (converter == "recd.ikjt")
    assert ("averaged. " in made.text) == (converter == "recd.kjt" and length > 8)


SESSIONS = np.repeat(np.arange(80), 5)
SECONDS = 1_700_000_000 + 10_000 * SESSIONS + 60 * (np.arange(ROWS) % 5)
DAYS = pa.array(SECONDS // 86_400, pa.int32()).cast(pa.date32())


@pytest.mark.parametrize(
    ("session", "columns", "history"),
    [
        ("visit", {"ts": SECONDS, "user_id": SESSIONS % 9}, {"of": "item_id", "last": 20}),
        # A day is the same for all rows of a session: their order in the table tells.
        ("session_id", {"at": DAYS}, {"of": "item_id", "last": 20, "ties": "stored"}),
    ],
)
def test_clicks_of_sessions_without_users_are_ranked_by_what_came_before(
    tmp_path: Path, session: str, columns: dict[str, Any], history: dict[str, Any]
) -> None:
    pytest.importorskip("recd_plugin_ranking")
    items = np.random.default_rng(2).integers(0, 50, ROWS)
    made = Made(tmp_path, {session: SESSIONS, "item_id": items, **columns}, "--implicit")
    assert f"run: recd rank {made.file} --seen history" in made.output
    assert made.options["histories"] == {"history": history}
    registry = made.load()
    assert hasattr(build_model(registry, registry.dataset.schema()), "user_vectors")


def test_rows_without_an_item_are_left_out_of_a_log_of_positives(tmp_path: Path) -> None:
    items = [None if row % 10 == 0 else row % 37 for row in range(ROWS)]
    made = Made(tmp_path, {"session_id": SESSIONS, "item_id": items}, "--implicit")
    assert made.uses["item_id"] == {"as": "id", "missing": "drop"}


def test_a_label_that_is_0_in_all_rows_looked_at_is_a_label(tmp_path: Path) -> None:
    made = Made(tmp_path, {**impressions(), "clicked": np.zeros(ROWS, int)}, "--label", "clicked")
    assert made.uses["clicked"] == "label"


_HOSTILE = [
    *("\n", "\r", "\t", "\x01", "\x1b", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "\uffff"),
    *("\U0001f600", "\U000e0001", "é", "'", '"', "\\", ": ", " #", "- ", "{", "%", "&a", "!b"),
]


@pytest.mark.parametrize("name", ["".join(_HOSTILE), *"%!-", "x\ncallbacks: [{use: a}]\n# "])
def test_any_name_is_itself_in_the_file(name: str, tmp_path: Path) -> None:
    columns = {f"a{name}b": [f"v{i % 7}" for i in range(60)], "click": [i % 2 for i in range(60)]}
    guesses = guess(survey(open_source(write(tmp_path / "t.parquet", columns))), Wanted())
    file, source = Path(f"{name}.yaml"), {"table": name}
    text = registry_text(guesses, location=f"{name}/t.parquet", file=file, source=source, test=0.1)
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    document = read_yaml(tmp_path / "my.yaml").data
    options = document["dataset"]["options"]
    assert list(options["columns"]) == list(columns)
    assert (options["path"], options["source"]) == (f"{name}/t.parquet", {"table": name})
    assert "callbacks" not in document


def test_lists_of_the_ids_of_another_column_are_numbered_as_it(tmp_path: Path) -> None:
    hotels = [f"h{row * 7 % 40}" for row in range(ROWS)]
    before = [[hotels[row - 1], hotels[row - 9], f"x{row % 3}"] for row in range(ROWS)]
    columns = {
        "hotel": hotels,
        "before": ["|".join(each) for each in before],
        "tags": [["a", "b", f"c{row % 3}"] for row in range(ROWS)],
        "user": [row % 9 for row in range(ROWS)],
        "click": [row % 2 for row in range(ROWS)],
    }
    made = Made(tmp_path, columns)
    assert [each["features"] for each in made.shared] == [["hotel", "before"]]
    # 43 ids, a quarter more, and 8.
    tables = made.document["model"]["tables"]
    for table in ("t_hotel", "t_before"):
        assert tables[table]["num_embeddings"] == made.shared[0]["options"]["rows"] == 62


FEW = 60


def rows(**columns: Any) -> dict[str, Any]:
    return {"user": [row % 7 for row in range(FEW)], "click": [row % 2 for row in range(FEW)]} | {
        name: of if isinstance(of, pa.Array) else [of(row) for row in range(FEW)]
        for name, of in columns.items()
    }


def kinds() -> dict[str, pa.Array]:
    """Columns of one type each, of ``FEW`` rows with nulls."""
    whole = [None if row % 9 == 4 else row % 13 for row in range(FEW)]
    texts = [None if each is None else f"t{each}" for each in whole]
    lists = [None if each is None else [each, None, each + 1][: each % 4] for each in whole]
    encoded = [None if text is None else text.encode().ljust(16) for text in texts]
    values: dict[Any, tuple[pa.DataType, ...]] = {
        "whole": (
            *(pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.date32()),
            *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", "America/New_York")),
            *(pa.duration("s"), pa.duration("ns")),
        ),
        "exact": (pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal256(76, 30)),
        "texts": (pa.string(), pa.large_string(), pa.string_view()),
        "encoded": (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(16)),
        "lists": tuple(
            make(pa.int64()) for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)
        ),
    }
    exact = [None if each is None else Decimal(each) for each in whole]
    of = {"whole": whole, "exact": exact, "texts": texts, "encoded": encoded, "lists": lists}
    found = {str(kind): pa.array(of[n], kind) for n, types in values.items() for kind in types}
    fixed = pa.array(encoded, pa.binary(16))
    found["uuid"] = pa.ExtensionArray.from_storage(pa.uuid(), fixed)
    tensors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4.0 * FEW) + 0.5), 4)
    kind = pa.fixed_shape_tensor(pa.float64(), (2, 2))
    found["tensor"] = pa.ExtensionArray.from_storage(kind, tensors)
    found["runs"] = pa.RunEndEncodedArray.from_arrays([20, 40, FEW], ["a", None, "b"])
    found["map"] = pa.array([[("a", row)] for row in range(FEW)], pa.map_(pa.string(), pa.int64()))
    found["struct"] = pa.array([{"a": each} for each in texts])
    found["months"] = pa.array([(1, row, 0) for row in range(FEW)], pa.month_day_nano_interval())
    for name in ("string", "string_view", "int8"):
        indices = pa.array([None if row % 9 == 4 else row % 8 for row in range(FEW)], pa.uint8())
        categories = pa.DictionaryArray.from_arrays(indices, found[name].slice(5, 8))
        found[f"categories of {name}"] = categories
    types = pa.array([row % 2 for row in range(FEW)], pa.int8())
    found["union"] = pa.UnionArray.from_sparse(types, [pa.array(range(FEW)), pa.array(range(FEW))])
    found["null"] = pa.nulls(FEW)
    return found


def test_a_table_of_all_types_is_imported(tmp_path: Path) -> None:
    columns = kinds()
    names = {f"c{number}": name for number, name in enumerate(columns)}
    table = pa.table(rows(**{each: columns[name] for each, name in names.items()}))
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=23)
    made = Made(tmp_path, tmp_path / "t.arrow")
    made.load()
    unused = {names[each] for each, use in made.uses.items() if use == "unused"}
    assert unused == {"map", "months", "union", "null"}


@pytest.mark.parametrize("rows", [2_000, 21_000])
def test_numbered_ids_and_lists_as_text_are_ids(tmp_path: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    jobs, sparse = draw.integers(100_000, 102_000, rows), draw.integers(0, 800, rows) * 977
    lists = [[100_000 + int(each) for each in draw.integers(0, 2_000, n % 4)] for n in range(rows)]
    columns = {
        "job": jobs,
        "place": sparse,
        "meters": draw.integers(5, 300, rows) ** 2,
        "seen": [str(each) for each in lists],
        "places": [str([int(sparse[n]), int(sparse[n // 2])]) for n in range(rows)],
        "words": ['["a", "b"]' if n % 2 else "['b']" for n in range(rows)],
        "vector": ["[0.5, 1]"] * rows,
        "click": draw.integers(0, 2, rows),
    }
    path = write(tmp_path / "t.parquet", columns)
    found = guesses(path)
    roles = {name: each.roles[0] for name, each in found.items()}
    ids = dict.fromkeys(["seen", "places", "words"], "ids") | {"job": "id", "place": "id"}
    assert roles == ids | {"meters": "number", "vector": "unused", "click": "label"}
    integers = {"separator": ",", "integers": True}
    assert found["seen"].options == found["places"].options == integers
    assert guesses(path, roles={"seen": ("ids",)})["seen"].options == integers
    text = Made(tmp_path, path).text
    assert "features: [job, seen]" in text
    assert "features: [place, places]" in text
    assert 'words: {as: ids, separator: ",", texts: true}' in text
