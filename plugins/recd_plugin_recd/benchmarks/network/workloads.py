"""Tables and registry files of the workloads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ruamel.yaml import YAML

from recd_plugin_recd.benchmarks.network.grid import Cell, Entry, Side, WorkloadName
from recd_plugin_recd.models.registry_text import rm_registry
from recd_plugins.api import RecdError
from recd_plugins.api.registry import load_registry
from recd_plugins.testing.benchmark import Size
from recd_plugins.testing.request_table import CANDIDATES, request_table

_ROWS: dict[Size, int] = {"tiny": 1_024, "small": 16_384, "reference": 16_384}
_BATCH_SIZES: dict[WorkloadName, int] = {"papercal": 128, "rm1": 128, "requests": 256}
# Of rm1, but at size reference: a step of plain batches of 128 sends 50 MB of each of four nodes.
_RM1_SMALL_ROWS, _RM1_SMALL_BATCH = 4_096, 32
_RM1_SCALE = 0.125
_FEW = ["seq_0_0", "seq_0_1", "usr_0", "item_0"]


def workload_text(name: WorkloadName, size: Size) -> str:
    """A workload in words."""
    what = {
        "papercal": "PAPERCAL with means of sequences, tables of 100,000 x 16",
        "rm1": f"rm1 at scale {_RM1_SCALE:g}",
        "requests": f"requests of {CANDIDATES} candidates as recd init reads them",
    }[name]
    rows, batch_size = _rows_and_batch(name, size)
    return f"{what}, {rows:,} rows, batch {batch_size} a rank"


def rows_of_a_step(cell: Cell, size: Size) -> int:
    """Rows that all ranks of a cell train on at once."""
    return cell.num_nodes * cell.ranks_per_node * _rows_and_batch(cell.workload, size)[1]


def _rows_and_batch(name: WorkloadName, size: Size) -> tuple[int, int]:
    if name == "rm1" and size != "reference":
        return _RM1_SMALL_ROWS, _RM1_SMALL_BATCH
    return _ROWS[size], _BATCH_SIZES[name]


def write_registries(
    cell: Cell, sides: Sequence[Side], folder: Path, size: Size
) -> tuple[dict[str, Path], dict[str, str]]:
    """The registry file of each side, whose table is made; and why others have none.

    Args:
        cell: its workload.
        sides: all of the cell.
        folder: of tables, which other cells share, and of files.
        size: of the benchmark.
    """
    folder = folder / cell.name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    document = _document(cell, folder.parent, size)
    plain = folder / "plain.yaml"
    plain.write_text(json.dumps(document), encoding="utf-8")
    registry = load_registry(plain)
    registry.dataset.prepare()
    sparse = registry.dataset.schema().sparse
    sequences = [f"t_{feature}" for feature in registry.claim("pooling", sparse)]
    others = [f"t_{feature}" for feature in sparse if f"t_{feature}" not in sequences]
    files: dict[str, Path] = {}
    refused: dict[str, str] = {}
    for number, side in enumerate(sides):
        path = folder / f"{number}.yaml"
        path.write_text(
            json.dumps(
                {
                    **document,
                    "converter": document["converter"]
                    if side.deduplicated
                    else {"use": "recd.kjt"},
                    "sharding": _entries(side, sequences, others),
                    "training": {**document["training"], "overlap": side.overlap},
                }
            ),
            encoding="utf-8",
        )
        try:
            load_registry(path)
        except RecdError as error:
            refused[side.name] = str(error).replace(str(path), "registry.yaml")
        else:
            files[side.name] = path
    return files, refused


def _entries(side: Side, sequences: Sequence[str], others: Sequence[str]) -> list[Entry]:
    if side.sequences["use"] == "auto":
        return [side.sequences]
    if side.pooled is None:
        return [{**side.sequences, "tables": ["t_*"]}]
    return [
        {**side.sequences, "tables": list(sequences)},
        {**side.pooled, "tables": list(others)},
    ]


def _document(cell: Cell, folder: Path, size: Size) -> dict[str, Any]:
    """The registry of a workload, with deduplicated batches, and its training section."""
    rows, batch_size = _rows_and_batch(cell.workload, size)
    ranks = cell.num_nodes * cell.ranks_per_node
    if cell.workload == "requests":
        text = _text_of_requests(rows, folder)
    else:
        scale = _RM1_SCALE if cell.workload == "rm1" else 1.0
        text = rm_registry(
            cell.workload, folder=folder, rows=rows, scale=scale, batch_size=batch_size, ranks=ranks
        )
    document: dict[str, Any] = YAML(typ="safe").load(text)
    if cell.workload == "papercal":
        # Attention would take most of a step, on processors that all nodes share.
        document["pooling"] = [{"use": "recd.mean", "features": ["seq_*"]}]
    if size == "tiny":
        document["dataset"]["options"]["sparse"] = _FEW
        document["preprocessing"] = [{**document["preprocessing"][0], "features": ["*"]}]
        document["model"]["tables"] = {"t_*": {"num_embeddings": 100_000}}
    training: Mapping[str, Any] = {
        "batch_size": batch_size,
        "ranks": ranks,
        "device": "cpu",
        # Rates at which a model learns amplify rounding; losses of sides are compared.
        "learning_rate": 0.1,
        "dense_learning_rate": 0.01,
        "eps": 1e-3,
    }
    return {**document, "training": training}


def _text_of_requests(rows: int, folder: Path) -> str:
    """As ``recd init`` writes it."""
    table, registry = folder / "requests.parquet", folder / "requests.yaml"
    if not table.exists():
        pq.write_table(request_table(-(-rows // CANDIDATES)), table)
    recd = Path(sys.executable).with_name("recd")
    columns = ["--session", "user", "--request", "request", "--test", "0"]
    subprocess.run(
        [recd, "init", table, registry, "--force", *columns],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    text = registry.read_text(encoding="utf-8")
    return text.replace(f"path: {table}", f"path: {table}\n    cache: {folder / 'imported'}")
