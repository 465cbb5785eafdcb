"""Optimizer entries train tables as TorchRec's optimizers do, or are refused by name and line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.training import optimizer_cases as cases
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recd_plugins import RunConfig, load_registry
from recd_plugins.interfaces import TableStrategy
from recd_plugins.interfaces.model_tables import embedding_modules, tables_of
from recd_plugins.model.deferred_tables import deferred_tables
from recd_plugins.planning.prepared import apply_optimizers
from recd_plugins.runtime.errors import PluginError, RegistryError
from recd_plugins.testing.gloo import run_on_ranks

HEAD = """version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: {user: 9, item: 9}}}
converter: {use: recd.kjt}
"""


def test_parity(tmp_path: Path) -> None:
    entries = [
        {"use": use, "tables": [table], "options": options}
        for table, (use, options) in cases.ENTRIES.items()
    ]
    training = {"optimizer": "sgd", **cases.TRAINING}
    path = tmp_path / "registry.yaml"
    path.write_text(f"{HEAD}optimizers: {json.dumps(entries)}\ntraining: {training}\n")
    for found in run_on_ranks(cases.run_cases, 2, path, ["table_wise", "row_wise"]):
        for difference in found:
            assert max(difference.stock.values()) <= 1e-6
            assert difference.unsharded <= 1e-6
            assert min(difference.moved.values()) > 1e-4


PLUGIN = """
import torch
import torchrec.optim
from torch.optim import Adamax
from recd_plugins.api import DataError, Optimizer, RowUpdate, hookimpl

class Own(torch.optim.SGD):
    pass

RETURNED = {
    "nothing": None,
    "pair": (torch.optim.SGD, {"lr": 0.1}),
    "text": RowUpdate("SGD", {}),
    "clips": RowUpdate(torchrec.optim.SGD, {"lr": 0.1, "gradient_clipping": True}),
    "unknown_class": RowUpdate(Own, {"lr": 0.1}),
    "momentum": RowUpdate(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "unknown_argument": RowUpdate(torch.optim.SGD, {"rate": 0.1}),
    "adagrad": RowUpdate(torch.optim.Adagrad, {"lr": 0.1}),
    "nan": RowUpdate(torch.optim.SGD, {"lr": float("nan")}),
    "negative": RowUpdate(torch.optim.SGD, {"lr": -1.0}),
    "text_rate": RowUpdate(torch.optim.SGD, {"lr": "0.1"}),
}

class Mine(Optimizer):
    "Rates by width."
    name = "acme.mine"

    def update(self, table):
        if table.name == "t_refused":
            raise DataError("it is too wide")
        if table.name == "t_raised":
            return 1 / 0
        return RETURNED.get(table.name[2:], RowUpdate(torch.optim.SGD, {"lr": table.embedding_dim}))

@hookimpl
def register_plugins():
    return [Mine]
"""


def registry_of(folder: Path, text: str) -> RunConfig:
    (folder / "plugins").mkdir()
    (folder / "plugins" / "acme.py").write_text(PLUGIN)
    (folder / "registry.yaml").write_text(HEAD + text)
    return load_registry(folder / "registry.yaml", plugins_dir=folder / "plugins")


def model_of(*names: str, device: str = "meta") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=20, feature_names=[name[2:]]
            )
            for name in names
        ],
    )


def applied(
    registry: RunConfig,
    model: EmbeddingBagCollection,
    device_type: str | None = "cpu",
    parts: Mapping[str, TableStrategy] | None = None,
) -> EmbeddingBagCollection:
    apply_optimizers(
        registry, list(embedding_modules(model)), tables_of(model), device_type, parts or {}
    )
    return model


MINE = "optimizers:\n  - {use: acme.mine, tables: [t_a]}\n"


def test_a_plugin_of_ones_own_sees_its_tables(tmp_path: Path) -> None:
    model = applied(registry_of(tmp_path, MINE), model_of("t_a", "t_b"))
    weights = dict(model.named_parameters())
    assert weights["embedding_bags.t_a.weight"]._optimizer_kwargs == [{"lr": 8}]
    assert not hasattr(weights["embedding_bags.t_b.weight"], "_optimizer_kwargs")


def test_tables_that_have_no_memory_yet_need_none(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", "t_adagrad"))
    with deferred_tables() as deferred:
        applied(registry, model_of("t_adagrad", device="cpu"))
    assert not deferred.touched


@pytest.mark.parametrize(
    ("table", "kind", "said"),
    [
        ("unknown_class", PluginError, r"returned Cannot cast .*acme.Own"),
        (
            "momentum",
            RegistryError,
            r"yaml:5 optimizers\[0\]: table t_momentum: .* nothing with mom",
        ),
        ("refused", RegistryError, r"yaml:5 optimizers\[0\]: it is too wide"),
        (
            "raised",
            ZeroDivisionError,
            r"acme.mine: update of table t_raised failed at .*acme.py:\d+",
        ),
    ],
)
def test_what_a_plugin_cannot_return(
    tmp_path: Path, table: str, kind: type[Exception], said: str
) -> None:
    registry = registry_of(tmp_path, MINE.replace("t_a", f"t_{table}"))
    with pytest.raises(kind, match=said):
        applied(registry, model_of(f"t_{table}"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sharding: [{use: torchrec.data_parallel, tables: [t_a]}]", "whole on every rank"),
        ("sharding: [{use: torchrec.row_wise, tables: [t_a]}]", "trains rows by training.optim"),
        ("cache: [{use: torchrec.uvm, tables: [t_a]}]", r"torchrec.uvm \(cache\[0\], line 6\)"),
    ],
)
def test_entries_that_train_rows_otherwise(tmp_path: Path, more: str, said: str) -> None:
    class Follows(TableStrategy):
        follows_optimizers = True

    registry = registry_of(tmp_path, f"{MINE}{more}\n")
    field = f"{more.partition(':')[0]}[0]"
    with pytest.raises(RegistryError, match=rf"yaml:5 optimizers\[0\]: table t_a.*{said}"):
        applied(
            registry, model_of("t_a"), parts={} if "parallel" in more else {field: TableStrategy()}
        )
    if "parallel" not in more:
        applied(registry, model_of("t_a"), parts={field: Follows()})


def test_tables_that_cannot_be_trained_so(tmp_path: Path) -> None:
    registry = registry_of(tmp_path, MINE)
    with pytest.raises(RegistryError, match="t_a matches no table"):
        applied(registry, model_of("t_b"))
    twice = applied(registry, model_of("t_a"))
    with pytest.raises(RegistryError, match="t_a brings SGD already"):
        applied(registry, twice)
    with pytest.raises(RegistryError, match=r"t_a is in no EmbeddingBagCollection .* any more"):
        apply_optimizers(
            registry,
            list(embedding_modules(model_of("t_b"))),
            tables_of(model_of("t_a")),
            "cpu",
            {},
        )
