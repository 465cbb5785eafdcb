"""Modules against documented examples, plain Python and scripts; chains of plugins on each form."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_recd import preprocessing
from recd_plugin_recd.preprocessing import kernels, modules
from recd_plugin_recd.tests.test_converters import expanded
from recd_plugins.data.preprocess import Preprocess
from recd_plugins.interfaces.batch import Batch
from recd_plugins.runtime.errors import RecdError
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.partial_ikjt import PartialInverseKeyedJaggedTensor

MASK = 2**64 - 1
LOWEST, LARGEST = -(2**63), 2**63 - 1
IDS = st.integers(LOWEST, LARGEST) | st.integers(-5, 5) | st.sampled_from([2**53, 2**53 + 1])
NUMBERS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, 0.5, 1.0, 2.0])


def jagged(rows, dtype=torch.int64, offsets_dtype=torch.int64):
    lengths = torch.tensor([len(row) for row in rows], dtype=offsets_dtype)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(offsets_dtype)])
    return torch.tensor([value for row in rows for value in row], dtype=dtype), offsets


def lists(values, offsets):
    return [values[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def apply(module, rows, dtype=torch.int64):
    return lists(*module(*jagged(rows, dtype)))


def combined(upper: int, identifier: int) -> int:
    """Thomas Wang's mix and CityHash's combination, in Python's integers."""
    key = identifier & MASK
    key = (~key + (key << 21)) & MASK
    key ^= key >> 24
    key = key * 265 & MASK
    key ^= key >> 14
    key = key * 21 & MASK
    key ^= key >> 28
    key = (key + (key << 31)) & MASK
    city = 0x9DDFEA08EB382D69
    first = ((key ^ upper) * city) & MASK
    first ^= first >> 47
    second = ((first ^ upper) * city) & MASK
    second ^= second >> 47
    return second * city & MASK


#: A module, and the types of values it takes.
MODULES = {
    "sigrid_hash": (modules.SigridHash(1000, salt=-7), [torch.int64]),
    "first_x": (modules.FirstX(3), [torch.int64]),
    "first_0": (modules.FirstX(0), [torch.int64]),
    "bucketize": (
        modules.Bucketize([-(2**63), -2, 0.5, 0.7, 2, 2, 2**53 + 1]),
        [torch.int64, torch.float32],
    ),
    "bigrams": (modules.NGram(2), [torch.int64]),
    "trigrams": (modules.NGram(3, salt=LOWEST), [torch.int64]),
    "map_id": (modules.MapId({2**53 + 1: 1, LOWEST: LARGEST, 0: -1}), [torch.int64]),
    "map_id_default": (modules.MapId({3: 4}, default=LARGEST), [torch.int64]),
    "clamp": (modules.Clamp(-2, 2**53 + 1), [torch.int64, torch.float32]),
    "clamp_above": (modules.Clamp(upper=1), [torch.int64, torch.float32]),
    "logit": (modules.Logit(), [torch.float32]),
    "box_cox": (modules.BoxCox(0.5, 1.0), [torch.float32]),
    "log": (modules.BoxCox(0.0), [torch.float32]),
    "onehot": (modules.Onehot(3), [torch.int64, torch.float32]),
}


@pytest.fixture(scope="module")
def scripts():
    return {name: torch.jit.script(module) for name, (module, _) in MODULES.items()}


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_script_and_kernel_agree(scripts, name, data):
    module, dtypes = MODULES[name]
    dtype = data.draw(st.sampled_from(dtypes))
    values = IDS if dtype == torch.int64 else NUMBERS
    offsets_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    rows = data.draw(st.lists(st.lists(values, max_size=6), max_size=5))
    given = jagged(rows, dtype, offsets_dtype)
    for eager, scripted in zip(module(*given), scripts[name](*given), strict=True):
        assert eager.dtype == scripted.dtype
        assert torch.equal(eager, scripted)


@pytest.mark.parametrize(
    ("module", "rows", "expected"),
    [
        # functional.firstx, and torcharrow/test/transformation/test_firstx.py
        (modules.FirstX(1), [[0, 1, 2, 3], [4, 5, 6]], [[0], [4]]),
        (modules.FirstX(3), [[0, 1, 2, 3], [4, 5]], [[0, 1, 2], [4, 5]]),
        # torcharrow/test/transformation/test_clamp.py
        (modules.Clamp(0, 20), [[0, 1], [-100, 100, 10]], [[0, 1], [0, 20, 10]]),
        (modules.Clamp(2**53 + 1, 2**62 + 1), [[2**53, 2**62 + 2]], [[2**53 + 1, 2**62 + 1]]),
        (modules.Clamp(0.25), [[0.0, 7.0]], [[0.25, 7.0]]),
        (modules.Clamp(-1e300, 1e300), [[-math.inf, 3e38]], [[-math.inf, 3e38]]),
        (modules.MapId({9: 7, 2**53 + 1: LARGEST}), [[7, 2**53], [9]], [[7, 2**53], [7]]),
        (modules.MapId({9: 7, 3: LARGEST}, default=0), [[7, 3], [9]], [[0, LARGEST], [7]]),
        (modules.Onehot(3), [[0, 2], [], [3]], [[1, 0, 0, 0, 0, 1], [], [0, 0, 0]]),
        (modules.Onehot(2), [[1.0], [0.5], [-1.0]], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
        # log(x / (1 - x)) of x moved into [eps, 1 - eps], as Caffe2's
        (modules.Logit(0.01), [[0.5, 2.0]], [[0.0, math.log(99)]]),
    ],
)
def test_documented_examples(module, rows, expected):
    floating = isinstance(rows[0][0], float)
    found = apply(module, rows, torch.float32 if floating else torch.int64)
    if floating:
        expected = [pytest.approx(row, rel=1e-5) for row in expected]
    assert found == expected


@pytest.mark.parametrize(
    ("values", "borders", "expected"),
    [
        ([1, 2, 3, 5, 8, 10, 11], [2, 5, 10], [0, 0, 1, 1, 2, 2, 3]),
        ([1, 2, 3, 4, 5, 6], [0.0, 2.0, 3.0, 5.0, 500.0, 1000.0], [1, 1, 2, 3, 3, 4]),
        ([1.5, 2.5, 3.5, 4.5, 5.5, 6.5], [0, 2, 3, 5, 500, 1000], [1, 2, 3, 3, 4, 4]),
        ([1.5], [1, 2, 2, 3, 3], [1]),
        ([1.5, 2.5, 150.0, 10.0, 200.0], [1.0, 10.0, 100.0], [1, 1, 3, 1, 3]),
        ([1, 2, 150, 10, 200], [1.0, 10.0, 100.0], [0, 1, 3, 1, 3]),
        ([3.0, 4.0, 5.0, 6.0, 5.0, 8.0], [1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 4, 7]),
    ],
)
def test_bucketize_gives_what_torcharrow_tests(values, borders, expected):
    """functional.bucketize; rec/tests/BucketizeTest.cpp and test_bucketize_dense_to_sparse.py."""
    dtype = torch.float32 if isinstance(values[0], float) else torch.int64
    (result,) = apply(modules.Bucketize(borders), [values], dtype)
    assert result == expected


def test_sigrid_hash_gives_what_torcharrow_documents():
    """The example of https://docs.pytorch.org/torcharrow/main, functional.sigrid_hash."""
    plugin = preprocessing.SigridHash(preprocessing.SigridHash.Options(buckets=100))
    values, offsets = torch.tensor([1, 2, 3, 5, 8, 10, 11]), torch.tensor([0, 3, 3, 7])
    hashed, same = plugin.transform(values, offsets)
    assert hashed.tolist() == [60, 54, 54, 4, 67, 2, 25]
    assert same.tolist() == offsets.tolist()


@pytest.mark.parametrize("buckets", [1, 2, 3, 100, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**48])
@pytest.mark.parametrize("salt", [0, -1, LARGEST])
def test_sigrid_hash_is_the_definition(buckets, salt):
    random = np.random.default_rng(buckets).integers(LOWEST, LARGEST, 500).tolist()
    ids = [0, 1, -1, LARGEST, LOWEST, *random]
    hashes = [combined(salt & MASK, number) for number in ids]
    expected = [(each - 2**64 if each > LARGEST else each) % buckets for each in hashes]
    assert kernels.hash_ids(torch.tensor(ids), salt, buckets).tolist() == expected
    assert modules.sigrid_hash(torch.tensor(ids), salt, buckets).tolist() == expected


def test_bucketize_compares_ids_as_integers_and_numbers_as_float32():
    borders = modules.Bucketize([0.1, 2**53, 2**53 + 1])
    assert apply(borders, [[0, 1, 2**53, 2**53 + 1, 2**53 + 2]]) == [[0, 1, 1, 2, 3]]
    assert apply(borders, [[0.1, 0.11]], torch.float32) == [[0, 1]]


def test_bucketize_does_not_depend_on_how_numbers_are_stored():
    numbers = torch.arange(10).double() / 10
    bucketize = modules.Bucketize([0.1, 0.3, 0.7])
    buckets = {
        tuple(bucketize(values, torch.tensor([0, 10]))[0].tolist())
        for values in (numbers, numbers.float(), numbers.float().double())
    }
    assert buckets == {(0, 0, 1, 1, 2, 2, 2, 2, 3, 3)}


@given(row=st.lists(IDS, max_size=7), n=st.integers(2, 4), salt=IDS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ngram_hashes_windows_in_order(row, n, salt):
    expected = []
    for window in zip(*(row[at:] for at in range(n)), strict=False):
        key = salt & MASK
        for identifier in window:
            key = combined(key, identifier)
        expected.append(key & LARGEST)
    assert apply(modules.NGram(n, salt), [row, []]) == [expected, []]


@given(
    number=st.floats(-5, 50, width=32),
    lambda1=st.sampled_from([-1.0, 0.0, 1e-7, 0.5, 2.0]),
    lambda2=st.sampled_from([0.0, 1.5]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_box_cox_is_that_of_caffe2(number, lambda1, lambda2):
    """With y = max(x + lambda2, 1e-6): log(y), or (y^lambda1 - 1) / lambda1."""
    shifted = max(number + lambda2, 1e-6)
    power = lambda1 * math.log(shifted)
    expected = math.log(shifted) if lambda1 == 0 else math.expm1(power) / lambda1
    ((result,),) = apply(modules.BoxCox(lambda1, lambda2), [[number]], torch.float32)
    assert result == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Bucketize", {"borders": [1, 3, 2]}, "is not ascending"),
        ("Bucketize", {"borders": [float("nan")]}, "borders"),
        ("Bucketize", {"borders": [2**63]}, "borders"),
        ("Clamp", {"lower": 2, "upper": 1}, r"'lower' \(2\) is larger than option 'upper' \(1\)"),
        ("MapId", {"mapping": [[1, 2], [1, 3]]}, "'mapping' contains an id more than once"),
        ("MapId", {"mapping": [[1, 2**63]]}, "mapping"),
        ("BoxCox", {"lambda1": float("inf")}, "lambda1"),
    ],
)
def test_options_that_mean_nothing_are_refused(name, options, message):
    with pytest.raises((ValueError, RecdError), match=message):
        getattr(preprocessing, name).Options.model_validate(options)


def test_clamp_with_fractions_is_for_numbers_only():
    def takes(**bounds):
        return preprocessing.Clamp(preprocessing.Clamp.Options(**bounds)).takes

    assert takes(lower=0, upper=2.0) == ("ids", "numbers")
    assert takes(lower=0.5) == ("numbers",)
    assert takes(upper=1e30) == ("numbers",)


#: Of every plugin that takes ids.
OF_IDS = {
    "SigridHash": {"buckets": 50},
    "FirstX": {"x": 2},
    "Bucketize": {"borders": [0, 1, 2**53 + 1]},
    "NGram": {"n": 2},
    "MapId": {"mapping": [[2**53 + 1, 3], [1, 2**62]]},
    "Clamp": {"lower": 1, "upper": 2**53 + 1},
    "Onehot": {"classes": 2},
}
KEYS = ("a", "b", "c")


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
    values = torch.tensor([i for row in flat for i in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in flat], dtype=torch.int32)
    return KeyedJaggedTensor(list(KEYS), values, lengths=lengths, stride=len(rows["a"]))


def batch_of(kjt, form) -> Batch:
    empty = torch.zeros(kjt.stride(), 0), torch.zeros(kjt.stride())
    if form == "ikjt":
        return Batch(*empty, ikjts=InverseKeyedJaggedTensor.from_kjt(kjt, [["a", "b"], ["c"]]))
    if form == "partial":
        return Batch(*empty, partials=(PartialInverseKeyedJaggedTensor.from_kjt(kjt),))
    return Batch(*empty, kjt=kjt)


@pytest.mark.parametrize("form", ["ikjt", "partial"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=histories(),
    chains=st.fixed_dictionaries(
        {key: st.lists(st.sampled_from(sorted(OF_IDS)), max_size=3) for key in KEYS}
    ),
)
def test_chains_of_plugins_on_each_form(form, rows, chains):
    plugins = {}
    for name, options in OF_IDS.items():
        cls = getattr(preprocessing, name)
        plugins[name] = cls(cls.Options.model_validate(options))
    preprocess = Preprocess({key: [plugins[n] for n in chain] for key, chain in chains.items()})
    kjt = kjt_of(rows)
    before = batch_of(kjt, form)
    after = preprocess(before)
    assert expanded(after) == expanded(preprocess(batch_of(kjt, "kjt")))
    assert expanded(before) == rows, "a batch is left as it is"
    shared = {key for partial in after.partials for key in partial.keys()}  # noqa: SIM118
    if form == "partial":
        assert shared == {key for key in KEYS if not {"NGram", "Onehot"} & set(chains[key])}
