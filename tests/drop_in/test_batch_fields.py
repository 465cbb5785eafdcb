from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.batches import replace_kjts


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([1, 1]))


@dataclass
class Plain:
    sparse: KeyedJaggedTensor
    labels: Tensor


@dataclass(frozen=True)
class Frozen:
    sparse: KeyedJaggedTensor
    seen: int = field(default=0, init=False)


class Named(NamedTuple):
    sparse: KeyedJaggedTensor
    labels: Tensor


class Slotted:
    __slots__ = ("labels", "sparse")

    def __init__(self) -> None:
        self.sparse, self.labels = kjt(), torch.ones(2)


class OneSlot(Slotted):
    __slots__ = "more"


class Own:
    def __init__(self) -> None:
        self.parts: dict[str, Any] = {"clicks": [kjt(), 3]}


LABELS = torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (kjt(), "batch"),
        ({"sparse": kjt(), "labels": LABELS}, "batch['sparse']"),
        (OrderedDict(sparse=kjt()), "batch['sparse']"),
        ([LABELS, kjt()], "batch[1]"),
        ((kjt(), LABELS), "batch[0]"),
        (Named(kjt(), LABELS), "batch[0]"),
        (Plain(kjt(), LABELS), "batch.sparse"),
        (Frozen(kjt()), "batch.sparse"),
        (Slotted(), "batch.sparse"),
        (OneSlot(), "batch.sparse"),
        (Own(), "batch.parts['clicks'][0]"),
        (Batch(torch.ones(2, 1), kjt(), LABELS), "batch.sparse_features"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_one_is_replaced_in_a_copy(batch: Any, path: str) -> None:
    new = kjt()
    asked: list[str] = []

    def replace(where: str, old: KeyedJaggedTensor) -> KeyedJaggedTensor:
        asked.append(where)
        assert old is not new
        return new

    other = replace_kjts(batch, replace)
    assert asked == [path]
    assert type(other) is type(batch)
    assert _at(other, path) is new
    assert _at(batch, path) is not new, "what was given stays as it is"
    if hasattr(batch, "labels"):
        assert other.labels is batch.labels


@pytest.mark.parametrize("batch", [{"sparse": kjt()}, [kjt()], Named(kjt(), LABELS), Own(), 3])
def test_nothing_is_copied_where_nothing_changes(batch: Any) -> None:
    assert replace_kjts(batch, lambda _, old: old) is batch


def test_what_refers_to_its_holder_ends() -> None:
    batch = Own()
    batch.parts["batch"] = batch
    asked: list[str] = []

    def leave(path: str, old: KeyedJaggedTensor) -> KeyedJaggedTensor:
        asked.append(path)
        return old

    assert replace_kjts(batch, leave) is batch
    assert asked == ["batch.parts['clicks'][0]"]


def _at(batch: Any, path: str) -> Any:
    return eval(path, {"batch": batch})
