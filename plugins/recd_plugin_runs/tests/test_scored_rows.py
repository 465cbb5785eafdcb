"""What a plugin of a dataset hands out wrong to be scored is told by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from recd_plugin_runs.predict import keys_of, scanned
from recd_plugins.api import Dataset, FeatureSchema, PluginError, Reader, Rows, Split


class Clicks(Dataset):
    """Two rows of one column, and keys as they are given."""

    name = "acme.clicks"

    def __init__(self, keys: Mapping[str, str], *, fails: bool = False) -> None:
        super().__init__(self.Options())
        self._keys, self._fails = keys, fails

    def prepare(self) -> None: ...

    def schema(self) -> FeatureSchema:
        return FeatureSchema((), ("a",), "label")

    def reader(self, *, rank: int, world_size: int, batch_size: int, split: Split) -> Reader:
        pytest.fail("rows that are scored come by scan alone")

    def keys(self) -> Mapping[str, str]:
        return self._keys

    def scan(self, split: Split = "train") -> Iterator[Rows]:
        yield Rows(pa.RecordBatch.from_pydict({"a": [1.0, 2.0]}), ())
        if self._fails:
            raise ValueError("no more")


class Bare(Clicks):
    def scan(self, split: Split = "train") -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"a": [1.0, 2.0]})


@pytest.mark.parametrize("keys", [{"a": "score"}, {"a": "user", "b": "user"}])
def test_keys_of_one_name_are_refused(keys: dict[str, str]) -> None:
    with pytest.raises(PluginError, match=r"acme\.clicks: keys\(\) names a column '(score|user)'"):
        keys_of(Clicks(keys))


def test_a_scan_without_a_key_and_one_that_fails_are_told() -> None:
    assert len(list(scanned(Clicks({"a": "a"}), {"a": "a"}))) == 1
    with pytest.raises(PluginError, match=r"acme\.clicks: scan yields no column user, which keys"):
        list(scanned(Clicks({}), {"user": "user"}))
    with pytest.raises(PluginError, match=r"acme\.clicks: scan yields .*, no Rows"):
        list(scanned(Bare({}), {}))
    with pytest.raises(ValueError, match="no more"):
        list(scanned(Clicks({}, fails=True), {}))
