"""Tests of this package with every supported version of TorchRec.

``python -m tests.torchrec_versions`` makes an environment for each set of torch, FBGEMM and
TorchRec in ``build/torchrec`` with everything else from this environment, runs the tests there and
prints a table. It goes on where it was stopped.
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

from tests.torchrec_suite.__main__ import outcome

from recd_plugins.runtime.versions import SETS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "torchrec"
#: Arguments of pytest by name.
RUNS: dict[str, list[str]] = {
    "internals": ["tests/test_internals.py"],
    "kernels": ["tests/distributed/test_portable_kernels.py"],
    "parity": [
        f"tests/distributed/test_{name}.py" for name in ("parity", "other_modules", "drop_in")
    ],
    "matrix": ["tests/drop_in/matrix"],
    "plugins": [
        *("-m", "not slow", "tests/drop_in"),
        *(f"plugins/recd_plugin_{name}/tests" for name in ("flexshard", "scars")),
    ],
}
# Distributions with a version for each set; versions of torch ask for different setuptools.
_OF_SETS = re.compile("torch|torchrec|fbgemm-gpu.*|nvidia-.*|triton|setuptools|recd-plugin.*")
_OUTCOMES = ("passed", "failed", "skipped")


def make_environment(torchrec: str, torch: str, arguments: list[str]) -> Path:
    """Return the Python of an environment with a set, installed if needed by pip's arguments."""
    folder = FOLDER / torchrec
    python = folder / "bin" / "python"
    if (folder / ".installed").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "\n".join(
            f"{each.name}=={each.version}"
            for each in distributions()
            if not _OF_SETS.fullmatch(each.name.replace("_", "-"))
        )
    )
    _install(python, ["--no-deps", f"fbgemm-gpu-cpu=={torchrec}.*"])
    _install(python, [*arguments, "-c", str(constraints), f"torch=={torch}.*"])
    # TorchRec asks for the CUDA build of FBGEMM.
    stand_in = folder / "fbgemm-gpu"
    shutil.copytree(ROOT / "packaging" / "fbgemm-gpu", stand_in)
    project = stand_in / "pyproject.toml"
    version = _version_in(python, "fbgemm-gpu-cpu")
    project.write_text(re.sub(r"1\.\d+\.\d+", version, project.read_text()))
    _install(python, ["-c", str(constraints), str(stand_in), f"torchrec=={torchrec}.*"])
    (site,) = folder.glob("lib/python*/site-packages")
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "zz_all_else.pth").write_text(line)
    (folder / ".installed").touch()
    return python


def run_tests(python: Path, torchrec: str, name: str, workers: str) -> Counter[str]:
    """Return the numbers of outcomes of one of ``RUNS``; empty if pytest did not end."""
    report = FOLDER / f"{torchrec}.{name}.xml"
    if not report.exists():
        command: list[str | Path] = [
            *(python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *("-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", *RUNS[name]),
        ]
        packages = os.pathsep.join(str(ROOT / name) for name in ("src", "plugins"))
        env = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "RECD_DAY": "all"}
        with (FOLDER / f"{torchrec}.{name}.log").open("w") as log:
            subprocess.call(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    if not report.exists():
        return Counter()
    return Counter(map(outcome, ElementTree.parse(report).iter("testcase")))


def _install(python: Path, arguments: list[str]) -> None:
    command: list[str | Path] = [python, "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ModuleNotFoundError(errors[-1] if errors else done.stderr)


def _version_in(python: Path, name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def _print(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Return 0 if nothing failed in any version that can be installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.torchrec_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", help=f"some of {', '.join(SETS.values())}")
    parser.add_argument("--again", action="store_true", help="repeat finished tests")
    parser.add_argument("--workers", default="2", help="tests at a time (%(default)s)")
    parser.add_argument("--pip", default="", help='for torch: "--extra-index-url https://..."')
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS])
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    all_well = True
    _print("torchrec", "torch", "fbgemm", "tests", *_OUTCOMES)
    _print(*["---"] * 7)
    for torch, torchrec in SETS.items():
        if given.versions and torchrec not in given.versions:
            continue
        for old in FOLDER.glob(f"{torchrec}.*.*") if given.again else ():
            old.unlink()
        try:
            python = make_environment(torchrec, torch, given.pip.split())
        except ModuleNotFoundError as error:  # pip finds no build for this machine
            _print(torchrec, torch, torchrec, f"cannot be installed: {error}")
            continue
        names = ("torchrec", "torch", "fbgemm-gpu-cpu")
        versions = [_version_in(python, name) for name in names]
        for name in (name for name in RUNS if name in given.only):
            found = run_tests(python, torchrec, name, given.workers)
            _print(*versions, name, *(str(found[each]) if found else "-" for each in _OUTCOMES))
            all_well &= bool(found) and not found["failed"]
    if not all_well:
        print(f"Logs are in {FOLDER.relative_to(ROOT)}/*.log")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
