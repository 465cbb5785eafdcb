"""``recd doctor``: what it says of sets of packages that do and do not belong together."""

import importlib.metadata
import json
from pathlib import PurePosixPath

import pytest
from click.testing import CliRunner
from tests.installed import Site, on_path

from recd_plugins.cli import doctor, main
from recd_plugins.runtime.versions import fbgemm_has_cuda, installed_set

REAL = [PurePosixPath("fbgemm_gpu/__init__.py"), PurePosixPath("fbgemm_gpu-1.8.0.dist-info/RECORD")]


@pytest.fixture
def installed(monkeypatch):
    """Make the given distributions look like all that is installed."""

    def installed(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        installed_set.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "files", lambda _: REAL)

    yield installed
    installed_set.cache_clear()


def checks() -> dict[str, doctor.Check]:
    return {check.name: check for check in (doctor._versions(), doctor._one_fbgemm())}


def test_this_machine_is_well():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert result.exit_code == 0, found
    for name in ("versions", "fbgemm build", "fbgemm", "torchrec", "gloo", "numba", "plugins"):
        assert found[name]["status"] == "ok", found[name]


@pytest.mark.parametrize(
    ("torch", "others"),
    [("2.11.0", "1.6.0"), ("2.12.1+cpu", "1.7.0"), ("2.13.0", "1.8.0"), ("2.14.0", "1.9.2")],
)
def test_sets_that_belong_together(installed, torch, others):
    installed({"torch": torch, "torchrec": others, "fbgemm-gpu": others})
    assert {check.status for check in checks().values()} == {"ok"}


@pytest.mark.parametrize(
    ("torch", "torchrec", "fbgemm", "remedy"),
    [
        ("2.13.0", "1.7.0", "1.8.0", "with torch 2.13 install fbgemm 1.8.* and torchrec 1.8.*"),
        ("2.13.0", "1.8.0", "1.6.0", "with torch 2.13 install fbgemm 1.8.* and torchrec 1.8.*"),
        ("2.9.0", "1.8.0", "1.8.0", "install one of the sets: torch 2.11, fbgemm 1.6"),
    ],
)
def test_sets_that_do_not(installed, torch, torchrec, fbgemm, remedy):
    installed({"torch": torch, "torchrec": torchrec, "fbgemm-gpu-cpu": fbgemm})
    check = checks()["versions"]
    assert check.status == "failed"
    assert remedy in check.remedy


def test_both_builds_at_once_fail(installed):
    both = {"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    installed({"torch": "2.13.0", "torchrec": "1.8.0", **both})
    check = checks()["fbgemm build"]
    assert check.status == "failed"
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu" in check.remedy


def test_a_check_that_breaks_is_a_failure_with_a_remedy(monkeypatch):
    def broken() -> doctor.Check:
        raise OSError("libfbgemm.so: undefined symbol")

    monkeypatch.setattr(doctor, "_fbgemm_operators", broken)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "undefined symbol" in " ".join(result.stdout.split())
    assert "reinstall the fbgemm build that belongs to this torch" in result.stdout


@pytest.mark.parametrize(
    ("builds", "cuda"),
    [
        ({"fbgemm-gpu": "1.8.0"}, True),
        ({"fbgemm-gpu": "1.8.0+cu130"}, True),
        ({"fbgemm-gpu": "1.8.0+cpu"}, False),
        ({"fbgemm-gpu-cpu": "1.8.0"}, False),
        ({"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, False),
        ({}, False),
    ],
)
def test_tells_the_builds_of_fbgemm_apart(installed, builds, cuda):
    installed(builds)
    assert fbgemm_has_cuda() is cuda


def test_run_warns_of_packages_that_do_not_belong_together(installed, tmp_path):
    missing = str(tmp_path / "registry.yaml")
    assert "belong together" not in CliRunner().invoke(main, ["run", missing]).stderr
    installed({"torch": "2.13.0", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.8.0"})
    result = CliRunner().invoke(main, ["run", missing])
    assert result.stderr.splitlines()[0] == (
        "torch 2.13.0, fbgemm 1.8.0, torchrec 1.7.0 do not belong together: "
        "with torch 2.13 install fbgemm 1.8.* and torchrec 1.8.*. See recd doctor"
    )


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("['torch:Tensor']", "register_internals returned 'torch:Tensor'; return api.distributed."),
        ("1 / 0", "register_internals failed: ZeroDivisionError"),
    ],
)
def test_a_package_that_registers_no_internals_is_told(tmp_path, monkeypatch, returned, said):
    text = (
        "from recd_plugins.api import hookimpl\n"
        f"@hookimpl\ndef register_internals(): return {returned}\n"
    )
    with on_path(tmp_path, monkeypatch):
        Site(tmp_path).install("acme", text)
        result = CliRunner().invoke(main, ["doctor", "--json"])
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert found["internals"]["status"] == "failed", found
    assert f"acme-plugins 1.0: {said}" in found["internals"]["detail"]
