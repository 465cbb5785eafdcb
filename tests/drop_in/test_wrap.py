"""A model of a trainer, with a registry file or without: what is the trainer's stays so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.drop_in.dedup_cases import Model
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recd_plugins
from recd_plugins.compat.row_updates import check_updates
from recd_plugins.runtime.errors import RegistryError, SetupError

ROW_WISE = "sharding: [{use: torchrec.row_wise, tables: [t_f0]}]"


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(*sections: str) -> Path:
        path = tmp_path / "registry.yaml"
        path.write_text("\n".join(["version: 1", *sections]), encoding="utf-8")
        return path

    return write


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def params_of_bags(sharders: list[Any]) -> dict[str, Any]:
    return dict(sharders[0].fused_params)


def test_without_a_file_the_optimizer_is_the_trainers() -> None:
    model = Model()
    ready = recd_plugins.wrap(model)
    assert ready.model is model
    assert params_of_bags(ready.sharders(get_default_sharders())) == {}
    mine = EmbeddingBagCollectionSharder({"learning_rate": 0.5})
    assert params_of_bags(ready.sharders([mine])) == {"learning_rate": 0.5}
    plan = ready.planner(world_size=2).plan(model, ready.sharders())
    assert set(plan.plan["bags"]) == {"t_f0", "t_f1", "t_f2"}


def test_wrap_imports_no_plugin_and_nothing_slow() -> None:
    code = """
import sys, recd_plugins
from tests.drop_in.test_torchrec_plans import model_of
recd_plugins.wrap(model_of("two towers")).sharders()
slow = {"torch.distributed.optim", "matplotlib", "pandas", "duckdb"}
print(sorted(n for n in sys.modules if n in slow or n.startswith("recd_plugin_")))
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_a_file_needs_no_data(file: Any) -> None:
    ready = recd_plugins.wrap(model := Model(), file(ROW_WISE), batch_size=64)
    assert ready.registry.training.batch_size == 64
    plan = ready.planner(world_size=2).plan(model, ready.sharders())
    assert plan.plan["bags"]["t_f0"].sharding_type == "row_wise"
    assert params_of_bags(ready.sharders()) == {}


def test_an_optimizer_that_a_file_names_counts(file: Any) -> None:
    path = file(ROW_WISE, "training: {optimizer: sgd, learning_rate: 0.3}")
    params = params_of_bags(recd_plugins.wrap(Model(), path).sharders())
    assert params == {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "optimizers: [{use: torchrec.sgd, tables: ['*'], options: {learning_rate: 0.5}}]",
            r"registry\.yaml:2 optimizers\[0\]: torchrec\.sgd, and the trainer's fused_params name",
        ),
        (
            "training: {optimizer: sgd, learning_rate: 0.3}",
            r"registry\.yaml: training\.optimizer: sgd, and the trainer's fused_params name exact",
        ),
    ],
    ids=["entry", "training"],
)
def test_two_optimizers_of_a_table_are_refused(file: Any, section: str, said: str) -> None:
    ready = recd_plugins.wrap(Model(), file(section))
    mine = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05}
    with pytest.raises(SetupError, match=said):
        ready.sharders([EmbeddingBagCollectionSharder(mine)])
    with pytest.raises(SetupError, match=said):
        ready.sharders(fused_params=mine)
    ready.sharders([EmbeddingBagCollectionSharder({"gradient_clipping": True})])


def test_sections_that_change_nothing_are_named(
    file: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recd_plugins.wrap(Model(), file(ROW_WISE, "training: {batch_size: 64, device: cpu}"))
    assert "they change nothing" not in caplog.text
    of_runs = "metrics: [{use: torchrec.rec_metrics}]\nmodel: {embedding_dim: 32}"
    training = "training: {epochs: 3, checkpoint: {path: a}, wire: fp16, device: cuda}"
    recd_plugins.wrap(Model(), file(ROW_WISE, of_runs, training))
    named = (
        "metrics, model, training.checkpoint, training.device, training.epochs: for recd run, or"
    )
    assert named in caplog.text


KIND = '''
from recd_plugins.api import Callback, Kind, hookimpl

class Watch(Callback):
    """Look on."""
    kind, name = "watch", "acme.watch"

@hookimpl
def register_kinds():
    return [Kind("watch", Watch, "watches", "by table", "Who looks on.", "a.B", True)]

@hookimpl
def register_plugins():
    return [Watch]
'''


def test_a_section_of_a_further_kind_is_named_though_it_is_about_tables(
    file: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "watch.py").write_text(KIND, encoding="utf-8")
    path = file(ROW_WISE, "watches: [{use: acme.watch, tables: [t_f0]}]")
    recd_plugins.wrap(Model(), path, plugins_dir=tmp_path / "plugins")
    assert "registry.yaml: watches: for recd run, or" in caplog.text


def test_who_runs_a_file_needs_its_data(file: Any) -> None:
    with pytest.raises(RegistryError, match="dataset: is missing"):
        recd_plugins.load_registry(file(ROW_WISE))


@pytest.mark.parametrize(
    ("section", "missing"),
    [
        ("dataset: {use: dlrm.random, options: {rows: 64, sparse: {f0: 9}}}", "converter"),
        ("converter: {use: recd.kjt}", "dataset"),
        (
            "preprocessing: [{use: recd.sigrid_hash, features: [f0], options: {buckets: 9}}]",
            "dataset",
        ),
    ],
    ids=["dataset", "converter", "preprocessing"],
)
def test_a_section_that_would_be_ignored_is_refused(file: Any, section: str, missing: str) -> None:
    with pytest.raises(RegistryError, match=f"{missing}: is missing"):
        recd_plugins.wrap(Model(), file(section))


def test_what_needs_rows_says_so(file: Any) -> None:
    path = file("cache: [{use: scars.cache, tables: [t_f0], options: {share: 0.1}}]")
    with pytest.raises(RegistryError, match=r"yaml:2 cache\[0\]: this needs rows .* no dataset"):
        recd_plugins.wrap(Model(), path)


def test_wrong_files_are_refused_as_ever(file: Any) -> None:
    with pytest.raises(RegistryError, match=r"no sharding plugin is named torchrec\.row_wize"):
        recd_plugins.wrap(Model(), file(ROW_WISE.replace("wise", "wize")))


class Two(nn.Module):
    def __init__(self, shares: str) -> None:
        super().__init__()
        self.first, self.second = Model(), Model()
        if shares == "module":
            self.second.bags = self.first.bags
        else:
            weight = self.first.bags.embedding_bags["t_f0"].weight
            self.second.bags.embedding_bags["t_f0"].weight = weight


@pytest.mark.parametrize("shares", ["module", "parameter"])
def test_a_table_of_two_modules_is_refused(shares: str) -> None:
    with pytest.raises(SetupError, match=r"first\.bags and second\.bags share a table"):
        recd_plugins.wrap(Two(shares))


def test_two_tables_of_one_weight_are_refused() -> None:
    model = Model()
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=9, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    model.bags = EmbeddingBagCollection(tables=tables)
    model.bags.embedding_bags["t1"].weight = model.bags.embedding_bags["t0"].weight
    with pytest.raises(SetupError, match=r"t0\.weight and .*t1\.weight of bags are one weight"):
        recd_plugins.wrap(model)


def test_a_frozen_table_is_refused() -> None:
    model = Model()
    model.bags.embedding_bags["t_f0"].weight.requires_grad_(False)
    with pytest.raises(SetupError, match=r"t_f0\.weight of bags is frozen .* learning rate of 0"):
        recd_plugins.wrap(model)


def test_a_table_that_is_frozen_later_is_refused_where_it_is_sharded(one_rank: None) -> None:
    ready = recd_plugins.wrap(model := Model())
    sharders: list[Any] = ready.sharders()
    plan: Any = ready.planner(world_size=1).plan(model, sharders).plan["bags"]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model.bags.requires_grad_(False)
    with pytest.raises(SetupError, match=r"^t_f0 of bags is frozen .* learning rate of 0"):
        sharders[0].shard(model.bags, plan, env, torch.device("cpu"), "bags")


def test_a_table_that_is_a_layers_weight_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 30)
            self.inner = Model()
            self.out.weight = self.inner.bags.embedding_bags["t_f0"].weight

    with pytest.raises(
        SetupError, match=r"^out\.weight is a table of inner\.bags, and Distributed"
    ):
        recd_plugins.wrap(Tied())


def test_a_subclass_that_brings_an_optimizer_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bags(EmbeddingBagCollection):
        pass

    model = Model()
    model.bags.__class__ = Bags
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.1})
    recd_plugins.wrap(model)
    assert "bags is a Bags, a subclass of EmbeddingBagCollection" in caplog.text


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "exact_sgd do nothing with momentum"),
        (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, "CPU kernels do nothing with weight_"),
        (RowWiseAdagrad, {"lr": 0.1, "max_norm": 1.0}, "CPU kernels do nothing with max_norm"),
    ],
    ids=["momentum", "weight_decay", "max_norm"],
)
def test_arguments_that_do_nothing_are_refused(
    optimizer: Any, arguments: dict[str, Any], message: str
) -> None:
    model = Model()
    apply_optimizer_in_backward(optimizer, model.bags.parameters(), arguments)
    with pytest.raises(SetupError, match=f"table t_f0: .*{message}"):
        _check(model, {})


def test_fused_params_that_do_nothing_are_refused() -> None:
    with pytest.raises(SetupError, match=r"table t_f0: .* do nothing with weight_decay"):
        _check(Model(), {"weight_decay": 0.1})


def test_a_rate_that_nobody_gave_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {})
    _check(model, {"learning_rate": 0.3})
    assert not caplog.records
    _check(model, {})
    assert "SGD was given no lr, and FBGEMM's default of 0.01 counts" in caplog.text


def test_one_dict_of_arguments_is_for_two_optimizers(one_rank: None) -> None:
    """TorchRec writes the first one's update into it, and trains all tables by that."""
    model, given = Model(), {"lr": 0.1}
    first, *others = (each.weight for each in model.bags.embedding_bags.values())
    apply_optimizer_in_backward(RowWiseAdagrad, [first], given)
    apply_optimizer_in_backward(torch.optim.SGD, others, given)
    ready = recd_plugins.wrap(model)
    sharders = ready.sharders()
    dmp = DistributedModelParallel(
        model, plan=ready.planner(world_size=1).plan(model, sharders), sharders=sharders
    )
    told = {line.name: line.optimizer for line in recd_plugins.describe_tables(dmp).lines}
    assert told == {
        "t_f0": "exact_row_wise_adagrad, lr 0.1",
        "t_f1": "exact_sgd, lr 0.1",
        "t_f2": "exact_sgd, lr 0.1",
    }
    assert given == {"lr": 0.1}


def _check(model: Model, fused_params: dict[str, Any]) -> None:
    parameters = {name: bag.weight for name, bag in model.bags.embedding_bags.items()}
    plan = {name: ParameterSharding("table_wise", "fused", [0]) for name in parameters}
    check_updates(plan, parameters, fused_params, torch.device("cpu"))
