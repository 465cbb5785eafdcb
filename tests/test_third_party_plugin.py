"""A third party's package: installed by pip, found, and its own tests run."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.installed import pip_installed, python, recd

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "third_party_plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return pip_installed(EXAMPLE, tmp_path_factory.mktemp("third_party"))


def test_its_plugins_and_command_are_found(environment):
    found = json.loads(recd(environment, "plugins", "--json"))
    names = {plugin["name"] for plugin in found if plugin["from"] == "recd-plugin-example 0.1.0"}
    assert names == {"example.drop_repeats", "example.recency"}
    assert recd(environment, "example-hello") == "recd-plugin-example is installed\n"
    assert "example." not in recd({**environment, "RECD_ONLY": "recd"}, "plugins", "--json")


def test_its_own_tests_pass(environment, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests"))


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("example", sorted(path.name for path in ROOT.glob("examples/third_*")))
def test_examples_need_only_what_make_setup_installs(example):
    installed = {project(ROOT)["name"]}
    installed |= {project(file.parent)["name"] for file in ROOT.glob("plugins/*/pyproject.toml")}
    needed = project(ROOT / "examples" / example)["dependencies"]
    assert {Requirement(each).name for each in needed} <= installed
