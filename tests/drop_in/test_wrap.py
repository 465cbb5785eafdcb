"""A model of a trainer, with a registry file or without: what is the trainer's stays so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests import forked
from tests.drop_in.trainer import Model
from tests.sharded import CPU, bags, everyone, one_rank, sequences, sharded
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recd_plugins
from recd_plugins.runtime.errors import RecdError, RegistryError, SetupError
from recd_plugins.training.rank_state import copy_weights, first_weights

ROW_WISE = "sharding: [{use: torchrec.row_wise, tables: [t_f0]}]"
SGD = "training: {optimizer: sgd, learning_rate: 0.3}"
SGD_ENTRY = "optimizers: [{use: torchrec.sgd, tables: ['*'], options: {learning_rate: 0.5}}]"
RANDOM = "dataset: {use: dlrm.random, options: {rows: 64, sparse: {f0: 9}}}"
HASH = "preprocessing: [{use: recd.sigrid_hash, features: [f0], options: {buckets: 9}}]"
CACHE = "cache: [{use: scars.cache, tables: [t_f0], options: {share: 0.1}}]"


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(*sections: str) -> Path:
        path = tmp_path / "registry.yaml"
        path.write_text("\n".join(["version: 1", *sections]), encoding="utf-8")
        return path

    return write


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


def test_what_wrap_returns_is_copied() -> None:
    ready = pickle.loads(pickle.dumps(recd_plugins.wrap(bags("f"))))
    assert [type(each) for each in copy.deepcopy(ready).sharders()]


def test_wrap_imports_no_plugin_and_nothing_slow() -> None:
    code = """
import torch.distributed
from tests.drop_in.test_torchrec_plans import model_of
vars(torch.distributed).pop("optim", None)
import recd_plugins
recd_plugins.wrap(model_of("two towers")).sharders()
"""
    slow = ("torch.distributed.optim", "matplotlib", "pandas", "duckdb")
    found = forked.imported_anew(code, "recd_plugins", "recd_plugin_", *slow)
    assert not [name for name in found if name.startswith(("recd_plugin_", *slow))]
    assert "recd_plugins" in found


def test_a_file_needs_no_data(file: Any, caplog: pytest.LogCaptureFixture) -> None:
    ready = recd_plugins.wrap(model := Model(), file(ROW_WISE), batch_size=64)
    assert ready.registry.training.batch_size == 64
    plan = ready.planner(world_size=2).plan(model, ready.sharders())
    assert plan.plan["bags"]["t_f0"].sharding_type == "row_wise"
    assert params_of_bags(ready.sharders()) == {}
    with pytest.raises(RegistryError, match="dataset: this required key is missing"):
        recd_plugins.load_registry(file(ROW_WISE))  # which who runs it needs
    ready = recd_plugins.wrap(bags("f"), file("sharding: [{use: auto}]"))
    assert f"{ready.chosen}; the registry file has no dataset, so the plan" in caplog.text


def test_an_optimizer_that_a_file_names_counts(file: Any) -> None:
    path = file(ROW_WISE, SGD)
    params = params_of_bags(recd_plugins.wrap(Model(), path).sharders())
    assert params == {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}
    path = file("training: {eps: 0.5, optimizer: rowwise_adagrad}")
    assert params_of_bags(recd_plugins.wrap(Model(), path).sharders())["eps"] == 0.5


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (SGD_ENTRY, r"yaml:2 optimizers\[0\] sets torchrec\.sgd, but the fused_params of a"),
        (SGD, r"registry\.yaml: training\.optimizer is sgd, but the fused_params .*exact"),
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


KIND = '''
from recd_plugins.api import Callback, Kind, hookimpl

class Watch(Callback):
    """Look on."""
    kind, name = "watch", "acme.watch"

@hookimpl
def register_kinds():
    return [Kind("watch", Watch, "watches", "by table", "Who looks on.", True)]

@hookimpl
def register_plugins():
    return [Watch]
'''


def test_sections_that_change_nothing_are_named(
    file: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recd_plugins.wrap(Model(), file(ROW_WISE, "training: {batch_size: 64, device: cpu}"))
    assert "have no effect" not in caplog.text
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "watch.py").write_text(KIND, encoding="utf-8")
    of_runs = "metrics: [{use: torchrec.rec_metrics}]\nmodel: {embedding_dim: 32}"
    training = "training: {eps: 3, schedule: {warmup: 3}, wire: fp16, device: cuda}"
    # Of a further kind, though about tables.
    watches = "watches: [{use: acme.watch, tables: [t_f0]}]"
    path = file(ROW_WISE, of_runs, training, watches)
    recd_plugins.wrap(Model(), path, plugins_dir=tmp_path / "plugins")
    assert "model, training.device, training.eps, training.schedule have no effect" in caplog.text
    assert "metrics, " in caplog.text
    assert "watches, " in caplog.text


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (RANDOM, "converter: this required key is missing"),
        ("converter: {use: recd.kjt}", "dataset: this required key is missing"),
        (HASH, "dataset: this required key is missing"),
        (CACHE, r"yaml:2 cache\[0\]: this command needs training data.* dataset: and converter:"),
        (ROW_WISE.replace("wise", "wize"), "no sharding plugin is named 'torchrec.row_wize"),
    ],
)
def test_wrong_files_are_refused(file: Any, section: str, said: str) -> None:
    with pytest.raises(RecdError, match=said):
        recd_plugins.wrap(Model(), file(section))


def _table(model: Model, name: str = "t_f0") -> Any:
    return model.bags.embedding_bags[name]


def _two(shared: str) -> nn.Module:
    first, second = Model(), Model()
    if shared == "module":
        second.bags = first.bags
    else:
        _table(second).weight = _table(first).weight
    return nn.ModuleDict({"first": first, "second": second})


def _one_weight() -> nn.Module:
    model = Model()
    _table(model, "t_f1").weight = _table(model).weight
    return model


def _frozen() -> nn.Module:
    model = Model()
    _table(model).weight.requires_grad_(False)
    return model


def _tied() -> nn.Module:
    out, inner = nn.Linear(8, 30), Model()
    out.weight = _table(inner).weight
    return nn.ModuleDict({"out": out, "inner": inner})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: _two("module"), r"first\.bags' and 'second\.bags' share a table"),
        (lambda: _two("parameter"), r"first\.bags' and 'second\.bags' share a table"),
        (_one_weight, r"t_f0\.weight' and '.*t_f1\.weight' of module 'bags' are the same tensor"),
        (_frozen, r"t_f0\.weight' of module 'bags' is frozen .* learning rate 0"),
        (_tied, r"'out\.weight' is also the weight of a table of module 'inner\.bags', but"),
    ],
    ids=["module", "parameter", "weight", "frozen", "tied"],
)
def test_models_that_would_train_otherwise_are_refused(
    make: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        recd_plugins.wrap(make())


def test_a_table_that_is_frozen_later_is_refused_where_it_is_sharded() -> None:
    ready = recd_plugins.wrap(model := Model())
    sharders: list[Any] = ready.sharders()
    plan: Any = ready.planner(world_size=1).plan(model, sharders).plan["bags"]
    model.bags.requires_grad_(False)
    told = r"^parameter 't_f0' of module 'bags' is frozen .* rate 0"
    with one_rank(), pytest.raises(SetupError, match=told):
        sharders[0].shard(model.bags, plan, everyone(), CPU, "bags")


def test_one_dict_of_arguments_is_for_two_optimizers() -> None:
    """TorchRec writes the first one's update into it, and trains all tables by that."""
    model, given = Model(), {"lr": 0.1}
    first, *others = (each.weight for each in model.bags.embedding_bags.values())
    apply_optimizer_in_backward(RowWiseAdagrad, [first], given)
    apply_optimizer_in_backward(torch.optim.SGD, others, given)
    ready = recd_plugins.wrap(model)
    sharders = ready.sharders()
    plan = ready.planner(world_size=1).plan(model, sharders)
    with one_rank():
        dmp = sharded(model, plan, sharders, CPU)
    told = {line.name: line.optimizer for line in recd_plugins.describe_tables(dmp).lines}
    sgd = dict.fromkeys(("t_f1", "t_f2"), "exact_sgd, lr 0.1")
    assert told == {"t_f0": "exact_row_wise_adagrad, lr 0.1", **sgd}
    assert given == {"lr": 0.1}


def test_weights_of_another_model() -> None:
    weights = first_weights(sequences("f"))
    with pytest.raises(SetupError, match=r"such as 'embeddings\.t_f\.weight', is"):
        copy_weights(bags("f").state_dict(), weights)
