"""Whatever form a batch has, its rows after preprocessing are those of plain rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_recd import preprocessing
from recd_plugins.data.preprocess import Preprocess
from recd_plugins.interfaces.batch import Batch
from recd_plugins.sparse import InverseKeyedJaggedTensor, PartialInverseKeyedJaggedTensor

#: Of every plugin that takes ids.
OPTIONS = {
    "SigridHash": {"buckets": 50},
    "FirstX": {"x": 2},
    "Bucketize": {"borders": [0, 1, 2**53 + 1]},
    "NGram": {"n": 2},
    "MapId": {"mapping": [[2**53 + 1, 3], [1, 2**62]]},
    "Clamp": {"lower": 1, "upper": 2**53 + 1},
    "Onehot": {"classes": 2},
}
KEYS = ("a", "b", "c")


def made(name):
    cls = getattr(preprocessing, name)
    return cls(cls.Options.model_validate(OPTIONS[name]))


@st.composite
def histories(draw):
    num_rows = draw(st.integers(1, 8))
    ids = st.sampled_from([0, 1, 2, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)])
    features = {}
    for key in KEYS:
        row, rows = draw(st.lists(ids, max_size=5)), []
        for _ in range(num_rows):
            kind = draw(st.sampled_from(["stay", "stay", "move", "change"]))
            if kind == "move":
                row = row[draw(st.integers(0, 3)) :] + draw(st.lists(ids, max_size=2))
            elif kind == "change":
                row = draw(st.lists(ids, max_size=4))
            rows.append(row)
        features[key] = rows
    return features


def kjt_of(rows) -> KeyedJaggedTensor:
    flat = [row for key in KEYS for row in rows[key]]
    return KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.tensor([i for row in flat for i in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in flat], dtype=torch.int32),
        stride=len(rows["a"]),
    )


def batch_of(kjt, form) -> Batch:
    empty = torch.zeros(kjt.stride(), 0), torch.zeros(kjt.stride())
    if form == "ikjt":
        return Batch(*empty, ikjts=InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "b"], ["c"]]))
    if form == "partial":
        return Batch(*empty, partials=(PartialInverseKeyedJaggedTensor.from_kjt(kjt),))
    return Batch(*empty, kjt=kjt)


def rows_of(batch) -> dict[str, list[list[int]]]:
    kjts = [*([] if batch.kjt is None else [batch.kjt])]
    kjts += [sparse.to_kjt() for sparse in (*batch.ikjts, *batch.partials)]
    return {
        key: [row.tolist() for row in jagged.to_dense()]
        for kjt in kjts
        for key, jagged in kjt.to_dict().items()
    }


@pytest.mark.parametrize("form", ["ikjt", "partial"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=histories(),
    chains=st.fixed_dictionaries(
        {key: st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3) for key in KEYS}
    ),
)
def test_chains_of_plugins_on_each_form(form, rows, chains):
    plugins = {name: made(name) for name in OPTIONS}
    preprocess = Preprocess({key: [plugins[n] for n in chain] for key, chain in chains.items()})
    kjt = kjt_of(rows)
    before = batch_of(kjt, form)
    after = preprocess(before)
    assert rows_of(after) == rows_of(preprocess(batch_of(kjt, "kjt")))
    assert rows_of(before) == rows, "a batch is left as it is"
    shared = {key for partial in after.partials for key in partial.keys()}  # noqa: SIM118
    if form == "partial":
        assert shared == {key for key in KEYS if not {"NGram", "Onehot"} & set(chains[key])}
