"""What a converter says of its deduplication, which planning reckons with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recd_plugins import load_registry
from recd_plugins.data.row_pipeline import fit_converter
from recd_plugins.errors import PluginError

FILE = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9, item: 9}}}
converter: {use: recd.kjt}
training: {batch_size: 4}
"""


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        (None, "recd.kjt: dedupe_factors returned None; expected a mapping"),
        ({"usr": 2.0}, "names 'usr', which is no sparse feature; did you mean user?"),
        ({"user": float("nan")}, "of feature user is nan; expected ids for one that is stored"),
        ({"user": 0}, "of feature user is 0; expected"),
        ({"user": "2"}, "of feature user is '2'; expected"),
    ],
)
def test_what_is_no_factor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factors: Any, said: str
) -> None:
    (tmp_path / "r.yaml").write_text(FILE)
    registry = load_registry(tmp_path / "r.yaml")
    monkeypatch.setattr(type(registry.converter), "dedupe_factors", lambda _: factors)
    with pytest.raises(PluginError) as caught:
        fit_converter(registry)
    assert said in str(caught.value)
