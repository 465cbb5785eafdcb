"""A third party's package: installed by pip, found, and its own tests run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_plugin"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment in which the example is installed besides recd-plugins."""
    folder = tmp_path_factory.mktemp("third_party")
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = folder / "site-packages"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", target, source],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    del environment["RECD_ONLY"]
    return environment


def python(environment: dict[str, str], *arguments: str) -> str:
    done = forked.run([sys.executable, *arguments], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def recd(environment: dict[str, str], *arguments: str) -> str:
    return python(environment, "-c", "from recd_plugins.cli import main; main()", *arguments)


def test_its_plugins_are_found_with_their_distribution(environment):
    found = json.loads(recd(environment, "plugins", "--json"))
    names = {plugin["name"] for plugin in found if plugin["from"] == "recd-plugin-example 0.1.0"}
    assert names == {"example.drop_repeats", "example.recency"}


def test_its_command_runs(environment):
    assert recd(environment, "example-hello") == "recd-plugin-example is installed\n"


def test_it_is_left_out_where_third_parties_are(environment):
    found = recd({**environment, "RECD_ONLY": "recd"}, "plugins", "--json")
    assert "example." not in found


def test_its_own_tests_pass(environment, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    python(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests"))
