"""Work folders: one process at a time, and who waits for another is told so first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recd_plugins.runtime.errors import DataError
from recd_plugins.runtime.work_folder import work_folder


def made_by(name: str, target: Path, waiting: threading.Event) -> str:
    """Who made the target: this one, or another that it waited for."""
    with work_folder(target, "test", {}, lambda _: None, waits=waiting.set) as work:
        if not target.exists():
            work.table.mkdir()
            (work.table / "maker").write_text(name)
            work.publish(target)
    return (target / "maker").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_another_is_waited_for(tmp_path: Path, fails: bool) -> None:
    target, waiting = tmp_path / "made", threading.Event()
    with ThreadPoolExecutor() as threads:
        try:
            with work_folder(target, "test", {}, lambda _: None) as work:
                second = threads.submit(made_by, "second", target, waiting)
                assert waiting.wait(10)
                assert not second.done()
                if fails:
                    raise DataError("a value is wrong")
                work.table.mkdir()
                (work.table / "maker").write_text("first")
                work.publish(target)
        except DataError:
            assert fails
        assert second.result(10) == ("second" if fails else "first")
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_one_that_does_not_wait_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with (
        work_folder(target, "test", {}, lambda _: None),
        pytest.raises(DataError, match="another process is at work for this target"),
        work_folder(target, "test", {}, lambda _: None),
    ):
        pass


def published(target: Path, meanwhile: str = "") -> bool:
    """Make a target, to which another program writes; whether that went on from a run before."""
    with work_folder(target, "test", {}, lambda _: None) as work:
        if not work.resumed:
            work.table.mkdir()
            (work.table / "maker").touch()
        if meanwhile:
            target.write_text(meanwhile)
        work.publish(target)
    return work.resumed


def test_what_cannot_be_put_in_its_place_stays(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(DataError, match=r"whole, and stays in .*/\.made\.test/table"):
        published(target, meanwhile="what another program wrote")
    target.unlink()
    assert published(target), "the next run goes on from it"
    assert (target / "maker").exists()
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
