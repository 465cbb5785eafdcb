"""Files of how often features are read."""

import pytest

from recd_plugin_recd.layout.convert import read_popularity
from recd_plugins.runtime.errors import DataError

FEATURES = ["viewed", "bought", "item", "rated"]


def read(tmp_path, text):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    return read_popularity(path, FEATURES)


@pytest.mark.parametrize(
    "text",
    [
        "feature,count\nitem,3\n\nviewed,1\nbought,4\nviewed, 2\n",
        "item,3\nviewed,3\nbought,4\n",
        '{"item": 3, "viewed": 3, "bought": 4}',
        '{"item": 3, "viewed": 1, "bought": 4, "viewed": 2}',
    ],
)
def test_most_read_first_equals_in_the_order_of_the_table(tmp_path, text):
    assert read(tmp_path, text) == ("bought", "viewed", "item")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item,3\nvieved,1\n", r"jobs.csv:2: the table has no feature vieved; did you mean viewed"),
        ("item,3\nviewed\n", r"jobs.csv:2: 'viewed'; expected"),
        ("item,3\nviewed,many\n", r"jobs.csv:2: the count of viewed is 'many'"),
        ("item,3x\nviewed,3\n", r"jobs.csv:1: the count of item is '3x'"),
        ("item,-3\n", r"jobs.csv:1: the count of item is -3"),
        ('{"item": "3"}', r"jobs.csv: the count of item is '3'"),
        ('{"item": 3', r"jobs.csv: no JSON"),
        ("item,1e999\n", r"jobs.csv:1: the count of item is inf, expected 0 or more"),
        ("", r"jobs.csv: names no feature"),
        ("{}", r"jobs.csv: names no feature"),
        ('{"item": ' * 50_000, r"jobs.csv: no JSON"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)
