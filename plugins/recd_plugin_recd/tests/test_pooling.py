"""Pooling plugins against plain ones, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from recd_plugin_recd.pooling import (
    AttentionPooling,
    DinPooling,
    MaxPooling,
    MeanPooling,
    SumPooling,
    TransformerPooling,
)
from recd_plugin_recd.pooling.din_modules import TargetAttention
from recd_plugin_recd.pooling.modules import EncoderLayer, SelfAttention, Transformer
from recd_plugin_recd.pooling.rows import JaggedRows, _cut
from recd_plugin_recd.pooling.target_attention import StackedTargetAttention
from recd_plugins.interfaces import Pooling

DIM = 8
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Short rows; one long one among short ones, so that rows are ordered; no ids; no rows; alike.
LENGTHS = [[3, 0, 5, 1], [2, 40, 0, 1, 9, 3, 38], [0, 0], [], [4], [6] * 3, [7, 0, 7, 8, 6, 7, 7]]


def sequences(lengths: list[int], device: str = "cpu") -> JaggedTensor:
    values = torch.randn(sum(lengths), DIM, device=device, requires_grad=True)
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int32, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("cls", "pool_row"),
    [
        (SumPooling, lambda row: row.sum(0)),
        (MeanPooling, lambda row: row.mean(0)),
        (MaxPooling, lambda row: row.amax(0)),
    ],
)
def test_reductions(cls: type[Pooling], pool_row: Callable[[Tensor], Tensor], device: str) -> None:
    check(cls(cls.Options()).build(DIM), pool_row, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_is_torchs_own(heads: int, device: str) -> None:
    torch.manual_seed(0)
    module = AttentionPooling(AttentionPooling.Options(heads=heads)).build(DIM)
    assert isinstance(module, SelfAttention)
    random_(module)
    oracle = nn.MultiheadAttention(DIM, heads, batch_first=True)
    oracle.load_state_dict(
        {
            "in_proj_weight": module.in_projection.weight,
            "in_proj_bias": module.in_projection.bias,
            "out_proj.weight": module.out_projection.weight,
            "out_proj.bias": module.out_projection.bias,
        }
    )
    oracle.to(device)
    check(module, lambda row: oracle(row[None], row[None], row[None])[0][0].mean(0), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(("layers", "heads", "feed_forward"), [(1, 2, 12), (3, 1, None)])
def test_the_transformer_is_torchs_own(
    layers: int, heads: int, feed_forward: int | None, norm: Any, device: str
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "feed_forward": feed_forward}
    module = TransformerPooling(TransformerPooling.Options(norm=norm, **sizes)).build(DIM)
    assert isinstance(module, Transformer)
    random_(module)
    layer = nn.TransformerEncoderLayer(
        DIM, heads, feed_forward or 4 * DIM, dropout=0, batch_first=True, norm_first=norm == "pre"
    )
    oracle = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    for ours, theirs in zip(module.layers, oracle.layers, strict=True):
        assert isinstance(ours, EncoderLayer)
        theirs.load_state_dict(torchs_names(ours))
    oracle.to(device)
    check(module, lambda row: oracle(row[None])[0].mean(0), device)


def torchs_names(layer: EncoderLayer) -> dict[str, Tensor]:
    parts = {
        "self_attn.in_proj_": layer.in_projection,
        "self_attn.out_proj.": layer.out_projection,
        "linear1.": layer.expand,
        "linear2.": layer.contract,
        "norm1.": layer.attention_norm,
        "norm2.": layer.feed_forward_norm,
    }
    return {
        f"{prefix}{name}": getattr(part, name)
        for prefix, part in parts.items()
        for name in ("weight", "bias")
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", ["softmax", "sigmoid"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shared", ["some", "one_row", "none"])
def test_din_is_attention_of_each_target(
    shared: str, heads: int, weights: Any, device: str
) -> None:
    torch.manual_seed(0)
    options = DinPooling.Options(target="item", heads=heads, weights=weights)
    module = DinPooling(options).build(DIM)
    assert isinstance(module, TargetAttention)
    check_targets(module, one_target, shared, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("shared", ["some", "one_row", "none"])
def test_stacked_target_attention_is_layers_of_din(shared: str, layers: int, device: str) -> None:
    torch.manual_seed(0)
    module = StackedTargetAttention(DIM, 2, layers, feed_forward=6, positions=3)
    check_targets(module, by_layers, shared, device)


def by_layers(module: StackedTargetAttention, query: Tensor, row: Tensor) -> Tensor:
    assert module.positions is not None
    from_end = torch.arange(len(row)).flip(0).clamp(max=2)
    row = row + module.positions[from_end.to(row.device)]
    for number, layer in enumerate(module.layers):
        assert isinstance(layer, TargetAttention)
        found = one_target(layer, query, row)
        last = number == len(module.layers) - 1
        query = found if last else module.norms[number](query + found)
        query = query + module.feed_forwards[number](query)
    return query


def test_target_attention_stores_no_value_per_candidate_and_position() -> None:
    """Saved activations of 2,000 candidates of 10 histories are far below [B, L, D]."""
    candidates, length = 200, 300
    module = StackedTargetAttention(DIM, 2, 2)
    jagged = sequences([length] * 10)
    inverse = torch.arange(10).repeat_interleave(candidates)
    targets = torch.randn(len(inverse), DIM, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(jagged, targets, inverse)
    per_row_and_position = len(inverse) * length * DIM * 4
    assert sum(saved.values()) < per_row_and_position / 10
    assert max(saved.values()) < per_row_and_position / 50


def check_targets(
    module: Any, pool: Callable[[Any, Tensor, Tensor], Tensor], shared: str, device: str
) -> None:
    random_(module)
    module.to(device)
    for lengths in LENGTHS[:3] + LENGTHS[4:]:
        num_rows = len(lengths)
        inverse = {
            "some": torch.randint(num_rows, (11,)),
            "one_row": torch.cat([torch.full((9,), num_rows - 1), torch.arange(num_rows)]),
            "none": torch.randperm(num_rows),
        }[shared].to(device)
        jagged = sequences(lengths, device)
        targets = torch.randn(len(inverse), DIM, device=device, requires_grad=True)
        rows = torch.split(jagged.values(), lengths)
        nothing = jagged.values().sum() * 0
        expected = [
            pool(module, target, rows[row]) if lengths[row] else target * 0 + nothing
            for target, row in zip(targets, inverse.tolist(), strict=True)
        ]
        inputs = [jagged.values(), targets]
        compare(module(jagged, targets, inverse), torch.stack(expected), inputs)


def one_target(module: TargetAttention, target: Tensor, row: Tensor) -> Tensor:
    queries = module.query_projection(target).chunk(module.heads)
    keys = module.key_projection(row).chunk(module.heads, dim=1)
    values = (row @ module.value_projection.weight.T).chunk(module.heads, dim=1)
    sums = []
    for query, key, value in zip(queries, keys, values, strict=True):
        scores = key @ query / query.numel() ** 0.5
        weights = scores.softmax(0) if module.weights == "softmax" else scores.sigmoid()
        sums.append(weights @ value)
    return module.out_projection(torch.cat(sums) + module.value_projection.bias)


def random_(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)


def check(module: nn.Module, pool_row: Callable[[Tensor], Tensor], device: str) -> None:
    module.to(device)
    for lengths in LENGTHS:
        torch.manual_seed(1)
        jagged = sequences(lengths, device)
        pooled = module(jagged)
        assert pooled.shape == (len(lengths), DIM)
        if not any(lengths):
            assert not pooled.any()
            continue
        rows = torch.split(jagged.values(), lengths)
        zeros = torch.zeros(DIM, device=device)
        expected = [pool_row(row) if len(row) else zeros for row in rows]
        compare(pooled, torch.stack(expected), [jagged.values()])


def compare(found: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if wanted.requires_grad:
        weights = torch.randn(found.shape, device=found.device)
        gradients = [
            torch.autograd.grad((each * weights).sum(), inputs, retain_graph=True)
            for each in (found, wanted)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_long_rows_do_not_pad_short_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(300, generator=generator).add(2.6).exp().long().clamp(max=200)
    values = torch.zeros(int(lengths.sum()), DIM)
    rows = JaggedRows([JaggedTensor(values, lengths=lengths)])
    assert sum(places.shape[0] for places in rows._padded(values)) < 1.4 * len(values)
    assert len(lengths) * int(lengths.max()) > 5 * len(values)


def test_no_bucket_has_more_rows_than_the_kernels_of_cuda_take() -> None:
    buckets = _cut(torch.cat([torch.zeros(1), torch.ones(70_000), torch.tensor([2.0])]).long())
    assert max(bucket.num_rows for bucket in buckets) == 65_535
    assert sum(bucket.num_rows for bucket in buckets) == 70_002
