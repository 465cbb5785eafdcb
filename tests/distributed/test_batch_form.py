from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.compat.mean_pooling import with_inverse_indices_of
from recd_plugins.runtime.errors import ExactnessError, SetupError
from recd_plugins.sharding.batch_form import BatchForm

ROWS = 4


def batch(names: str, deduplicated: bool = False, weighted: bool = False) -> KeyedJaggedTensor:
    """Feature x has two rows that are stored, and ids by its letter; a row has one id or two."""
    stored = 2 if deduplicated else ROWS
    lengths = (torch.arange(stored) % 2 + 1).repeat(len(names))
    each = int(lengths[:stored].sum())
    values = torch.cat([torch.arange(each) + 100 * ord(name) for name in names])
    inverse = torch.stack([torch.arange(ROWS).roll(ord(name)) % 2 for name in names])
    return KeyedJaggedTensor(
        list(names),
        values,
        weights=values.float() / 7 if weighted else None,
        lengths=lengths,
        stride=None if deduplicated else ROWS,
        stride_per_key_per_rank=[[stored]] * len(names) if deduplicated else None,
        inverse_indices=(list(names), inverse) if deduplicated else None,
    )


def parts(kjt: KeyedJaggedTensor, names: str) -> list[list[list[float]]]:
    found = []
    inverse = kjt.inverse_indices_or_none()
    for name in names:
        jagged = kjt[name]
        tensors = [jagged.values(), jagged.lengths(), jagged.weights_or_none()]
        tensors.append(None if inverse is None else inverse[1][inverse[0].index(name)])
        found.append([[] if each is None else each.tolist() for each in tensors])
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_features_are_put_into_the_order_of_the_first_batch(weighted: bool) -> None:
    form = BatchForm("bags", features="ab")
    form.fit(form.ordered(batch("ab", weighted=weighted)))
    given = batch("zbxa", weighted=weighted)
    found = form.fit(form.ordered(given))
    assert "".join(found.keys()) == "ab"
    assert parts(found, "ab") == parts(given, "ab")


def test_what_tables_look_up_stays() -> None:
    form = BatchForm("bags", features="ab")
    form.ordered(batch("azb"))
    with pytest.raises(ExactnessError, match="module 'bags': the batch lacks the features 'b'"):
        form.ordered(batch("az"))
    with pytest.raises(ExactnessError, match="Use the same feature order in all batches"):
        form.ordered(batch("zba", deduplicated=True))
    assert parts(form.ordered(batch("zba")), "ab") == parts(batch("ab"), "ab")


def test_inverse_indices_in_another_order() -> None:
    form = BatchForm("bags", features="ab")
    form.fit(form.ordered(batch("ab", deduplicated=True)))
    given = batch("ab", deduplicated=True, weighted=True)
    other = with_inverse_indices_of(given, "ba")
    assert other.inverse_indices()[0] == ["b", "a"]
    found = form.fit(form.ordered(other))
    assert found.inverse_indices()[0] == ["a", "b"]
    assert parts(found, "ab") == parts(given, "ab")
    other = with_inverse_indices_of(given, "b")
    with pytest.raises(ExactnessError, match="no inverse_indices for the features 'a'"):
        form.fit(form.ordered(other))


def test_names_that_torchrec_takes_for_others() -> None:
    form = BatchForm("bags", features=["a", "a@7d"])
    form.fit(batch("ab"))
    with pytest.raises(SetupError, match=r"names 'a@7d' contain '@', .* of module 'bags' are"):
        BatchForm("bags", features=["a", "a@7d"]).fit(batch("ab", deduplicated=True))


def test_a_plain_first_batch_makes_all_plain_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    form = BatchForm("bags", features="ab")
    form.fit(form.ordered(batch("ab")))
    for _ in range(2):
        assert form.fit(form.ordered(batch("ab", deduplicated=True))).stride() == ROWS
    assert [text for text in caplog.messages if text.startswith("module")] == [
        "module 'bags': deduplicated batches are expanded to all rows, because the first batch was "
        "plain. Deduplicate all training and evaluation batches"
    ]
