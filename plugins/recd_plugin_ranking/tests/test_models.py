"""Models ``ranking.two_tower`` and ``ranking.sasrec``: tables on the meta device, and losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_ranking.models import SasRec, TwoTower
from recd_plugin_ranking.ops import Candidates, log_of_presence, losses_among, shares
from recd_plugin_ranking.sasrec_modules import SteadyDraws, SteadyDropout
from recd_plugins.interfaces import ModelFeatures
from recd_plugins.interfaces.batch import ModelInput
from recd_plugins.interfaces.model_tables import tables_of
from recd_plugins.runtime.errors import RecdError


def _counts(feature: str, num_embeddings: int) -> np.ndarray:
    return np.arange(num_embeddings) % 7


FEATURES = ModelFeatures(
    ("age", "price"), ("user", "item"), ("seen", "bought"), positive_counts=_counts
)


SIZES: dict[str, Any] = {"num_embeddings": 50, "embedding_dim": 8}
MODELS = [
    TwoTower(TwoTower.Options(item=["item"], user_dense=[0], item_dense=[1], **SIZES)),
    SasRec(SasRec.Options(history="seen", item="item", **SIZES)),
]


@pytest.mark.parametrize("plugin", MODELS, ids=lambda plugin: plugin.name)
def test_a_model_on_the_meta_device_has_its_tables_and_a_seed_one_model(plugin):
    with torch.device("meta"):
        meta = plugin.build(FEATURES)
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(plugin.build(FEATURES))
    assert tables_of(meta) == tables_of(built[0])
    torch.testing.assert_close(built[0].state_dict(), built[1].state_dict(), rtol=0, atol=0)


def test_sampled_losses_are_full_ones_where_every_item_is_a_candidate():
    torch.manual_seed(0)
    table = torch.randn(9, 4)
    queries, targets = torch.randn(5, 4), torch.tensor([3, 0, 3, 8, 5])
    ids = torch.cat([torch.arange(9), targets])
    candidates = Candidates.of(ids, table[ids], None, torch.Generator())
    found = losses_among(candidates, queries, targets, table[targets], None, 0.5)
    expected = F.cross_entropy(queries @ table.T / 0.5, targets, reduction="none")
    torch.testing.assert_close(found, expected)


def test_with_the_correction_the_right_logits_are_the_best_ones():
    """There the mean gradient is 0, though popular items are candidates more often than others."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(12, 1, generator=generator)
    of_target = torch.softmax(right[:, 0], 0)
    presence = log_of_presence(torch.from_numpy(shares(np.arange(12) ** 2)), torch.tensor(8))
    gradients = {}
    for correction in (presence, None):
        logits = right.clone().requires_grad_()
        for _ in range(200):
            targets = torch.multinomial(of_target, 100, replacement=True, generator=generator)
            there = torch.rand(12, generator=generator) < presence.exp()
            among = Candidates(torch.arange(12)[there], logits[there])
            ones = torch.ones(100, 1)
            losses_among(among, ones, targets, logits[targets], correction, 1.0).mean().backward()
        assert logits.grad is not None
        gradients[correction is None] = (logits.grad / 200).abs().max().item()
    assert gradients[False] < 0.02
    assert gradients[True] > 0.03


def test_dropout_draws_by_the_step_that_is_saved():
    first, again = SteadyDropout(0.5, 3), SteadyDropout(0.5, 3)
    ones = torch.ones(64)
    masks = [first(ones) for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert 0.5 < masks[0].mean() < 1.5
    again(ones)
    resumed = SteadyDropout(0.5, 3)
    resumed.load_state_dict(again.state_dict())
    assert torch.equal(resumed(ones), masks[1])
    assert torch.equal(first.eval()(ones), ones)


def test_the_seed_that_a_model_is_made_by_tells_what_it_draws():
    def draws(seed: int) -> list[list[float]]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = SteadyDraws(1)
        return [torch.rand(4, generator=made.next(torch.device("cpu"))).tolist() for _ in range(9)]

    seeds = (0, 1, 2, (1 << 63) - 1)
    assert len({str(each) for seed in seeds for each in draws(seed)}) == 9 * len(seeds)
    assert draws(1) == draws(1)


def test_a_history_sees_nothing_behind_a_place():
    options = SasRec.Options(history="seen", item="item", correct=False, **SIZES)
    torch.manual_seed(0)
    model: Any = SasRec(options).build(FEATURES)
    encoder = model.top.encoder
    items = torch.randn(1, 6, 8)
    changed = items.clone()
    changed[0, 4] += 1
    lengths = torch.tensor([6])
    one, other = encoder(items, lengths)[0], encoder(changed, lengths)[0]
    assert torch.equal(one[:5], other[:5])
    assert not torch.equal(one[5], other[5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item": ["itm"]}, "no sparse feature 'itm'. Use one of: 'user', 'item"),
        ({"tables": {"t_itme": 9}}, "'t_itme' matches no table. Use one of: 't_user'"),
        # Without data there is no popularity.
        ({"features": ("user", "item")}, r"needs the popularity of items.*correct: false"),
    ],
)
def test_options_that_fit_no_feature_are_named(options, message):
    of_data = FEATURES
    if "features" in options:
        of_data = ModelFeatures((), options.pop("features"))
    with pytest.raises(RecdError, match=message):
        TwoTower(TwoTower.Options(**{"item": ["item"], **options})).build(of_data)


@pytest.mark.parametrize("masked", [True, False])
def test_items_of_a_user_are_no_negatives_of_the_same_user(masked):
    options = TwoTower.Options(item=["item"], user=["user"], mask_same_user=masked, **SIZES)
    torch.manual_seed(0)
    model: Any = TwoTower(options).build(replace(FEATURES, sequence=()))
    users, items = torch.tensor([7, 7, 8, 9]), torch.tensor([1, 2, 3, 1])
    lengths = torch.ones(8, dtype=torch.int64)
    kjt = KeyedJaggedTensor(["user", "item"], torch.cat([users, items]), lengths=lengths)
    batch = ModelInput(torch.zeros(4, 2), kjt, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    loss, _ = model(batch)
    logits = model.user_vectors(batch)[:3] @ model.item_vectors(batch)[:3].T
    logits = logits - torch.from_numpy(shares(_counts("item", 50)))[items[:3]].log()
    if masked:
        logits[0, 1] = logits[1, 0] = -torch.inf
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.arange(3)))
