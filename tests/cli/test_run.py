from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.cli.programs import recd, report_of, run_until_killed
from tests.forked import RECD
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.training.checkpoint_files import read_delta


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def write(folder: Path, checkpoints: Path | None = None, **saved: int) -> Path:
    sparse = ["seq_0_*", "seq_[12]_0", "item_0", "item_1", "usr_0", "usr_1", "usr_2"]
    return write_registry(
        folder,
        dataset=papercal(folder, 2560, 128, sparse=sparse),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(500),
        pooling=[
            {"use": "recd.attention", "features": ["seq_0_*"]},
            {"use": "recd.mean", "features": ["seq_[12]_*"]},
        ],
        sharding=[
            {"use": "torchrec.data_parallel", "tables": ["t_item_0", "t_usr_0"]},
            {"use": "torchrec.row_wise", "tables": ["t_usr_1*"]},
        ],
        model={"embedding_dim": 8, "num_embeddings": 500, "bottom_mlp": [16], "top_mlp": [16]},
        training={
            "batch_size": 32,
            "ranks": 2,
            "steps": 12,
            "device": "auto",
            "checkpoint": {"path": str(checkpoints), **saved} if checkpoints else {},
        },
    )


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    return report_of("run", write(folder), "--breakdown")


def test_compare(folder: Path) -> None:
    checkpoints = folder / "compared"
    registry = write(folder, checkpoints, every=3)
    report = report_of("run", registry, "--compare")
    assert not checkpoints.exists(), "a comparison keeps no checkpoints"
    baseline, plugins = report["baseline"], report["plugins"]
    assert len(baseline["losses"]) == len(plugins["losses"]) == 12
    assert report["loss_max_abs_diff"] < 1e-5
    assert baseline["losses"][0] != baseline["losses"][-1]
    ratios, looked_up = report["ratios"], plugins["ids_looked_up"] / baseline["ids_looked_up"]
    assert ratios["ids_looked_up"] == pytest.approx(looked_up)
    assert looked_up < 0.5
    assert ratios["collective_bytes"] < 0.6
    assert plugins["train"]["auc"] == pytest.approx(baseline["train"]["auc"], abs=1e-3)


def test_shardings_side_by_side(folder: Path) -> None:
    checkpoints = folder / "shardings"
    registry = write(folder, checkpoints, every=3)
    first = 'sharding: [{"use": "torchrec.row_wise", "tables": ["t_seq_*"]}, '
    registry.write_text(registry.read_text().replace("sharding: [", first))
    names = ["torchrec.row_wise", "torchrec.data_parallel"]
    # A kernel in the backward pass and a dense optimizer have the same rate at each step.
    settings = ["training.steps=10", "training.schedule.warmup=4"]
    settings += ["training.schedule.decay=cosine", "training.schedule.steps=9"]
    report = report_of("run", registry, *settings, *(f"--sharding={name}" for name in names))
    assert not checkpoints.exists(), "a comparison keeps no checkpoints"
    assert list(report["shardings"]) == names
    assert [len(report["shardings"][name]["losses"]) for name in names] == [10, 10]
    assert report["loss_max_abs_diff"]["torchrec.row_wise"] == 0
    assert report["loss_max_abs_diff"]["torchrec.data_parallel"] < 1e-5
    sent = [report["shardings"][name]["collective_bytes"]["all_to_all"] for name in names]
    ratios = report["ratios"]["torchrec.data_parallel"]
    assert ratios["all_to_all_bytes"] == pytest.approx(sent[1] / sent[0])
    assert ratios["all_to_all_bytes"] < 0.5, "bags alone still go by all-to-all"


def test_overlapped_and_resumed_it_is_the_same_run(folder: Path, whole: dict[str, Any]) -> None:
    """Its data-parallel tables learn in the optimizer's step, those of sequences before.

    It resumes from a delta, saved after rows of the next step were looked up.
    """
    registry = write(folder, folder / "overlapped", every=2, full_every=4)
    assert report_of("run", registry, "training.overlap=true", "--steps=6")["losses"]
    assert read_delta(folder / "overlapped" / "step-000000006") is not None
    resumed = report_of("run", registry, "training.overlap=true", "--resume")
    assert resumed["losses"] == whole["losses"]


def test_killed_and_resumed_is_as_if_never_killed(folder: Path, whole: dict[str, Any]) -> None:
    assert whole["stages"]["lookup"] > 0

    checkpoints = folder / "checkpoints"
    registry = write(folder, checkpoints, every=3, keep=1)
    run_until_killed(registry, checkpoints, every=3, steps=12)

    refused = recd("run", registry)
    assert refused.returncode == 1
    assert "--resume" in refused.stderr

    four = folder / "four"
    shutil.copytree(checkpoints, four / "checkpoints")

    figures = folder / "resumed.json"
    done = recd("run", registry, "--resume", "--workers", 1, "--json", figures)
    assert done.returncode == 0, done.stderr
    pattern = rf"^resumed at step (\d+) of {re.escape(str(checkpoints))}$"
    (at,) = re.findall(pattern, done.stderr, re.M)
    assert int(at) in (3, 6, 9)
    assert "Warning" not in done.stderr
    resumed = json.loads(figures.read_text(encoding="utf-8"))
    assert resumed["losses"] == whole["losses"], "workers read other batches"
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000012"]

    at_the_end = report_of("run", registry, "--resume")
    assert at_the_end["losses"] == whole["losses"]
    assert at_the_end["samples_per_second"] is None

    registry = write(folder, four / "checkpoints", every=3, keep=1)
    on_four = report_of("run", registry, "--resume", "--ranks", 4)
    assert len(on_four["losses"]) == 12
    assert on_four["losses"][:3] == whole["losses"][:3]


def test_torchrun(folder: Path, whole: dict[str, Any]) -> None:
    figures = folder / "torchrun.json"
    registry = write(folder, folder / "torchrun")
    command = [RECD, "run", registry, "training.ranks=1", "--steps", 2, "--json", figures]
    done = forked.torchrun(command, ranks=2)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text(encoding="utf-8"))
    assert report["losses"] == pytest.approx(whole["losses"][:2])
    said = json.loads((folder / "torchrun/step-000000002/identity.json").read_text("utf-8"))
    assert said["training"]["ranks"] == 2, "the file's, of which there are none"


def test_ranks_with_other_options_are_told_so(folder: Path) -> None:
    program = (
        "import os, sys; from recd_plugins.cli import main; rank = int(os.environ['RANK']); "
        "main(['run', sys.argv[1], '--steps', '2'] + [['--breakdown'], ['--json', 'a']][rank])"
    )
    command = [sys.executable, "-c", program, write(folder)]
    done = forked.torchrun(command, ranks=2)
    assert done.returncode == 1
    said = "starting: options of the command, --breakdown is true on rank 0, but false on rank 1; "
    assert said in done.stderr
    assert "options of the command, --json is false on rank 0, but true on rank 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("missing.yaml", "missing.yaml"),
        ("registry.yaml --resume", "training.checkpoint.runs"),
        ("registry.yaml --resume --compare", "Remove --resume"),
        ("registry.yaml --sharding=a --sharding=b --compare", "one --sharding"),
        ("registry.yaml --sharding=torchrec.row_wize", "Did you mean 'torchrec.row_wise'?"),
        ("registry.yaml --ranks 0", "--ranks"),
        ("registry.yaml --workers -1", "--workers"),
        ("registry.yaml --ranks 81", "too few"),
        ("registry.yaml --ranks-per-node 3", "training.ranks is 2, which is not a multiple of 3"),
    ],
)
def test_mistakes(folder: Path, arguments: str, message: str) -> None:
    write(folder)
    name, *options = arguments.split()
    done = recd("run", folder / name, *options)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
