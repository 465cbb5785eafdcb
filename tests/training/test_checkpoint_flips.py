"""A bit that flips in any file of a checkpoint is noticed, and so is a file that is not there."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.covering import by_night
from tests.training.checkpoint_cases import Trainer, reseal, save_two

from recd_plugins.cli import main
from recd_plugins.runtime.errors import RecdError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint import Checkpoints
from recd_plugins.training.checkpoint_files import (
    MANIFEST,
    DamagedError,
    problems,
    read_manifest,
    read_progress,
    sealed,
)

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "progress.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_two, 2, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def flip(path: Path, place: float) -> None:
    """Turn over a bit at a share of the file."""
    content = bytearray(path.read_bytes())
    bit = int(place * len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(saved: Path, name: str) -> None:
    path = saved / "step-000000002" / name
    whole = path.read_bytes()
    places = random.Random(name)
    for _ in range(12):
        place = places.random()
        flip(path, place)
        try:
            damage, extra = problems(path.parent)
        finally:
            path.write_bytes(whole)
        assert damage, f"bit at {place} of {name}"
        assert str(path) in damage[0]
        assert not extra
    assert problems(path.parent) == ([], [])


def test_bits_of_the_manifest(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "step-000000002" / MANIFEST, tmp_path)
    whole = (tmp_path / MANIFEST).read_bytes()
    for bit in range(0, len(whole) * 8, 1 if by_night() else 7):  # by day one of each byte
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        (tmp_path / MANIFEST).write_bytes(content)
        with pytest.raises(DamagedError):
            read_manifest(tmp_path)


def test_a_manifest_of_a_later_version(folder: Path) -> None:
    path = folder / "step-000000002" / MANIFEST
    path.write_text(sealed({"format": 2, "files": {}}), encoding="utf-8")
    with pytest.raises(RecdError, match="is of format 2, and this version reads 1") as caught:
        read_manifest(path.parent)
    assert not isinstance(caught.value, DamagedError), "an older one is no substitute"


def recd(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def test_verify_names_what_is_missing_cut_short_changed_or_too_much(folder: Path) -> None:
    good = recd("verify", folder)
    assert good.exit_code == 0, good.output
    assert good.stdout.splitlines() == [
        line for line in good.stdout.splitlines() if line.endswith("bytes, ok")
    ]
    assert len(good.stdout.splitlines()) == 2

    newest = folder / "step-000000002"
    (newest / "__1_0.distcp").unlink()
    (newest / "progress.json").write_text("{}", encoding="utf-8")
    (newest / "notes.txt").write_text("", encoding="utf-8")
    (newest / ".metadata").unlink()
    (newest / ".metadata").symlink_to(folder / "step-000000001" / ".metadata")
    bad = recd("verify", newest)
    assert bad.exit_code == 1
    assert "damaged" in bad.stdout
    lines = bad.stderr.splitlines()
    assert f"{newest}/__1_0.distcp: is missing" in lines
    assert f"{newest}/notes.txt: is no file of this checkpoint" in lines
    assert f"{newest}/.metadata: cannot be read (no plain file)" in lines
    assert any("progress.json: has 2 bytes, and had" in line for line in lines)
    assert recd("list", folder).exit_code == 1

    flip(folder / "step-000000001" / "__0_0.distcp", 0.5)
    assert "ok" in recd("list", folder / "step-000000001").stdout, "it reads no file"
    report = recd("verify", folder / "step-000000001", "--json")
    assert report.exit_code == 1
    ((told,),) = [each["damage"] for each in json.loads(report.stdout)["checkpoints"]]
    assert "__0_0.distcp: its content is not what was written" in told


def test_show(folder: Path) -> None:
    shown = json.loads(recd("show", folder, "--json").stdout)
    assert shown["step"] == 2
    assert shown["tensors"]["model.bags.embedding_bags.t.weight"] == {
        "shape": [16, 4],
        "dtype": "float32",
    }
    assert "step 2, epoch 0" in recd("show", folder).stdout
    flip(folder / "step-000000002" / ".metadata", 0.5)
    refused = recd("show", folder)
    assert refused.exit_code == 1
    assert ".metadata: its content is not what was written" in refused.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"step": -1}', "step: is -1"),
        ('{"step": 2, "losses": [NaN, 1]}', "losses.0: is nan"),
        ('{"step": 2, "losses": [1]}', "losses: are 1, of 2 steps"),
        ('{"step": 3}', "step: is 3; name its folder step-000000003"),
        ("{", "Invalid JSON"),
    ],
)
def test_progress_that_cannot_be(folder: Path, text: str, told: str) -> None:
    checkpoint = folder / "step-000000002"
    (checkpoint / "progress.json").write_text(text, encoding="utf-8")
    reseal(checkpoint)
    with pytest.raises(DamagedError, match=rf"progress\.json: .*{told}"):
        read_progress(checkpoint)


def load_each(rank: int, world_size: int, folders: list[Path]) -> list[str]:
    """What loading says, folder by folder: the step, or the error."""
    trainer = Trainer(world_size)
    said = []
    for folder in folders:
        try:
            progress = Checkpoints(folder, keep=1).load(trainer.dmp, trainer.optimizer)
            said.append(f"step {progress.step}")
        except RecdError as error:
            said.append(str(error))
    return said


def test_a_damaged_one_falls_back_to_the_one_before(saved: Path, tmp_path: Path) -> None:
    """On all ranks, whichever of them it is that reads the damaged file."""
    one, none, gone = (
        Path(shutil.copytree(saved, tmp_path / name)) for name in ("one", "none", "gone")
    )
    flip(one / "step-000000002" / "__1_0.distcp", 0.5)
    flip(none / "step-000000002" / "__0_0.distcp", 0.5)
    flip(none / "step-000000001" / "progress.json", 0.5)
    (gone / "step-000000002" / MANIFEST).unlink()
    first, second = run_on_ranks(load_each, 2, [one, none, gone])
    assert first == second
    assert first[0] == first[2] == "step 1"
    assert "no checkpoint is whole" in first[1]
    assert "step-000000002/__0_0.distcp: its content" in first[1]
    assert "step-000000001/progress.json: its content" in first[1]
    names = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in (one, none)}
    assert names["one"] == ["step-000000001", "step-000000002.damaged-1"]
    assert names["none"] == ["step-000000001", "step-000000002"], "nothing is touched"
