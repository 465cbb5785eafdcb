"""Deduplication of a trainer's own batches: the same losses, and said what came of it."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.drop_in.trainer import FEATURES, NUM_STEPS, Model, Sample, forced_dedup, loader
from tests.sharded import CPU, bags, sequences, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recd_plugins
from recd_plugins.drop_in.batches import Stored
from recd_plugins.drop_in.dedup import Counted, Dedup, _decide
from recd_plugins.runtime.errors import DataError, SetupError
from recd_plugins.sparse.deduplicated_kjt import DeduplicatedKJT, unique_rows
from recd_plugins.testing.gloo import run_on_ranks

PARAMS = {"learning_rate": 0.1}


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "recd_plugins.drop_in")


@pytest.fixture
def forced() -> Iterator[None]:
    with forced_dedup():
        yield


def sharded_model(
    model: Model | None = None, base: Iterable[Any] = (), stock: bool = False
) -> tuple[Any, Dedup]:
    model = model or Model()
    ready = recd_plugins.wrap(model)
    base = list(base)
    ours = ready.sharders(base) if base else ready.sharders(fused_params=PARAMS)
    plan = ready.planner(world_size=dist.get_world_size()).plan(model, ours)
    # TorchRec's own for sequences takes no batch without rows.
    theirs = base or [EmbeddingBagCollectionSharder(PARAMS), ours[1]]
    return sharded(model, plan, theirs if stock else ours, CPU), ready.dedup


def trained(dmp: Any, batches: Iterable[Sample]) -> list[float]:
    losses = []
    for batch in batches:
        loss = dmp(batch)
        loss.backward()
        losses.append(loss.item())
    return losses


@forced_dedup()
def both_sides(
    rank: int, world_size: int, sessions: bool, sequence: bool, unsharded: bool
) -> tuple[list[float], list[float], str]:
    said, logger = io.StringIO(), logging.getLogger("recd_plugins.drop_in")
    logger.addHandler(handler := logging.StreamHandler(said))
    logger.setLevel(logging.INFO)
    base = [EmbeddingBagCollectionSharder(PARAMS)] if unsharded else []
    # A batch without rows is none for TorchRec's unsharded modules.
    count = NUM_STEPS - 1 if unsharded else NUM_STEPS
    found = []
    for stock in (False, True):
        dmp, dedup = sharded_model(Model(sequence), base, stock)
        batches: Any = itertools.islice(loader(rank, sessions), count)
        losses = trained(dmp, batches if stock else dedup(batches))
        with torch.no_grad():  # an evaluation of plain batches
            found.append(losses + [dmp(batch).item() for batch in loader(rank, sessions, 1)])
    logger.removeHandler(handler)
    return found[0], found[1], said.getvalue()


@pytest.mark.parametrize(
    ("sessions", "sequence", "unsharded"),
    [(True, False, False), (False, False, False), (True, True, False), (True, True, True)],
    ids=["sessions", "no duplicates", "and a sequence", "and an unsharded sequence"],
)
def test_losses_are_those_of_stock_with_plain_batches(
    sessions: bool, sequence: bool, unsharded: bool
) -> None:
    ranks = run_on_ranks(both_sides, 2, sessions, sequence, unsharded)
    for ours, stock, _ in ranks:
        assert ours == pytest.approx(stock, abs=1e-5, nan_ok=True)
    said = ranks[0][2]
    assert ranks[1][2] == "", "one rank says it"
    alone = "not deduplicated, since its dedupe factor is only 1.0"
    told = "dedupe factor 4.0 for the features f0, f1, f2" if sessions else alone
    assert f"batch.sparse: {told}" in said
    assert "batch.more['x']: not deduplicated, since none of its features is pooled by" in said


@pytest.mark.usefixtures("forced")
def test_features_without_duplicates_are_not_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    same, other = torch.zeros(6, dtype=torch.long), torch.arange(6)
    ids = torch.cat([same, same, other]).repeat_interleave(2)
    kjt = KeyedJaggedTensor(FEATURES, ids, lengths=torch.full((18,), 2))
    stored = unique_rows(Dedup(Model()).batch([kjt])[0])
    assert stored.stride_per_key() == [1, 1, 6]
    assert "batch[0]: dedupe factor 6.0 for the features f0, f1\n" in caplog.text
    assert "batch[0]: not deduplicated, too few duplicates: f2" in caplog.text


@pytest.mark.parametrize("ranks_here", ["1", "2"])
def test_one_id_a_row_is_left_alone_without_a_network(
    ranks_here: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of its vector costs what the lookup did."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    monkeypatch.setattr(
        "recd_plugins.drop_in.dedup.all_gather_object", lambda step, value, group: [value]
    )
    lengths = torch.ones(18).int()
    kjt = KeyedJaggedTensor(FEATURES, torch.zeros(18, dtype=torch.long), lengths=lengths)
    stored = Dedup(Model()).batch([kjt])[0]
    assert (stored is kjt) == (ranks_here == "2")
    assert ("1.0 ids per row and feature" in caplog.text) == (ranks_here == "2")


@pytest.mark.parametrize(
    ("length", "factor", "rows", "pays"),
    [(24, 5.7, 10_240, True), (80, 4, 4_096, True), (10, 8, 4_096, False), (20, 2, 10_240, False)]
    + [(ids, 8, 32_768, False) for ids in (1, 2, 3)],
)
def test_what_pays_on_one_machine(length: int, factor: float, rows: int, pays: bool) -> None:
    """As measured: lists of one to three ids are never faster, whatever repeats."""
    ids = length * rows
    counted = {"batch": {"f0": Counted(ids, round(ids / factor), rows)}}
    decision = _decide([(counted, {})], frozenset(["f0"]))
    assert ("batch" in decision.features) == pays
    assert ("on one machine" in str(decision)) != pays
    assert "batch" in _decide([(counted, {})], frozenset()).features, "over a network"


def empty_first(rank: int, world_size: int, features: list[str] | None) -> list[Any]:
    batches = list(loader(rank, sessions=True))
    kjt = batches[0].sparse
    none = KeyedJaggedTensor(kjt.keys(), kjt.values()[:0], lengths=torch.zeros_like(kjt.lengths()))
    batches[0] = Sample(none, batches[0].more, batches[0].labels)
    stock, _ = sharded_model(stock=True)
    ours, dedup = sharded_model()
    made = list(dedup(batches, features=features))
    deduplicated = [isinstance(each.sparse, DeduplicatedKJT) for each in made]
    return [trained(ours, made), trained(stock, batches), deduplicated]


@pytest.mark.parametrize("features", [None, ["f0", "f2"]])
def test_named_features_are_deduplicated_whatever_the_first_batch(features: Any) -> None:
    for ours, stock, deduplicated in run_on_ranks(empty_first, 2, features):
        assert ours == pytest.approx(stock, abs=1e-5, nan_ok=True)
        assert deduplicated == [features is not None] * NUM_STEPS


def test_models_and_features_that_nothing_pools_are_refused() -> None:
    with pytest.raises(SetupError, match=r"no module pools the feature 'f00'. Did you mean 'f0"):
        Dedup(Model())([], features=["f00"])
    with pytest.raises(SetupError, match="no unsharded EmbeddingBagCollection"):
        Dedup(nn.Linear(1, 1))


def test_a_loader_is_what_it_was_but_for_its_batches() -> None:
    class Loader:
        epoch = 0

        def __len__(self) -> int:
            return 7

        def __iter__(self):
            return iter([])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    own = Loader()
    wrapped: Any = Dedup(Model())(own)
    wrapped.set_epoch(3)
    assert (own.epoch, len(wrapped)) == (3, 7)
    wrapped.epoch = 4
    assert own.epoch == 4
    assert len(copy.copy(wrapped)) == 7


def test_where_nothing_is_deduplicated_the_loader_is_the_trainers() -> None:
    batches = list(loader(0, sessions=False))
    wrapped = Dedup(Model())(batches)
    assert all(new is old for new, old in zip(wrapped, batches, strict=True))
    assert type(iter(wrapped)) is type(iter(batches))


@pytest.mark.usefixtures("forced")
def test_what_is_left_alone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(EmbeddingBagCollection):
        pass

    mine = Mine(bags("s").embedding_bag_configs())
    model = nn.ModuleDict({"bags": Model(), "mine": mine})
    twice = torch.zeros(4, dtype=torch.long)

    def kjt(*names: str) -> KeyedJaggedTensor:
        lengths = torch.full((2 * len(names),), 2)
        return KeyedJaggedTensor(list(names), twice.repeat(len(names)), lengths=lengths)

    stored = Dedup(model).batch(kjt("f0"))
    weights = {"half": torch.ones(4).half(), "learn": torch.ones(4, requires_grad=True)}
    batch = {"mine": kjt("s"), "twice": stored, "again": kjt("f1", "f1"), "ok": kjt("f2", "s", "z")}
    batch |= {
        name: KeyedJaggedTensor(["f0"], twice, each, torch.full((2,), 2))
        for name, each in weights.items()
    }
    dedup = Dedup(model)
    changed = dedup.batch(batch)
    assert [name for name in batch if changed[name] is not batch[name]] == ["ok"]
    assert unique_rows(changed["ok"]).stride_per_key() == [1, 2, 2]
    for name, why in {
        "mine": "none of its features is pooled by",
        "again": "it contains the feature 'f1' twice",
        "twice": "it is already deduplicated",
        "half": "its weights are float16, which TorchRec's CPU kernels do not support",
        "learn": "its weights require a gradient, and equal rows would share one gradient",
    }.items():
        assert f"batch[{name!r}]: not deduplicated, since {why}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "recd_plugins"):
        dedup.batch(batch)
    assert not caplog.text, "once"


def different_makes(rank: int, world_size: int) -> str:
    batch = next(loader(rank, sessions=True))
    with pytest.raises(SetupError) as caught:
        Dedup(Model()).batch(batch if rank else {"clicks": batch.sparse})
    return str(caught.value)


def test_ranks_with_batches_of_different_make_are_named() -> None:
    for text in run_on_ranks(different_makes, 2):
        assert text.startswith("the first batches of ranks 0 and 1 have different features")
        assert "{'batch.sparse': " in text


@forced_dedup()
def no_batch_on_one_rank(rank: int, world_size: int) -> tuple[int, bool]:
    dedup = Dedup(Model())
    batches = list(dedup(loader(rank, True, rank)))
    return len(batches), "batch.sparse" in dedup.decision.features


def test_a_rank_without_batches_decides_with_the_others() -> None:
    assert run_on_ranks(no_batch_on_one_rank, 2) == [(0, True), (1, True)]


@pytest.mark.usefixtures("forced")
def test_an_empty_loader_leaves_the_decision_to_a_later_one() -> None:
    dedup = Dedup(Model())
    assert list(dedup([])) == []
    assert dedup.decision is None
    assert [type(b.sparse) for b in dedup(loader(0, True, 1))] == [DeduplicatedKJT]


@pytest.mark.usefixtures("forced")
def test_a_stream_may_be_read_in_pieces() -> None:
    expected = [batch.labels.tolist() for batch in loader(0, True, 9)]
    stream, dedup = loader(0, True, 9), Dedup(Model())
    found = [next(dedup(stream))]
    for batch in dedup(stream):
        found.append(batch)
        if len(found) == 3:
            break
    found += itertools.islice(dedup(stream), 2)
    # It drops a batch, as without dedup.
    found += [batch for batch, _ in zip(dedup(stream), range(1), strict=False)]
    found += dedup(iter(dedup(stream)))
    del expected[6]
    assert [batch.labels.tolist() for batch in found] == expected
    assert all(isinstance(batch.sparse, DeduplicatedKJT) for batch in found)


@forced_dedup()
def on_a_part_of_the_ranks(rank: int, world_size: int) -> list[float]:
    group: Any = dist.new_group([0, 1])
    if rank == 2:
        init_device_mesh("cpu", (2,))  # as ShardingEnv has it done by all ranks
        return []
    ready = recd_plugins.wrap(model := Model())
    sharders: Any = ready.sharders(fused_params=PARAMS)
    plan = ready.planner(world_size=2).plan(model, sharders)
    env = ShardingEnv.from_process_group(group)
    dmp = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    losses = trained(dmp, ready.dedup(loader(rank, sessions=True)))
    assert ready.dedup.decision.features
    return losses


def test_ranks_that_train_nothing_are_not_waited_for() -> None:
    *training, idle = run_on_ranks(on_a_part_of_the_ranks, 3)
    assert all(training)
    assert not idle


@forced_dedup()
def detached_and_attached(rank: int, world_size: int) -> list[list[float]]:
    found: list[list[float]] = []
    for detach in (False, True):
        dmp, dedup = sharded_model()
        losses: list[float] = []

        def forward(batch: Any, dmp: Any = dmp, losses: list[float] = losses) -> tuple[Any, None]:
            loss = dmp(batch)
            losses.append(loss.item())
            return loss, None

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        pipeline: Any = TrainPipelineSparseDist(dmp, optimizer, CPU, custom_model_fwd=forward)
        batches = iter(dedup(loader(0, sessions=True)))
        with suppress(StopIteration):
            while True:
                pipeline.progress(batches)
                if detach and len(losses) == 2:
                    pipeline.attach(pipeline.detach())
        assert dedup.decision.features
        found.append(losses)
    return found


def test_a_pipeline_that_is_detached_between_goes_on() -> None:
    for straight, detached in run_on_ranks(detached_and_attached, 2):
        assert len(straight) == NUM_STEPS
        assert detached == straight


def _in_place(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    kjt.values().remainder_(kjt.values().max() or 1)  # another one each time
    return kjt


def _assigned(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    kjt._values = kjt._values % 5
    return kjt


#: What trainers do to a KeyedJaggedTensor between their loader and their tables.
MADE_ANEW: dict[str, Callable[[KeyedJaggedTensor], KeyedJaggedTensor]] = {
    "as it comes": lambda kjt: kjt,
    "to": lambda kjt: kjt.to(CPU),
    "permute": lambda kjt: kjt.permute([2, 0, 1]),
    "split and concat": lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 2])),
    "hashed": lambda kjt: KeyedJaggedTensor(kjt.keys(), kjt.values() % 9, lengths=kjt.lengths()),
    "from_jt_dict": lambda kjt: KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
    "by key": lambda kjt: KeyedJaggedTensor.from_jt_dict({n: kjt[n] for n in kjt.keys()}),  # noqa: SIM118
    "of dense lists": lambda kjt: KeyedJaggedTensor.from_lengths_sync(
        kjt.keys(), torch.cat([row for n in FEATURES for row in kjt[n].to_dense()]), kjt.lengths()
    ),
    "copied": lambda kjt: copy.deepcopy(kjt),
    "pickled": lambda kjt: pickle.loads(pickle.dumps(kjt)),
    "pickled and assigned": lambda kjt: _assigned(pickle.loads(pickle.dumps(kjt))),
    "by tree_map": lambda kjt: tree_map_only(Tensor, torch.clone, kjt),
    "hashed by tree_map_only": lambda kjt: tree_map_only(
        Tensor, lambda each: each % 7 if each is kjt.values() else each, kjt
    ),
    "pickled and hashed": lambda kjt: _in_place(pickle.loads(pickle.dumps(kjt))),
    "hashed in place": _in_place,
    "hashed in place and pickled": lambda kjt: pickle.loads(pickle.dumps(_in_place(kjt))),
    "hashed in place by a copy": lambda kjt: _in_place(copy.copy(kjt)) and kjt,
    "hashed in place by key": lambda kjt: kjt["f1"].values().remainder_(5) is None or kjt,
    "assigned": _assigned,
}


@forced_dedup()
def made_anew(rank: int, world_size: int, deduplicated: bool) -> list[float]:
    dmp, dedup = sharded_model()
    batches: Any = loader(rank, True, 1)
    (batch,) = dedup(batches) if deduplicated else batches
    assert not deduplicated or dedup.decision.features  # type: ignore[union-attr]
    made = (Sample(make(batch.sparse), batch.more, batch.labels) for make in MADE_ANEW.values())
    return trained(dmp, made)


def test_a_batch_that_the_model_makes_anew_has_all_rows() -> None:
    plain = run_on_ranks(made_anew, 2, False)
    for expected, found in zip(plain, run_on_ranks(made_anew, 2, True), strict=True):
        assert len(found) == len(MADE_ANEW)
        assert found == pytest.approx(expected, rel=1e-5)


@forced_dedup()
def left_alone_once_sharded(rank: int, world_size: int, stock: bool) -> tuple[bool, str]:
    model: Any = Model()
    dedup = Dedup(model)
    sharders: Any = [EmbeddingBagCollectionSharder() if stock else EmbeddingCollectionSharder()]
    if not stock:
        model.other = sequences("o")
    DistributedModelParallel(model, device=CPU, sharders=sharders)
    batch = next(loader(rank, sessions=True))
    plain = dedup.batch(batch) is batch
    return plain, dedup.decision.left["batch.sparse"]


@pytest.mark.parametrize("stock", [True, False])
def test_modules_without_our_sharders_get_plain_batches(stock: bool) -> None:
    for plain, left in run_on_ranks(left_alone_once_sharded, 2, stock):
        assert plain
        assert left.startswith("bags is not sharded by ready.sharders")


@pytest.mark.parametrize("values", [3, 5])
def test_other_values_than_lengths_say_are_refused(values: int) -> None:
    kjt = KeyedJaggedTensor(["f0"], torch.arange(values), lengths=torch.tensor([2, 2]))
    message = f"the lengths add up to 4, but {values} values exist"
    with pytest.raises(DataError, match=rf"batch\['clicks'\]: {message}"):
        Dedup(Model()).batch({"clicks": kjt})
    with pytest.raises(DataError, match=message):
        Stored({"batch": ["f0"]})("batch", kjt)


def test_ranks_cannot_decide_in_workers() -> None:
    """They find one another there in no process group: without this they wait for ever."""
    dedup = Dedup(Model())
    kjt = KeyedJaggedTensor(["f0"], torch.zeros(8).long(), lengths=torch.full((4,), 2))
    rows: Any = range(2)
    loads = partial(DataLoader, rows, collate_fn=lambda _: dedup.batch(kjt))
    with forced_dedup():
        assert unique_rows(next(iter(loads()))).stride_per_key() == [1]
    dedup.decision = None
    with pytest.raises(SetupError, match="dedup runs in a DataLoader worker"):
        next(iter(loads(num_workers=1)))
