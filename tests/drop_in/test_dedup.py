"""Deduplication of a trainer's own batches: the same losses, and said what came of it."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.drop_in import dedup_cases as cases
from tests.drop_in.forced_dedup import forced_dedup
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugins.drop_in.batches import Stored
from recd_plugins.drop_in.dedup import Counted, Dedup, _decide
from recd_plugins.runtime.errors import DataError, SetupError
from recd_plugins.sparse.deduplicated_kjt import DeduplicatedKJT, unique_rows
from recd_plugins.testing.gloo import run_on_ranks


@pytest.fixture
def forced() -> Iterator[None]:
    with forced_dedup():
        yield


@pytest.mark.parametrize("sequence", [False, True], ids=["bags", "bags and a sequence"])
@pytest.mark.parametrize("sessions", [True, False], ids=["sessions", "no duplicates"])
def test_losses_are_those_of_stock_with_plain_batches(sessions: bool, sequence: bool) -> None:
    ranks = run_on_ranks(cases.losses, 2, sessions, sequence)
    for ours, stock, _ in ranks:
        assert ours == pytest.approx(stock, abs=1e-6, nan_ok=True)
    said = ranks[0][2]
    assert ranks[1][2] == "", "one rank says it"
    if sessions:
        assert "batch.sparse: 4.0 ids per stored id, in f0, f1, f2" in said
    else:
        assert "batch.sparse: left alone, as it has 1.0" in said
    assert (
        "batch.more['x']: left alone, as none of its features is pooled by an "
        "EmbeddingBagCollection" in said
    )


def test_a_module_that_stays_unsharded_gets_all_rows() -> None:
    ranks = run_on_ranks(cases.with_unsharded_sequences, 2)
    for ours, stock, _ in ranks:
        assert ours == pytest.approx(stock, rel=1e-6)
    assert "ids per stored id" in ranks[0][2]


@pytest.mark.usefixtures("forced")
def test_rows_and_their_order_stay() -> None:
    batch = next(cases.loader(0, sessions=True))
    stored = unique_rows(Dedup(cases.Model()).batch(batch).sparse)
    assert stored.values().numel() * 4 == batch.sparse.values().numel()
    names, inverse = stored.inverse_indices()
    for name, indices in zip(names, inverse, strict=True):
        every_row = stored[name].to_dense()
        for row, index in zip(batch.sparse[name].to_dense(), indices.tolist(), strict=True):
            assert torch.equal(every_row[index], row)


@pytest.mark.usefixtures("forced")
def test_features_without_duplicates_are_not_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    same, other = torch.zeros(6, dtype=torch.long), torch.arange(6)
    ids = torch.cat([same, same, other]).repeat_interleave(2)
    kjt = KeyedJaggedTensor(cases.FEATURES, ids, lengths=torch.full((18,), 2))
    stored = unique_rows(Dedup(cases.Model()).batch([kjt])[0])
    assert stored.stride_per_key() == [1, 1, 6]
    assert "batch[0]: 6.0 ids per stored id, in f0, f1\n" in caplog.text
    assert "batch[0]: hardly any duplicates in f2" in caplog.text


@pytest.mark.parametrize("ranks_here", ["1", "2"])
def test_one_id_a_row_is_left_alone_without_a_network(
    ranks_here: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of its vector costs what the lookup did."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
    monkeypatch.setattr("recd_plugins.drop_in.dedup.tell_all", lambda step, value, group: [value])
    kjt = KeyedJaggedTensor(
        cases.FEATURES, torch.zeros(18, dtype=torch.long), lengths=torch.ones(18).int()
    )
    stored = Dedup(cases.Model()).batch([kjt])[0]
    assert (stored is kjt) == (ranks_here == "2")
    assert ("it has 1.0 ids per row and feature" in caplog.text) == (ranks_here == "2")


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
    assert ("on CPUs of one machine" in str(decision)) != pays
    assert "batch" in _decide([(counted, {})], frozenset()).features, "over a network"


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
    loader = Dedup(cases.Model())(own)
    loader.set_epoch(3)
    assert (own.epoch, len(loader)) == (3, 7)
    loader.epoch = 4
    assert own.epoch == 4
    assert len(copy.copy(loader)) == 7


def test_where_nothing_is_deduplicated_the_loader_is_the_trainers() -> None:
    batches = list(cases.loader(0, sessions=False))
    dedup = Dedup(cases.Model())
    loader = dedup(batches)
    assert all(new is old for new, old in zip(loader, batches, strict=True))
    assert type(iter(loader)) is type(iter(batches))


@pytest.mark.usefixtures("forced")
def test_what_is_left_alone_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(EmbeddingBagCollection):
        pass

    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["s"])
    model = nn.ModuleDict({"bags": cases.Model(), "mine": Mine([config])})
    twice = torch.zeros(4, dtype=torch.long)

    def kjt(*names: str) -> KeyedJaggedTensor:
        lengths = torch.full((2 * len(names),), 2)
        return KeyedJaggedTensor(list(names), twice.repeat(len(names)), lengths=lengths)

    stored = Dedup(model).batch(kjt("f0"))
    batch = {"mine": kjt("s"), "twice": stored, "again": kjt("f1", "f1"), "ok": kjt("f2", "s", "z")}
    dedup = Dedup(model)
    changed = dedup.batch(batch)
    assert [name for name in batch if changed[name] is not batch[name]] == ["ok"]
    assert unique_rows(changed["ok"]).stride_per_key() == [1, 2, 2]
    assert "batch['mine']: left alone, as none of its features is pooled by" in caplog.text
    assert "batch['again']: left alone, as its feature f1 is there twice" in caplog.text
    assert "batch['twice']: left alone, as it is deduplicated already" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "recd_plugins"):
        dedup.batch(batch)
    assert not caplog.text, "once"


def test_ranks_with_batches_of_different_make_are_named() -> None:
    for text in run_on_ranks(cases.different_makes, 2):
        assert text.startswith("the first batch of rank 0 has {\"batch['clicks']\": ['f0', ")
        assert "that of rank 1 {'batch.sparse': " in text


def test_a_rank_without_batches_decides_with_the_others() -> None:
    assert run_on_ranks(cases.no_batch_on_one_rank, 2) == [(0, True), (1, True)]


def test_batches_without_a_kjt_pass_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    batches = [{"labels": torch.ones(2)}] * 2
    loader = Dedup(cases.Model())(batches)
    assert all(new is old for new, old in zip(loader, batches, strict=True))
    assert caplog.text.count("the first batch has no KeyedJaggedTensor") == 1


@pytest.mark.usefixtures("forced")
def test_an_empty_loader_leaves_the_decision_to_a_later_one() -> None:
    dedup = Dedup(cases.Model())
    assert list(dedup([])) == []
    assert dedup.decision is None
    assert [type(b.sparse) for b in dedup(cases.loader(0, True, 1))] == [DeduplicatedKJT]


@pytest.mark.usefixtures("forced")
def test_a_stream_may_be_read_in_pieces() -> None:
    expected = [batch.labels.tolist() for batch in cases.loader(0, True, 9)]
    stream, dedup = cases.loader(0, True, 9), Dedup(cases.Model())
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


def test_a_model_without_embeddings() -> None:
    with pytest.raises(SetupError, match="before DistributedModelParallel has sharded it"):
        Dedup(nn.Linear(1, 1))


def test_ranks_that_train_nothing_are_not_waited_for() -> None:
    *training, idle = run_on_ranks(cases.on_a_part_of_the_ranks, 3)
    assert all(training)
    assert not idle


def test_a_pipeline_that_is_detached_between_goes_on() -> None:
    for straight, detached in run_on_ranks(cases.detached_and_attached, 2):
        assert len(straight) == cases.NUM_STEPS
        assert detached == straight


def test_a_batch_that_the_model_makes_anew_has_all_rows() -> None:
    plain = run_on_ranks(cases.made_anew, 2, False)
    for expected, found in zip(plain, run_on_ranks(cases.made_anew, 2, True), strict=True):
        assert len(found) == len(cases.MADE_ANEW)
        assert found == pytest.approx(expected, abs=1e-6)


def test_fewer_values_than_lengths_say_are_refused() -> None:
    kjt = KeyedJaggedTensor(["f0"], torch.arange(3), lengths=torch.tensor([2, 2]))
    with pytest.raises(
        DataError, match=r"batch\['clicks'\]: lengths add up to 4 ids, and there are 3"
    ):
        Dedup(cases.Model()).batch({"clicks": kjt})


@pytest.mark.parametrize("stock", [True, False])
def test_modules_without_our_sharders_get_plain_batches(stock: bool) -> None:
    for plain, left in run_on_ranks(cases.left_alone_once_sharded, 2, stock):
        assert plain
        assert left.startswith("bags is not sharded by ready.sharders")


def test_more_values_than_lengths_say_are_refused() -> None:
    kjt = KeyedJaggedTensor(["f0"], torch.arange(5), lengths=torch.tensor([2, 2]))
    with pytest.raises(DataError, match="lengths add up to 4 ids, and there are 5 values"):
        Stored({"batch": ["f0"]})("batch", kjt)


def test_weights_that_no_kernel_takes_stay() -> None:
    weights = torch.ones(8, dtype=torch.float16)
    lengths = torch.full((8,), 1)
    kjt = KeyedJaggedTensor(["f0"], torch.zeros(8, dtype=torch.long), weights, lengths)
    decided = Dedup(cases.Model()).decide({"ids": kjt})
    assert decided.left == {
        "batch['ids']": "its weights are float16, which no CPU kernel permutes by rows"
    }


def test_weights_that_learn_stay() -> None:
    weights = torch.ones(8, requires_grad=True)
    lengths = torch.full((8,), 1)
    kjt = KeyedJaggedTensor(["f0"], torch.zeros(8, dtype=torch.long), weights, lengths)
    decided = Dedup(cases.Model()).decide({"ids": kjt})
    assert decided.left == {
        "batch['ids']": "its weights require a gradient, of which equal rows would share one"
    }
