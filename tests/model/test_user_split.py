"""User layers that run once per request row compute the same as layers that run per row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from tests.small_registry import write_registry
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recd_plugins import RunConfig, load_registry
from recd_plugins.config import ModelSpec
from recd_plugins.data.row_pipeline import lower
from recd_plugins.interfaces.batch import Batch, ModelInput, Placement
from recd_plugins.interfaces.tasks import Task
from recd_plugins.model import user_split
from recd_plugins.model.dlrm import DLRM
from recd_plugins.model.multi_task import num_first_layers
from recd_plugins.model.sequence_pooling import put_poolings
from recd_plugins.model.user_split import RequestRowsOfBatch
from recd_plugins.runtime.launch import launch
from recd_plugins.sparse.ikjt import InverseKeyedJaggedTensor
from recd_plugins.sparse.request_rows import RequestRows
from recd_plugins.testing.fake_cuda import fake_cuda

USER, CANDIDATE = ("user", "country", "region", "seen", "liked"), ("item", "shop", "tags", "rival")
NAMES = (*USER, *CANDIDATE)
PLACEMENT = Placement(("item", "user", "country"), ("region", "shop"), ("seen", "liked", "tags"))
#: Rows of each request. The first and the last one are cut by borders of the batch.
REQUESTS = (3, 1, 7, 1, 4, 2)


@pytest.fixture
def registry(tmp_path: Path) -> RunConfig:
    din = {"use": "recd.din", "features": ["liked"], "options": {"target": "seen"}}
    pooling = [{"use": "recd.mean", "features": ["[!l]*"]}, din]
    return load_registry(write_registry(tmp_path, pooling=pooling))


def request_rows(*sides: Tensor) -> Tensor:
    """Return ``[B, columns]``: columns of the user, repeated per request, and of candidates."""
    user, rows = sides
    return torch.cat([user.repeat_interleave(torch.tensor(REQUESTS), 0), rows], dim=1)


def batch(placement: Placement, dense: tuple[int, int], user: tuple[str, ...]) -> ModelInput:
    num_requests, num_rows = len(REQUESTS), sum(REQUESTS)
    rows: list[list[Tensor]] = []
    for name in NAMES:
        count = num_requests if name in USER else num_rows
        lists = [torch.randint(0, 9, (int(n),)) for n in torch.randint(0, 4, (count,))]
        repeats = REQUESTS if name in USER else [1] * num_rows
        rows.append([ids for ids, times in zip(lists, repeats, strict=True) for _ in range(times)])
    lengths = torch.tensor([len(ids) for of_feature in rows for ids in of_feature])
    kjt = KeyedJaggedTensor(list(NAMES), torch.cat([*map(torch.cat, rows)]), lengths=lengths)
    groups = [("user", "seen"), ("country", "region", "liked")]
    plain = kjt.split([len(USER), len(CANDIDATE)])[1]
    columns = request_rows(
        torch.randn(num_requests, dense[0]).double(), torch.randn(num_rows, dense[1]).double()
    )
    labels = torch.randint(0, 2, (num_rows,)).double()
    ikjts = InverseKeyedJaggedTensor.from_kjt(kjt, groups)
    return lower(Batch(columns, labels, plain, ikjts, (), user, tuple(range(dense[0]))), placement)


def in_float64(model: DLRM) -> None:
    """Compute layers in float64. TorchRec's embedding modules return float32."""
    model.top.double()
    if model.sequence_pooling is not None:
        model.sequence_pooling.double()

    def pooled(_: Any, __: Any, out: KeyedTensor) -> KeyedTensor:
        return KeyedTensor(out.keys(), out.length_per_key(), out.values().double())

    def unpooled(_: Any, __: Any, out: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {n: JaggedTensor(j.values().double(), lengths=j.lengths()) for n, j in out.items()}

    modules = ((model.bags, pooled), (model.replicated_bags, pooled), (model.sequences, unpooled))
    for module, hook in modules:
        if module is not None:
            module.register_forward_hook(hook)


ARCHITECTURES: list[dict[str, Any]] = [
    {"top_mlp": [9]},
    {"architecture": "dcn", "cross_layers": 2, "low_rank_dim": 5},
    {"architecture": "dcn", "cross_net": "full"},
    {"architecture": "dcn", "cross_net": "vector"},
]
DENSE = [(0, 0), (2, 0), (0, 2), (9, 2), (1, 2)]
CASES = [
    *((options, dense, PLACEMENT, USER) for options in ARCHITECTURES for dense in DENSE),
    (ARCHITECTURES[0], (0, 2), PLACEMENT, ("user", "seen")),  # others of the user's group stay
    (ARCHITECTURES[0], (3, 0), Placement((), (), ("seen", "liked")), USER),  # no candidates
    (ARCHITECTURES[1], (2, 1), Placement(("item",), (), ("liked", "seen")), ("liked", "seen")),
    (ARCHITECTURES[0], (0, 2), Placement(("user", "country")), USER),
    ({"top_mlp": [9], "multi_task": {}}, (1, 2), PLACEMENT, USER),
    *(
        ({**model, "multi_task": {"kind": kind}}, (1, 2), PLACEMENT, USER)
        for kind in ("mmoe", "ple")
        for model in ARCHITECTURES[:2]
    ),
]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("options", "dense", "placement", "user"), CASES)
def test_loss_and_gradients_are_those_of_layers_per_row(
    registry: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    dense: tuple[int, int],
    placement: Placement,
    user: tuple[str, ...],
    padding: bool,
) -> None:
    used = Mock(wraps=user_split.UserSplit.logits)
    monkeypatch.setattr(user_split.UserSplit, "logits", lambda *arguments: used(*arguments))
    monkeypatch.setitem(user_split._MIN_SAVED, "cpu", 1)
    if padding:
        monkeypatch.setattr(user_split, "_NUM_BUCKETS", 2)
        chosen = user_split.RequestRowsOfBatch.forward
        monkeypatch.setattr(
            user_split.RequestRowsOfBatch,
            "forward",
            lambda *arguments: (found := chosen(*arguments)) and user_split.padded(found),
        )
    found = []
    for user_rows in ("unique", "all"):
        torch.manual_seed(0)
        spec = ModelSpec.model_validate(
            {"embedding_dim": 4, "num_embeddings": 9, "user_rows": user_rows, **options}
        )
        tasks = (Task("a"), Task("b", "regression", loss="mse")) if spec.multi_task else ()
        model = DLRM(spec, sum(dense), placement, tasks=tasks)
        if placement.sequence:
            put_poolings(registry, model)
        in_float64(model)
        losses = []
        for _ in range(2):
            given = batch(placement, dense, user)
            if tasks:
                given = replace(given, labels=torch.stack([given.labels] * 2, dim=1))
            loss, (_, predicted, _) = model(given)
            loss.backward()
            losses += [loss.detach(), predicted]
        gradients = {name: each.grad for name, each in model.named_parameters()}
        found.append((losses, gradients))
    assert used.call_count == 2
    of_tables = [{name: each[1].pop(name) for name in [*each[1]] if "t_" in name} for each in found]
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    torch.testing.assert_close(*of_tables, rtol=0, atol=1e-6)


def test_the_split_needs_to_save_more_than_it_costs() -> None:
    request = RequestRows(torch.arange(64) // 16, torch.arange(4) * 16, tuple("abcdefghijklmnop"))
    batch = ModelInput(torch.zeros(64, 2), None, torch.zeros(64), request=request)
    for num_features, num_layers, splits in ((4, 1, False), (4, 12, True), (16, 1, True)):
        features = request.features[:num_features]
        choose = RequestRowsOfBatch(ModelSpec(), features, 2, num_layers)
        assert (choose(batch) is request) is splits
    rare = replace(request, first_rows=torch.arange(64), inverse=torch.arange(64))
    assert (
        RequestRowsOfBatch(ModelSpec(), request.features, 2)(replace(batch, request=rare)) is None
    )


def test_each_expert_is_a_first_layer() -> None:
    for options, expected in (
        (None, 1),
        ({}, 1),
        ({"kind": "mmoe", "experts": 3}, 3),
        ({"kind": "ple", "experts": 3, "task_experts": 2}, 7),
    ):
        spec = ModelSpec.model_validate({"multi_task": options})
        assert num_first_layers(spec, num_tasks=2) == expected


def check_on_cuda(_rank: int, _world_size: int, path: Path) -> None:
    user_split._MIN_SAVED["cuda"] = 0
    registry, split = load_registry(path), Mock(wraps=user_split.UserSplit)

    def trained(user_rows: str, device: torch.device) -> list[float]:
        torch.manual_seed(0)
        options = {"embedding_dim": 4, "num_embeddings": 9, "user_rows": user_rows}
        model = DLRM(ModelSpec.model_validate(options), 2, PLACEMENT)
        put_poolings(registry, model)
        model.to(device)
        results: list[float] = []
        for _ in range(3):  # the third step replays a CUDA graph
            rows = batch(PLACEMENT, (0, 2), USER)
            of_rows = rows.dense_features.float(), rows.labels.float()
            rows = replace(rows, dense_features=of_rows[0], labels=of_rows[1]).to(device)
            loss, (_, logits, _) = model(rows)
            loss.backward()
            results += [float(loss.detach()), *logits.tolist()]
        return results + [float(each.grad.sum()) for each in model.parameters()]

    with fake_cuda() as device, patch("recd_plugins.model.dlrm.UserSplit", split):
        found = trained("unique", device)
    assert found == pytest.approx(trained("all", torch.device("cpu")), abs=1e-5)
    split.assert_called_once()


def test_it_runs_on_cuda(registry: RunConfig) -> None:
    launch(check_on_cuda, 1, registry.path)
