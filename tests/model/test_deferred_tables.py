from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from tests.sharded import bags, configs, sequences
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recd_plugins.model import deferred_tables as module
from recd_plugins.model.deferred_tables import FirstValues, Window, deferred_tables, one_row_tables
from recd_plugins.runtime.errors import SetupError
from recd_plugins.training.rank_state import copy_weights, first_weights


def _from_numpy(weight: Tensor) -> None:
    drawn = np.random.rand(*weight.shape)
    weight.data.copy_(torch.from_numpy(drawn) + random.random())


INITS: dict[str, Callable[[Tensor], Any] | None] = {
    "default": None,
    "normal": partial(nn.init.normal_, std=0.1),
    "xavier": nn.init.xavier_uniform_,
    "truncated": partial(nn.init.trunc_normal_, std=0.1),
    "numpy": _from_numpy,
}
# Fewer numbers than are drawn together, a few more, and a remainder after several chunks.
SHAPES = [(1, 4), (3, 5), (5, 4), (67, 3), (200, 8)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(3, 3)
        pooled, unpooled = [], []
        for (rows, dim), (name, init) in product(SHAPES, INITS.items()):
            features, dtype = [f"{name}_{rows}"], DataType.FP16 if rows == 67 else DataType.FP32
            fields: Any = {"init_fn": init, "data_type": dtype}
            pooled += configs(EmbeddingBagConfig, features, rows, dim, **fields)
            unpooled += configs(EmbeddingConfig, features, rows, 4, init_fn=init)
        self.bags = EmbeddingBagCollection(pooled)
        self.between = nn.Linear(3, 3)
        self.rows = EmbeddingCollection(unpooled)
        self.above = nn.Linear(3, 3)


def _made() -> Model:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    return Model()


def _drawn() -> list[float]:
    return [float(torch.rand(1)), float(np.random.rand()), random.random()]


def test_they_have_the_values_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 256)
    whole = _made()
    after = _drawn()
    with deferred_tables() as deferred:
        model = _made()
    assert not deferred.touched
    assert _drawn() == after
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    assert tables
    assert all(parameter.is_meta for parameter in tables)
    state = torch.get_rng_state()
    made = {name: torch.zeros_like(tensor) for name, tensor in whole.state_dict().items()}
    copy_weights(made, first_weights(model))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(made[name], tensor), name


def test_a_part_has_the_values_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    whole = _made().bags.embedding_bags["t_default_200"].weight
    with deferred_tables():
        first = first_weights(_made())["bags.embedding_bags.t_default_200.weight"]
    assert isinstance(first, FirstValues)
    rows, columns, none = torch.zeros(70, 8), torch.zeros(200, 3), torch.zeros(0, 8)
    first.fill([Window(rows, 60, 0), Window(columns, 0, 5), Window(none, 200, 0)])
    assert torch.equal(rows, whole[60:130])
    assert torch.equal(columns, whole[:, 5:])


def test_others_are_made_as_ever() -> None:
    class Mine(EmbeddingBagCollection):
        """DistributedModelParallel does not shard it."""

    (table,) = configs(EmbeddingBagConfig, "f", 3, 4, name="t")
    with deferred_tables():
        assert not Mine([table]).embedding_bags["t"].weight.is_meta
        on_meta = EmbeddingBagCollection([table], device=torch.device("meta"))
    assert module.first_values_of(on_meta.embedding_bags["t"].weight) is None
    assert not EmbeddingBagCollection([table]).embedding_bags["t"].weight.is_meta


@pytest.mark.parametrize(
    "use",
    [lambda weight: weight.data.zero_(), lambda weight: weight.detach()[1:].add_(1), Tensor.clone],
    ids=["data", "view", "clone"],
)
def test_whoever_uses_a_table_is_seen(use: Callable[[Tensor], Any]) -> None:
    with deferred_tables() as deferred:
        made = sequences("f", name="t", rows=3)
        assert list(made.state_dict()) == ["embeddings.t.weight"]
        assert not deferred.touched
        use(made.embeddings["t"].weight)
    assert deferred.touched.startswith("table 't' is used by aten.")


def test_a_table_that_was_set_is_refused() -> None:
    with deferred_tables():
        made = sequences("f", name="t", rows=3)
    with pytest.warns(UserWarning, match="no-op"):
        made.load_state_dict({"embeddings.t.weight": torch.ones(3, 4)})
    with pytest.raises(SetupError, match=r"table 't': values were written before sharding"):
        first_weights(made)


def test_an_init_fn_that_differs_when_it_is_called_again_is_refused() -> None:
    init = partial(nn.init.normal_, generator=torch.Generator())
    with deferred_tables():
        made = sequences("f", name="t", rows=3, init_fn=init)
    with pytest.raises(SetupError, match="table 't': init_fn returned other values"):
        copy_weights({"embeddings.t.weight": torch.zeros(3, 4)}, first_weights(made))


def test_another_thread_makes_whole_tables() -> None:
    made: list[EmbeddingBagCollection] = []
    with deferred_tables(), one_row_tables():
        thread = Thread(target=lambda: made.append(bags("f", name="t", rows=9)))
        thread.start()
        thread.join()
        mine = bags("f", name="t", rows=9).embedding_bags["t"].weight
    assert (mine.shape[0], mine.is_meta) == (1, True)
    (theirs,) = made
    assert (theirs.embedding_bags["t"].weight.shape[0], theirs.device.type) == (9, "cpu")
    assert bags("f", name="t", rows=9).embedding_bags["t"].weight.shape[0] == 9
