import os
import subprocess
import sys
from pathlib import Path

SITE = Path(__file__).parent / "torchrec_suite" / "site"
SEEN = """
from torchrec.distributed import embedding, test_utils, tests
print(tests.__path__[0], test_utils.__path__[0], embedding.EmbeddingCollectionSharder.__name__)
"""


def test_every_process_sees_the_checkout_and_these_sharders(tmp_path: Path) -> None:
    distributed = tmp_path / "torchrec" / "distributed"
    for folder in ("tests", "test_utils", "train_pipeline"):
        (distributed / folder).mkdir(parents=True)
    (distributed / "tests" / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": str(SITE), "TORCHREC_CHECKOUT": str(tmp_path)}
    env["TORCHREC_SHARDERS"] = "ours"
    command = [sys.executable, "-c", SEEN]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    folders = [str(distributed / folder) for folder in ("tests", "test_utils")]
    assert done.stdout.split() == [*folders, "ExactEmbeddingCollectionSharder"], done.stderr
