"""TorchRec's own tests, run with its sharders and with these in their place.

``python -m tests.torchrec_suite CHECKOUT`` needs a checkout of TorchRec, of the version that is
installed or near it, and fetches nothing; what is tested is what is installed, and these sharders.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

#: Of ``torchrec/distributed``: files whose tests run on gloo or on one CPU process.
FILES = (
    "tests/test_model_parallel_gloo.py",
    "tests/test_sequence_model_parallel.py",
    "tests/test_fp_embeddingbag.py",
    "tests/test_mc_embedding.py",
    "tests/test_mc_embeddingbag.py",
    "tests/test_fused_optimizer.py",
    "tests/test_apply_optim_per_param.py",
    "tests/test_init_parameters.py",
    "tests/test_sharding_plan.py",
    "tests/test_qcomms_embedding_modules.py",
    "tests/test_embedding_update.py",
    "tests/test_dynamic_sharding.py",
    "tests/test_2d_sharding.py",
    "train_pipeline/tests/test_train_pipelines.py",
    "train_pipeline/tests/test_tracing.py",
)
_HERE = Path(__file__).parent


def outcomes(checkout: Path, file: str, side: str, timeout: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "--rootdir", str(checkout), "-c", os.devnull, "--import-mode=importlib",
            f"--timeout={timeout}", f"--junitxml={report}",
            str(checkout / "torchrec" / "distributed" / file),
        ]  # fmt: skip
        path = os.pathsep.join([str(_HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        of_site = {"TORCHREC_CHECKOUT": str(checkout), "TORCHREC_SHARDERS": side}
        environment = {**os.environ, "PYTHONPATH": path, **of_site}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"{file}: pytest ended without a report\n{done.stdout}{done.stderr}")
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def main() -> int:
    """0 where nothing fails with these sharders that passes with TorchRec's."""
    parser = argparse.ArgumentParser(prog="python -m tests.torchrec_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of TorchRec")
    parser.add_argument("files", nargs="*", help="of torchrec/distributed; all without any")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a test (%(default)s)")
    given = parser.parse_args()
    if not (given.checkout / "torchrec" / "distributed" / "tests").is_dir():
        parser.error(f"{given.checkout} is no checkout of TorchRec: no torchrec/distributed/tests")
    worse = []
    print(f"{'file':<52} {'TorchRec: passed failed skipped':>32} {'ours':>24}")
    for file in given.files or FILES:
        checkout = given.checkout.resolve()
        stock, ours = (outcomes(checkout, file, side, given.timeout) for side in ("stock", "ours"))
        print(f"{file:<52} {_counts(stock):>32} {_counts(ours):>24}", flush=True)
        worse += [name for name, what in stock.items() if what == "passed" != ours.get(name)]
    for name in worse:
        print(f"passes with TorchRec's sharders alone: {name}")
    return int(bool(worse))


def _counts(found: dict[str, str]) -> str:
    counts = Counter(found.values())
    return " ".join(f"{counts[kind]:>7}" for kind in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    sys.exit(main())
