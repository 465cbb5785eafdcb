"""Golden records of runs and plans with the built-in parts.

``python -m tests.golden FOLDER`` records a file per case, for ``diff BEFORE AFTER``. Record both on
one machine. Runs give losses, sent bytes, lookups, sections of tiers and caches, and the tensors of
their checkpoint; plans their whole report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

RECD = Path(sys.executable).with_name("recd")
#: Values of a report that depend on time, memory or the folder.
MEASURED = {
    "samples_per_second",
    "step_seconds",
    "peak_memory_bytes",
    "stages",
    "step_memory",
    "stalls",
    "ingestion",
    "registry",
}
STEPS = 6
TOPOLOGY = ("--topology", "zionex-a100-40g", "--nodes", 2)

Changes = dict[str, Any]
_SEQUENCES = ["t_seq_*"]
# A cluster on which copies of rows pay.
_CLUSTER = {"topology": "zionex-a100-40g", "nodes": 4, "ranks_per_node": 8, "batch_size": 256}


def _sharding(use: str, **options: Any) -> Changes:
    return {"sharding": [{"use": use, "tables": _SEQUENCES, "options": options}]}


def _cache(**options: Any) -> Changes:
    return {
        "cache": [{"use": "scars.cache", "tables": ["t_seq_*", "t_item_0"], "options": options}]
    }


#: Changes to the demo's registry by case.
CASES: dict[str, Changes] = {
    "demo": {},
    "plain": {"converter": {"use": "recd.kjt"}, "pooling": []},
    "partial": {"converter": {"use": "recd.partial_ikjt"}},
    **{
        kind: _sharding(f"torchrec.{kind}")
        for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")
    },
    "two_tier": _sharding("flexshard.two_tier", plan_for=_CLUSTER, dedupe="none"),
    "three_tier": _sharding("flexshard.three_tier", plan_for=_CLUSTER, dedupe="none"),
    "joint": _sharding("flexshard.joint", plan_for=_CLUSTER, coalesce=True),
    "cache": _cache(rows=100),
    "cache_lru": {
        **_cache(policy="lru", share=0.1, lookahead=False),
        **_sharding("torchrec.row_wise"),
    },
    "cache_lfu_in_file": _cache(policy="lfu", bytes="200KB", storage={"file": "backing_store"}),
    "sgd": {"training": {"optimizer": "sgd"}},
}
#: Ranks and ranks per node by case.
_NODES = dict.fromkeys(("two_tier", "three_tier", "joint"), (4, 2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.case or CASES:
        record = _record(name, arguments.folder.resolve() / "work")
        (arguments.folder / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=True))
        print(name, flush=True)


def _record(name: str, work: Path) -> dict[str, Any]:
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    registry = YAML(typ="safe").load(Path(__file__).parents[1] / "registry.yaml")
    for section, change in CASES[name].items():
        merged = isinstance(change, dict) and section == "training"
        registry[section] = {**registry[section], **change} if merged else change
    ranks, ranks_per_node = _NODES.get(name, (2, 2))
    registry["dataset"]["options"] = {
        "path": str(work / "table"),
        "generate": {"rows": 8192, "row_group_rows": 512},
    }
    for step in registry["preprocessing"]:
        step["options"] = {"buckets": 2000}
    registry["model"] |= {"num_embeddings": 2000, "embedding_dim": 8}
    registry["training"] |= {
        "batch_size": 64,
        "steps": STEPS,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "device": "cpu",
        "checkpoint": {"path": "checkpoints", "every": STEPS},
    }
    (folder / "registry.yaml").write_text(json.dumps(registry))  # which is YAML, too
    _recd(folder, "run", "registry.yaml", "--json", "run.json")
    report = json.loads((folder / "run.json").read_text())
    record = {
        "run": {name: value for name, value in report.items() if name not in MEASURED},
        "checkpoint": json.loads(_recd(folder, "checkpoint", "show", "checkpoints", "--json"))[
            "tensors"
        ],
        "plan": _plan(folder),
    }
    if name in _NODES:
        record["tiers"] = _plan(folder, "--tiers")
    if name.startswith("cache"):
        record["cache"] = _plan(folder, "--cache")
    return record


def _plan(folder: Path, *options: str) -> Any:
    _recd(folder, "plan", "registry.yaml", *TOPOLOGY, *options, "--json", "plan.json")
    return json.loads((folder / "plan.json").read_text())


def _recd(folder: Path, *arguments: object) -> str:
    return subprocess.check_output([RECD, *map(str, arguments)], cwd=folder, text=True)


if __name__ == "__main__":
    main()
