"""The tests that hold this package to TorchRec, on every version of TorchRec that it takes.

``python -m tests.torchrec_versions`` makes an environment for each set of torch, FBGEMM and
TorchRec in ``build/torchrec``, in which all else is this environment's own, runs the tests there
and prints what came of them. What is there already is neither installed nor run again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

from recd_plugins.runtime.versions import SETS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "torchrec"
#: Runs of pytest by name. The plugins are those with kernels and sharded modules of their own.
RUNS: dict[str, list[str]] = {
    "internals": ["tests/test_internals.py"],
    "kernels": [
        f"tests/distributed/test_{name}.py" for name in ("row_wise_adagrad", "portable_kernels")
    ],
    "parity": [
        f"tests/distributed/test_{name}.py" for name in ("parity", "other_modules", "drop_in")
    ],
    "plugins": [
        *("-m", "not slow", "tests/drop_in"),
        *(f"plugins/recd_plugin_{name}/tests" for name in ("flexshard", "scars")),
    ],
}
_MATRIX = "tests.drop_in.matrix"
# Of each set, or, as setuptools, what a version of torch asks for another of.
_OF_SETS = re.compile("torch|torchrec|fbgemm-gpu.*|nvidia-.*|triton|setuptools")
_OUTCOMES = ("passed", "failed", "skipped")


class NotInstallableError(Exception):
    """There is no build of a set for this machine; says what pip said."""


def make_environment(torchrec: str, torch: str, arguments: list[str]) -> Path:
    """The Python of an environment with a set, which is installed where it is not yet there.

    Args:
        torchrec: the version of TorchRec and FBGEMM, ``"1.8"``.
        torch: the version of torch.
        arguments: of ``pip install``, for torch: an index.

    Raises:
        NotInstallableError: pip finds no such build.
    """
    folder = FOLDER / torchrec
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # What TorchRec needs besides, in the versions that are here.
    here = {each.name: each.version for each in distributions() if not _is_ours(each.name)}
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(f"{name}=={version}" for name, version in here.items()))
    _install(python, ["--no-deps", f"fbgemm-gpu-cpu=={torchrec}.*"])
    _install(python, [*arguments, "-c", str(constraints), f"torch=={torch}.*"])
    # TorchRec asks for the CUDA build of FBGEMM.
    stand_in = folder / "fbgemm-gpu"
    shutil.copytree(ROOT / "packaging" / "fbgemm-gpu", stand_in)
    project = stand_in / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    version = _version_in(python, "fbgemm-gpu-cpu")
    project.write_text(re.sub(r"1\.\d+\.\d+", version, text), encoding="utf-8")
    _install(python, ["-c", str(constraints), str(stand_in), f"torchrec=={torchrec}.*"])
    # Behind what is installed here: all else.
    (site,) = folder.glob("lib/python*/site-packages")
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "zz_all_else.pth").write_text(line, encoding="utf-8")
    (folder / ".installed").touch()
    return python


def run_tests(python: Path, torchrec: str, name: str, workers: str) -> Counter[str] | None:
    """What came of one of ``RUNS``; None where pytest did not get to its end."""
    report = FOLDER / f"{torchrec}.{name}.xml"
    if not report.exists():
        command: list[str | Path] = [
            *(python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", *RUNS[name]),
        ]
        _logged(command, FOLDER / f"{torchrec}.{name}.log")
    if not report.exists():
        return None
    return Counter(map(_outcome, ElementTree.parse(report).iter("testcase")))


def run_matrix(python: Path, torchrec: str, arguments: list[str]) -> tuple[str, bool]:
    """The counts of the matrix of drop-in, and whether it came to its end without a fault.

    Outcomes stay in a file, so one that was stopped goes on there.
    """
    log = FOLDER / f"{torchrec}.matrix.log"
    kept = FOLDER / f"{torchrec}.matrix.jsonl"
    status = _logged([python, "-m", _MATRIX, "--keep", kept, *arguments], log)
    return log.read_text(encoding="utf-8").strip().rpartition("\n")[2], status == 0


def _is_ours(name: str) -> bool:
    return name.startswith("recd-plugin") or _OF_SETS.fullmatch(name.replace("_", "-")) is not None


def _install(python: Path, arguments: list[str]) -> None:
    command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstallableError(errors[-1] if errors else done.stderr)


def _version_in(python: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _logged(command: list[str | Path], log: Path) -> int:
    """The status of a command with the packages of this checkout; its output is in ``log``."""
    packages = os.pathsep.join(str(ROOT / name) for name in ("src", "plugins"))
    environment = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "RECD_DAY": "all"}
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    return done.returncode


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def _print(*cells: str) -> None:
    """A line of a table of Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    """0 where nothing failed in any version that can be installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torchrec_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", help=f"of {', '.join(SETS.values())}; all without")
    parser.add_argument("--again", action="store_true", help="run the tests that were run, too")
    parser.add_argument("--workers", default="2", help="tests at a time (%(default)s)")
    parser.add_argument(
        "--pip", default="", help='of pip, for torch: "--extra-index-url https://..."'
    )
    parser.add_argument(
        "--all-cells",
        action="store_true",
        help="the whole matrix of drop-in, in place of a sample that has each value of its axes",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*RUNS, "matrix"], help="of the tests; all without"
    )
    given = parser.parse_args()
    matrix = [] if given.all_cells else ["--sample"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    all_well = True
    _print("torchrec", "torch", "fbgemm", "tests", *_OUTCOMES)
    _print(*["---"] * 7)
    for torch, torchrec in SETS.items():
        if given.versions and torchrec not in given.versions:
            continue
        if given.again:
            for old in FOLDER.glob(f"{torchrec}.*.*"):
                old.unlink()
        try:
            python = make_environment(torchrec, torch, given.pip.split())
        except NotInstallableError as error:
            _print(torchrec, torch, torchrec, f"cannot be installed: {error}")
            continue
        names = ("torchrec", "torch", "fbgemm-gpu-cpu")
        versions = [_version_in(python, name) for name in names]
        for name in RUNS:
            if given.only and name not in given.only:
                continue
            found = run_tests(python, torchrec, name, given.workers)
            counts = [str(found[outcome]) if found else "-" for outcome in _OUTCOMES]
            _print(*versions, name, *counts)
            all_well &= found is not None and not found["failed"]
        if not given.only or "matrix" in given.only:
            said, well = run_matrix(python, torchrec, matrix)
            _print(*versions, f"matrix of drop-in: {said}")
            all_well &= well
    if not all_well:
        print(f"What failed is in {FOLDER.relative_to(ROOT)}/*.log")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
