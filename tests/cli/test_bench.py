"""`recd bench` with benchmarks that plugins bring."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from recd_plugins.cli import main

PLUGIN = """
from recd_plugins.api import hookimpl

@hookimpl
def register_benchmarks():
    return ["acme_bench.lookup"]
"""
LOOKUP = """
from typing import Literal
from recd_plugins.testing.benchmark import Detail, Figure, Findings

SUMMARY = "a lookup of [ours]"
HELP = {"num_rows": "Rows of the table."}

def workload(size, **options):
    return f"{size} {options}"

def run(
    size, *, num_rows: int = 10, kind: Literal["bag", "list"] | None = None, cold: bool = False
) -> list[Figure]:
    value = num_rows + cold
    return [Figure.of(f"lookup_{kind}", [value], unit="s", better="lower")]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme.py").write_text(PLUGIN)
    (tmp_path / "acme_bench").mkdir()
    (tmp_path / "acme_bench" / "lookup.py").write_text(LOOKUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("acme_bench")]:
        del sys.modules[name]


def bench(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["--plugins-dir", "plugins", "bench", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


#: What a benchmark does wrong in ``run``, and how that is told.
WRONG = {
    "raise SystemExit(0)": r"run failed at .*lookup.py:\d+: SystemExit: 0",
    "1 / 0": r"run failed at .*lookup.py:\d+: ZeroDivisionError",
    "return None": "run returned None; expected Figures",
    "return []": r"run returned \[\]; expected Figures, at least one",
    "return [5]": r"run returned \[5\]; expected Figures",
    "return [Figure.of('a', [1], unit='s', better='faster')]": "of which higher",
    "return [Figure.of('a', [float('nan')], unit='s', better='lower')]": ": a: a sample is nan",
    "return [Figure('a', 1, 's', 'lower', 2, 1, float('inf'))]": "run returned max of a as inf",
    "return [Figure('a', 1, 's', 'lower', 1, 1, 1, goal=float('nan'))]": "goal of a as nan",
    "return [Figure('a', 'x', 's', 'lower', 1, 1, 1)]": "run returned a as 'x'; expected a finite",
    "import numpy as np; return [Figure('a', np.int64(1), 's', 'lower', 1, 1, 1)]": "int64.1.; exp",
    "return [Figure(5, 1, 's', 'lower', 1, 1, 1)]": "run returned .*; expected Figures",
    "return Findings([], None, [])": "run returned .*; expected Figures.* or Findings",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_a_benchmark_does_wrong_names_it(folder: Path, body: str) -> None:
    code = LOOKUP.replace("value = num_rows + cold", body)
    (folder / "acme_bench" / "lookup.py").write_text(code)
    done = bench("lookup", "--json", "r.json")
    assert done.exit_code == 1
    assert re.search(f"benchmark lookup: .*{WRONG[body]}", " ".join(done.output.split()))
    assert not (folder / "r.json").exists()


def test_a_workload_is_words(folder: Path) -> None:
    code = LOOKUP.replace('return f"{size} {options}"', "return None")
    (folder / "acme_bench" / "lookup.py").write_text(code)
    done = bench("lookup")
    assert "benchmark lookup: workload returned None; expected words" in done.output
    assert done.exit_code == 1


def test_a_benchmark_of_a_plugin_has_its_own_options(folder: Path) -> None:
    shown = " ".join(bench("lookup", "--help").output.split())
    assert "--num-rows INTEGER Rows of the table. [default: 10]" in shown
    assert "--kind [bag|list]" in shown
    assert "--plot" not in shown
    done = bench("lookup", "--num-rows", "3", "--cold", "--kind", "bag", "--json", "r.json")
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "r.json").read_text())
    assert report["workload"] == "small {'num_rows': 3, 'cold': True, 'kind': 'bag'}"
    assert [(each["figure"], each["value"]) for each in report["figures"]] == [("lookup_bag", 4)]
    assert "a lookup of [ours]" in bench().output


def test_options_say_no_and_have_to_be_given(folder: Path) -> None:
    """A default of True can be turned off, and is what runs without; none is no default."""
    code = LOOKUP.replace("num_rows: int = 10", "num_rows: int, warm: bool = True")
    (folder / "acme_bench" / "lookup.py").write_text(code)
    shown = " ".join(bench("lookup", "--help").output.split())
    assert "--warm / --no-warm" in shown
    assert "_empty" not in shown
    done = bench("lookup")
    assert done.exit_code == 2
    assert "Missing option '--num-rows'" in done.output
    for given, warm in (([], True), (["--no-warm"], False), (["--warm"], True)):
        done = bench("lookup", "--num-rows", "3", "--json", "r.json", *given)
        assert done.exit_code == 0, done.output
        report = json.loads((folder / "r.json").read_text())
        told = {"num_rows": 3, "warm": warm, "kind": None, "cold": False}
        assert report["workload"] == f"small {told}"


def test_a_package_of_benchmarks_alone_is_listed(folder: Path) -> None:
    listed = CliRunner().invoke(main, ["--plugins-dir", "plugins", "plugins"]).output
    assert f"{Path('plugins') / 'acme.py'}\n  brings benchmarks\n" in listed
    of_kind = ["--plugins-dir", "plugins", "plugins", "--kind", "sharding"]
    assert "brings" not in CliRunner().invoke(main, of_kind).output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('["acme_bench.lookup"]', '"acme_bench.lookup"'), "return a list of modules"),
        (('"acme_bench.lookup"', "5"), "register_benchmarks returned 5; name modules, as acme."),
        (
            ('["acme_bench.lookup"]', '["acme_bench.lookup", "other.lookup"]'),
            "benchmark lookup is other.lookup, and acme_bench.lookup already; rename one, or",
        ),
    ],
)
def test_what_is_no_benchmark_is_refused(
    folder: Path, change: tuple[str, str], message: str
) -> None:
    (folder / "plugins" / "acme.py").write_text(PLUGIN.replace(*change))
    for command in (["bench", "lookup"], ["plugins"]):
        result = CliRunner().invoke(main, ["--plugins-dir", "plugins", *command])
        assert result.exit_code == 1
        assert result.output.startswith(str(Path("plugins") / "acme.py"))
        assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "acme_bench.lookup failed to import: ModuleNotFoundError"),
        ("raise SystemExit(0)", "acme_bench.lookup failed to import: SystemExit: 0"),
        ("SUMMARY = ''", "benchmark lookup: acme_bench.lookup has no workload and no run"),
        (LOOKUP.replace('"a lookup of [ours]"', "5"), "acme_bench.lookup: SUMMARY is 5; expected"),
        (f"{LOOKUP}\nrun = 5", "benchmark lookup: acme_bench.lookup: run is no function"),
    ],
)
def test_one_that_is_broken_stops_no_other(folder: Path, text: str, message: str) -> None:
    (folder / "acme_bench" / "lookup.py").write_text(text)
    done = bench("lookup")
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.startswith(f"{Path('plugins') / 'acme.py'}: benchmark lookup: acme_bench.l")
    listed = bench()
    assert listed.exit_code == 0
    assert message in " ".join(listed.output.split())
    assert "network" in listed.output


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("num_rows = 10", "run takes num_rows without a type, by which its option is made; write"),
        ("num_rows: Unknown = 10", "reading the types of run failed at "),
    ],
)
def test_an_option_needs_a_type(folder: Path, parameter: str, message: str) -> None:
    code = LOOKUP.replace("num_rows: int = 10", parameter)
    text = f"from __future__ import annotations\n{code}"
    (folder / "acme_bench" / "lookup.py").write_text(text)
    done = bench("lookup")
    assert done.exit_code == 1
    assert f"benchmark lookup: {message}" in done.output


def test_help_names_benchmarks_without_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom recd_plugins.cli import main\n"
        "try: main(['--plugins-dir', 'plugins', 'bench', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'torchrec', 'acme_bench.lookup'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lookup" in done.stdout
    assert done.stdout.rstrip().endswith("[]"), done.stdout.splitlines()[-1]
