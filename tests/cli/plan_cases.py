"""A small registry in a folder of its own, and commands on it in this process."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins.cli import main


def write(folder: Path, **training: object) -> Path:
    return write_registry(
        folder,
        dataset=papercal(folder, 1024, 256, sparse=["item_0", "usr_0", "seq_0_*"]),
        converter={"use": "recd.ikjt"},
        preprocessing=hashed(500),
        pooling=[{"use": "recd.mean", "features": ["seq_*"]}],
        model={"embedding_dim": 8, "num_embeddings": 500, "bottom_mlp": [16], "top_mlp": [16]},
        training={"batch_size": 64, "ranks": 2, **training},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    return tmp_path


def invoked(command: str, *arguments: str) -> Result:
    """What ``recd COMMAND registry.yaml ...`` came to; no exception that it does not handle."""
    result = CliRunner().invoke(main, [command, "registry.yaml", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def plan(*arguments: str) -> Result:
    return invoked("plan", *arguments)
