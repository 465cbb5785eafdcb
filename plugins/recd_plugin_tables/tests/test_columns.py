"""Uses of columns: each column has one, and what cannot be is told before anything is read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from recd_plugin_tables.kinds import ColumnOptions
from recd_plugin_tables.plan import plan_columns
from recd_plugins.runtime.errors import DataError

SCHEMA = pa.schema(
    [
        ("user", pa.struct([("id", pa.string()), ("age", pa.int32())])),
        ("item", pa.int64()),
        ("history", pa.list_(pa.struct([("item", pa.int64()), ("at", pa.timestamp("s"))]))),
        ("tags", pa.list_(pa.string())),
        ("vector", pa.list_(pa.float32(), 4)),
        ("at", pa.timestamp("s")),
        ("note", pa.null()),
        ("deep", pa.list_(pa.list_(pa.int64()))),
        ("rating", pa.string()),
        ("opens", pa.time64("us")),
        ("lasts", pa.month_day_nano_interval()),
    ]
)
USES = {
    "user.id": ["session", "id"],
    "user.age": "number",
    "item": "id",
    "history.item": "ids",
    "history.at": "unused",
    "tags": "ids",
    "vector": "numbers",
    "at": "time",
    "note": "unused",
    "deep": "unused",
    "rating": {"as": "label", "positive": ["good"]},
    "opens": "unused",
    "lasts": "unused",
}


def plan(uses: dict, schema: pa.Schema = SCHEMA, **options: Any):
    columns = {name: ColumnOptions.model_validate(use) for name, use in uses.items()}
    return plan_columns("t.parquet", schema, columns, **options)


def test_every_leaf_has_its_use():
    found = plan(USES)
    names = ["user_id", "user_age", "item", "history_item", "tags", "vector"]
    assert [use.name for use in found.features] == names
    assert [use.key for use in found.keys] == ["user_id_key", "at"]
    assert found.columns == ["at", "history", "item", "rating", "tags", "user", "vector"]


def without(name: str, **others: object) -> dict:
    return {**{key: use for key, use in USES.items() if key != name}, **others}


WRONG = [
    (without("item", items="id"), "no column 'items'. Did you mean 'item"),
    (without("tags"), r"no entry for 'tags'. .*`tags: unused`, or set others: unused"),
    ({**without("user.id"), "user": "id"}, "'user' is a struct. Use its fields as columns: 'user."),
    ({**USES, "rating": "unused"}, "no column has the role 'label'"),
    ({**USES, "rating": "label"}, "a text label must be mapped"),
    ({**USES, "deep": "ids"}, "does not support role 'ids'"),
    ({**USES, "at": "id"}, "a timestamp cannot have role 'id' without option 'by'"),
    ({**USES, "item": {"as": "id", "name": "tags"}}, "item' and 'tags' would both be imported as"),
    ({**USES, "user.id": "ids"}, "role 'ids' on text needs a separator"),
]


@pytest.mark.parametrize(("uses", "message"), WRONG)
def test_a_use_that_cannot_be_is_told(uses, message):
    with pytest.raises(DataError, match=rf"t\.parquet: .*{message}"):
        plan(uses)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(DataError) as caught:
        plan({**without("item", itm="id"), "deep": "ids"}, explode=["tag"])
    assert len(str(caught.value).splitlines()) == 3


def test_a_misspelt_column_is_one_mistake():
    with pytest.raises(DataError) as caught:
        plan(without("item", itm="id"))
    assert str(caught.value) == "t.parquet: the table has no column 'itm'. Did you mean 'item'?"


def test_others_may_be_unused_and_a_label_is_not_needed_to_score():
    found = plan({"item": "id"}, others="unused", implicit=True)
    assert [use.name for use in found.features] == ["item"]
    assert plan({"item": "id", "clicked": "label"}, others="unused", labelled=False).label is None
    assert not plan({"item": "id", "who": "session"}, others="unused", labelled=False).keys
    with pytest.raises(DataError, match="no column 'price'"):
        plan({"item": "id", "price": "number"}, others="unused", labelled=False)
    with pytest.raises(DataError, match=r"implicit: true makes every row .* 'rating' is the label"):
        plan(USES, implicit=True)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ({"as": "id", "separator": "|"}, "separator' needs a column with role 'ids"),
        ({"as": "number", "missing": "empty"}, "missing: 'empty' is not valid for role 'number"),
        ({"as": "time", "unit": "s", "missing": 17}, "missing: 17 is a number, which cannot"),
        (
            {"as": ["id", "number"], "width": 2, "positive": [1], "texts": True},
            "'id' and 'number' cannot be.*width' needs .* 'numbers.*positive' needs .* 'label",
        ),
        ({"as": "id", "typo": 1}, "Extra inputs are not permitted"),
    ],
)
def test_options_that_do_not_fit_together(use, message):
    with pytest.raises(ValidationError, match=message):
        ColumnOptions.model_validate(use)
