"""Compares SASRec as configured in sasrec.yaml with SASRec of RecTools, on the same test split.

python compare.py --peer PYTHON --seeds 1 2 3

PYTHON is the Python interpreter of an environment with RecTools (pip install "rectools[torch]").
Existing results in the output folder are reused.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DATA = "data/ml-100k.inter"
RANK = ["--user", "user_id", "--seen", "history_seen"]
FIGURES = [(split, name) for split in ("full", "sampled") for name in ("hr_at_10", "ndcg_at_10")]


def ours(seed: int, folder: Path) -> None:
    """Run ``recd run`` and ``recd rank`` with this seed, and write the results to ``folder``."""
    checkpoints = folder / f"checkpoints_{seed}"
    text = (
        (HERE / "sasrec.yaml")
        .read_text()
        .replace("path: checkpoints_sasrec", f"path: {checkpoints}")
    )
    registry = folder / f"sasrec_{seed}.yaml"
    registry.write_text(text.replace("training:\n", f"training:\n  seed: {seed}\n"))
    recd = [Path(sys.executable).with_name("recd")]
    if not checkpoints.exists():
        subprocess.run([*recd, "run", registry], check=True)
    found = {}
    for split, options in {
        "full": [],
        "sampled": ["--sampled", "100", "--seed", str(seed)],
    }.items():
        output = folder / f"{split}_{seed}.json"
        subprocess.run([*recd, "rank", registry, *RANK, *options, "--json", output], check=True)
        found[split] = json.loads(output.read_text())
    (folder / f"ours_{seed}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("compared"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    sides: dict[str, list[dict[str, dict[str, float]]]] = {"ours": [], "peer": []}
    for seed in options.seeds:
        for side, figures in sides.items():
            output = options.folder / f"{side}_{seed}.json"
            if not output.exists() and side == "ours":
                ours(seed, options.folder)
            elif not output.exists():
                script = str(HERE / "rectools_sasrec.py")
                command = [options.peer, script, DATA, "--seed", str(seed), "--json", output]
                subprocess.run(command, check=True)
            figures.append(json.loads(output.read_text()))
    print(f"{'':20} {'SASRec of sasrec.yaml':>24} {'RecTools SASRec':>24}")
    for split, name in FIGURES:
        cells = []
        for figures in sides.values():
            values = [each[split][name] for each in figures]
            spread = f"{min(values):.4f} to {max(values):.4f}"
            cells.append(f"{statistics.mean(values):.4f} ({spread})")
        print(f"{split + ' ' + name:20} {cells[0]:>24} {cells[1]:>24}")


if __name__ == "__main__":
    main()
