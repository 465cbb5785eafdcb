"""Compares one model of two labels with one model per label, on the same split of MovieLens.

python two_labels.py                # data/ml-100k.inter, from README.md
python two_labels.py --kind ple

The labels of a rating are liked (at least 4 stars, binary) and rating (the stars, a regression).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIKED = "{name: liked, column: 'rating:float', positive_from: 4}"
RATING = "{name: rating, column: 'rating:float', type: regression, weight: 0.5}"
#: The labels of each model.
MODELS = {
    "both labels": f"[{LIKED}, {RATING}]",
    "liked only": f"[{LIKED}]",
    "rating only": f"[{RATING}]",
}
#: Equal settings of all models.
SETTINGS = ("training.batch_size=1024", "training.epochs=2", "training.validation=null")
FIGURES = ("liked.auc", "liked.log_loss", "rating.rmse", "rating.mae")


def recd(*words: object) -> None:
    """Run a command of recd, and show its output if it fails."""
    command = [str(Path(sys.executable).with_name("recd")), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compare(data: Path, folder: Path, settings: Sequence[str], kind: str) -> dict[str, Any]:
    """Train each model in ``folder``. Return a dict from model to its metrics of the test split."""
    registry = folder / "two_labels.yaml"
    both = "liked=rating:float>=4,rating=rating:float"
    folder.mkdir(exist_ok=True)
    recd("init", data, registry, "--format", "tsv", "--label", both, "--force")
    found = {}
    for name, labels in MODELS.items():
        given = [f"dataset.options.cache={folder}/imports", f"dataset.options.label={labels}"]
        if name == "both labels" and kind != "shared":
            given.append(f"model.multi_task={{kind: {kind}}}")
        path = folder / "run.json"
        folders = f"training.checkpoint.runs={folder}/runs"
        recd("run", registry, folders, *given, *settings, "--json", path)
        found[name] = json.loads(path.read_text(encoding="utf-8"))["test"]
    return found


def table(found: dict[str, Any]) -> str:
    """Return the metrics side by side: a column per model."""
    width = max(map(len, found)) + 2
    lines = ["".join([f"{'test split':16}", *(f"{name:>{width}}" for name in found)])]
    for figure in FIGURES:
        values = (of.get(figure) for of in found.values())
        cells = (f"{'-' if each is None else f'{each:.4f}':>{width}}" for each in values)
        lines.append("".join([f"{figure:16}", *cells]))
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare one model of two labels with two models.")
    here = Path(__file__).parent
    parser.add_argument("data", type=Path, nargs="?", default=here / "data/ml-100k.inter")
    parser.add_argument("--kind", choices=["shared", "mmoe", "ple"], default="shared")
    parser.add_argument("-o", "--output", type=Path, default=Path("two_labels"), help="Folder.")
    options = parser.parse_args()
    if not options.data.exists():
        parser.error(f"{options.data}: the file does not exist. README.md says how to get it.")
    print(table(compare(options.data, options.output, SETTINGS, options.kind)))


if __name__ == "__main__":
    main()
