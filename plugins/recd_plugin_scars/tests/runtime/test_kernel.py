"""Cached kernels against the uncached ones: outputs, weights and optimizer state, bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recd_plugin_scars.runtime.policies import CachePolicy, TableCache
from recd_plugin_scars.tests.runtime.kernels import (
    DIM,
    Kernel,
    assert_equal,
    batch_of,
    config_of,
    learn,
    pair,
    state_of,
)
from recd_plugins.runtime.errors import DataError, ExactnessError

POLICIES: list[CachePolicy] = ["static", "lru", "lfu"]
ROWS = 7


pytestmark = pytest.mark.usefixtures("one_rank")


def cache_of(policy: CachePolicy, cached: int, rows: int = ROWS) -> TableCache:
    return TableCache(policy, cached / rows, np.arange(rows)[::-1].copy())


@settings(max_examples=25, deadline=None)
@given(
    policies=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=3),
    cached=st.integers(0, ROWS),
    pooling=st.sampled_from([PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE]),
    optimizer=st.sampled_from([EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]),
    shared=st.booleans(),
    form=st.sampled_from(["plain", "weighted", "variable"]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    orders=st.lists(st.sampled_from(["train", "prefetch", "evaluate", "drop"]), max_size=12),
    seed=st.integers(0, 2**16),
)
def test_any_order_of_training_prefetching_and_evaluating(
    policies: list[CachePolicy],
    cached: int,
    pooling: PoolingType,
    optimizer: EmbOptimType,
    shared: bool,
    form: str,
    dtype: torch.dtype,
    orders: list[str],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, features = [ROWS] * len(policies), {0: ["f0", "g"]} if shared else None
    config = config_of(rows, pooling, features=features, optimizer=optimizer)
    caches = {f"t{index}": cache_of(policy, cached) for index, policy in enumerate(policies)}
    plain, kernel = pair(config, caches)
    prefetched: list[KeyedJaggedTensor] = []

    def look_up(features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        outputs = plain(features), kernel(features)
        assert_equal([outputs[0]], [outputs[1]])
        return outputs

    def train(features: KeyedJaggedTensor) -> None:
        for output in look_up(features):
            learn(output)

    for order in ["train", *orders]:
        batch = _batch(config.feature_names(), pooling, form, dtype, generator)
        if order == "prefetch":
            kernel.prefetch(batch)
            prefetched.append(batch)
        elif order == "train":
            train(prefetched.pop(0) if prefetched else batch)
        else:
            with torch.set_grad_enabled(order != "evaluate"):
                look_up(batch)
    for batch in prefetched:
        train(batch)
    assert_equal(state_of(plain), state_of(kernel))


def _batch(
    keys: list[str], pooling: PoolingType, form: str, dtype: torch.dtype, generator: torch.Generator
) -> KeyedJaggedTensor:
    strides = torch.full((len(keys), 1), 3)
    if form == "variable" and pooling != PoolingType.NONE:
        strides = torch.randint(0, 4, (len(keys), 2), generator=generator)
    lengths = torch.randint(0, 4, (int(strides.sum()),), generator=generator)
    num_ids = int(lengths.sum())
    weighted = form == "weighted" and pooling == PoolingType.SUM
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, ROWS, (num_ids,), generator=generator).to(dtype),
        lengths=lengths,
        weights=torch.rand(num_ids, generator=generator) if weighted else None,
        stride_per_key_per_rank=strides.tolist() if strides.shape[1] > 1 else None,
    )


def one_table(
    policy: CachePolicy = "static", cached: int = 2, rows: int = ROWS, **params: Any
) -> tuple[Any, Kernel]:
    return pair(config_of([rows], **params), {"t0": cache_of(policy, cached, rows)})


@pytest.mark.parametrize(
    ("cached", "rows", "first", "second"),
    [
        (2, ROWS, [[0, 1], [6]], [[1, 6], [1]]),
        # The fast memory grows while a graph holds it.
        (0, 5000, [[3], [4]], [[*range(5000)], [4]]),
    ],
    ids=str,
)
def test_two_batches_in_flight_update_one_row(
    cached: int, rows: int, first: list[list[int]], second: list[list[int]]
) -> None:
    plain, kernel = one_table(cached=cached, rows=rows)
    for module in (plain, kernel):
        outputs = [module(batch_of(first)), module(batch_of(second))]
        for seed, output in enumerate(reversed(outputs)):
            learn(output, seed)
    assert_equal(state_of(plain), state_of(kernel))


def test_gradients_of_weights_of_ids() -> None:
    plain, kernel = one_table()
    gradients = []
    for module in (plain, kernel):
        weights = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
        ids, lengths = torch.tensor([1, 1, 5]), torch.tensor([2, 1])
        learn(module(KeyedJaggedTensor(["f0"], ids, lengths=lengths, weights=weights)))
        assert weights.grad is not None
        gradients.append(weights.grad)
    assert torch.equal(*gradients)
    assert_equal(state_of(plain), state_of(kernel))


def test_the_learning_rate_and_eps_are_read_live() -> None:
    plain, kernel = one_table(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    features = batch_of([[0, 1], [6]])
    for module in (plain, kernel):
        learn(module(features))
        module.fused_optimizer.param_groups[0]["lr"] = 0.125
        module.fused_optimizer.step()
        module.fused_optimizer.update_hyper_parameters({"eps": 0.75})
        learn(module(features))
    assert_equal(state_of(plain), state_of(kernel))


def test_a_graph_that_is_dropped_gives_its_rows_back() -> None:
    _, kernel = one_table(cached=0)
    kernel(batch_of([[0, 1], [6]]))
    gc.collect()
    kernel.flush()
    assert not kernel._rows._pool.pins.any()
    assert (kernel._rows._pool.row_of_slot == -1).all()


def test_a_second_backward_pass_is_refused() -> None:
    _, kernel = one_table()
    output = kernel(batch_of([[0, 1], [6]]))
    output.sum().backward(retain_graph=True)
    with pytest.raises(ExactnessError, match=r"'t0' support only one backward pass"):
        output.sum().backward()


def test_ids_outside_the_table_are_what_they_are_for_an_uncached_one() -> None:
    plain, kernel = one_table()
    for bad in (ROWS, 2**40):
        assert torch.equal(plain(batch_of([[bad, 1], [2]])), kernel(batch_of([[bad, 1], [2]])))
    messages = []
    for module in one_table(bounds_check_mode=BoundsCheckMode.FATAL):
        with pytest.raises(RuntimeError) as error:
            module(batch_of([[ROWS, 1], [2]]))
        messages.append(str(error.value).splitlines()[0])
    assert messages[0] == messages[1]


@pytest.mark.parametrize("bad", [-1, -2, ROWS])
def test_ids_that_the_check_of_bounds_lets_pass_are_refused(bad: int) -> None:
    mode = BoundsCheckMode.WARNING if bad == -1 else BoundsCheckMode.NONE
    config = config_of([ROWS, ROWS], bounds_check_mode=mode)
    plain, kernel = pair(config, {f"t{table}": cache_of("lru", 1) for table in range(2)})
    good = batch_of([[0, 1], [6]], [[3], [2]])
    with pytest.raises(DataError, match=f"table 't1': id {bad} .* rows 0 to 6"):
        kernel(batch_of([[5, 1], [4]], [[3], [bad]]))
    # Nothing of it was admitted.
    for module in (plain, kernel):
        learn(module(good))
    assert_equal(state_of(plain), state_of(kernel))


def test_a_prefetched_batch_that_changes_is_looked_up_as_it_is() -> None:
    plain, kernel = one_table()
    features = batch_of([[0, 1], [6]])
    kernel.prefetch(features)
    features.values()[0] = 3
    assert torch.equal(plain(features), kernel(features))
    kernel.flush()
    assert not kernel._rows._pool.pins.any()


@pytest.mark.parametrize("learned", [True, False])
def test_loaded_weights_are_looked_up_also_by_prefetched_batches(learned: bool) -> None:
    plain, kernel = one_table(cached=ROWS if learned else 0)
    features = batch_of([[0, 1], [6]])
    if learned:
        learn(kernel(features))
    kernel.prefetch(features)
    kernel._mover.drain()
    if learned:
        kernel.flush()
    for module in (plain, kernel):
        module.split_embedding_weights()[0].copy_(torch.arange(ROWS * DIM).view(ROWS, DIM))
    kernel.load()
    assert torch.equal(plain(features), kernel(features))


def test_weights_that_are_written_in_place_are_those_that_a_backward_pass_updates() -> None:
    _, kernel = one_table(cached=ROWS)
    output = kernel(batch_of([[0], [6]]))
    kernel.flush()
    kernel.split_embedding_weights()[0].fill_(3)
    output.sum().backward()
    weights, *_ = state_of(kernel)
    assert (weights[[0, 6]] == 2.5).all()  # 3 - learning rate x gradient
    assert (weights[1:6] == 3).all()


def test_two_lookups_of_one_step_and_lookups_that_are_computed_again() -> None:
    for reentrant in (True, False):
        plain, kernel = one_table(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
        batches = [batch_of([[0, 1], [6]]), batch_of([[1, 6], [1]])]
        for module in (plain, kernel):
            factor = torch.ones(1, requires_grad=True)
            outputs = [
                checkpoint(lambda x, m=module, b=batch: m(b) * x, factor, use_reentrant=reentrant)
                for batch in batches
            ]
            torch.cat(outputs).square().sum().backward()
        del outputs
        gc.collect()
        assert_equal(state_of(plain), state_of(kernel))
        kernel.flush()
        assert not kernel._rows._pool.pins.any()


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_bytes_are_counted_as_rows_move(optimizer: str) -> None:
    state = 4 if optimizer == "EXACT_ROWWISE_ADAGRAD" else 0
    _, kernel = one_table(cached=2, optimizer=EmbOptimType[optimizer])
    features = batch_of([[0, 1, 1], [6]])  # 5 and 6 are hot
    learn(kernel(features))
    [(name, traffic)] = kernel.traffic()
    assert (name, traffic.lookups) == ("t0", 4)
    assert (traffic.unique_rows, traffic.hits, traffic.misses) == (3, 1, 2)
    assert traffic.bytes_read == traffic.bytes_written == 2 * (4 * DIM + state)
    kernel.eval()
    with torch.no_grad():
        kernel(batch_of([[1, 1, 1], [6]]))
    kernel.train()
    assert (traffic.lookups, traffic.bytes_written) == (4, 2 * (4 * DIM + state))
    with torch.no_grad():
        kernel(features)
    assert (traffic.lookups, traffic.bytes_written) == (8, 2 * (4 * DIM + state))
