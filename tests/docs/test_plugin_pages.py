"""The code of docs/plugins runs: each page's plugin loads and passes its kind's contract."""

import re
import sys

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML
from tests import forked
from tests.absent import uses_what_is_absent
from tests.docs.pages import DOCS, blocks, page, run_tests_of_plugins

from recd_plugins import load_registry
from recd_plugins.cli import main
from recd_plugins.config.built_in_kinds import BY_NAME
from recd_plugins.config.manager import PluginManager

#: Tests of the further plugins of the page of preprocessing.
FURTHER = {
    "acme_listed": """
import pytest
from acme_listed import Listed
from recd_plugins.testing.contracts import PreprocessingContract

class TestListed(PreprocessingContract):
    max_id = 9
    @pytest.fixture
    def plugin(self, tmp_path):
        (tmp_path / "ids.txt").write_text("2\\n5\\n7\\n")
        return Listed(Listed.Options(path=tmp_path / "ids.txt"))
    def test_numbers_ids(self, plugin):
        import torch
        ids, offsets = torch.tensor([7, 2, 3, 9]), torch.tensor([0, 4])
        assert plugin.transform(ids, offsets)[0].tolist() == [3, 1, 0, 0]
        before = plugin.identity()
        plugin.options.path.write_text("2\\n5\\n8\\n")
        assert type(plugin)(plugin.options).identity() != before
""",
    "acme_vocabulary": """
import pytest
from acme_vocabulary import Vocabulary
from recd_plugins.testing.contracts import PreprocessingContract

class TestVocabulary(PreprocessingContract):
    @pytest.fixture(params=[1, 4, 1000])
    def plugin(self, request):
        return Vocabulary(Vocabulary.Options(size=request.param))

def test_numbers_frequent_ids():
    import torch
    plugin = Vocabulary(Vocabulary.Options(size=2))
    rows = [(torch.tensor(ids), torch.tensor([0, 3])) for ids in ([9, 5, 3], [9, 9, 5])]
    plugin.fit("item", iter(rows))
    ids = plugin.transform(torch.tensor([3, 5, 9, 0, 77]), torch.tensor([0, 5]))[0]
    assert ids.tolist() == [0, 1, 2, 0, 0]
""",
}
PAGES = sorted(path.name for path in (DOCS / "plugins").iterdir())


def text_of(kind: str) -> str:
    return page(f"plugins/{kind}.md")


def code_of(kind: str) -> str:
    return "".join(blocks(text_of(kind), "python"))


def module_name(kind: str) -> str:
    """Of the plugin's file: the page names it right before the code."""
    match = re.search(r"`plugins/(\w+)\.py`:", text_of(kind))
    assert match
    return match[1]


@pytest.mark.parametrize("kind", BY_NAME)
def test_the_plugin_loads_and_its_registry_entry_is_valid(kind, tmp_path):
    (tmp_path / f"{module_name(kind)}.py").write_text(blocks(text_of(kind), "python")[0])
    entry = YAML(typ="safe").load(blocks(text_of(kind), "yaml")[0])[BY_NAME[kind].section]
    entry = entry[0] if isinstance(entry, list) else entry
    registered = PluginManager(tmp_path).plugins[kind][entry["use"]]
    registered.cls(registered.cls.Options.model_validate(entry.get("options", {})))


def test_the_plugins_pass_their_contracts(tmp_path):
    """One process for all pages: importing torch takes most of the time."""
    (tmp_path / "plugins").mkdir()
    kinds = [each for each in (*BY_NAME, "kind") if not uses_what_is_absent(code_of(each))]
    for kind in kinds:
        for module, code in re.findall(
            r"`plugins/(\w+)\.py`:\n\n```python\n(.*?)```", text_of(kind), re.S
        ):
            (tmp_path / "plugins" / f"{module}.py").write_text(code)
        *_, test = blocks(text_of(kind), "python")
        (tmp_path / f"test_{module_name(kind)}.py").write_text(test)
    for name, test in FURTHER.items():
        opening = f'"""{name.replace("_", ".")}: '
        codes = blocks(text_of("preprocessing"), "python")
        (code,) = (code for code in codes if code.startswith(opening))
        (tmp_path / "plugins" / f"{name}.py").write_text(code)
        (tmp_path / f"test_{name}.py").write_text(test)
    for name, code in zip(
        ("plugins/acme_arrow.py", "test_acme_arrow.py"),
        blocks(text_of("dataset"), "python")[1:-1],
        strict=True,
    ):
        (tmp_path / name).write_text(code)
    run_tests_of_plugins(tmp_path)


def test_the_mode_of_recd_plan_runs(tmp_path):
    (tmp_path / "epoch.py").write_text(
        next(
            block
            for block in blocks(page("plugins/README.md"), "python")
            if "PlanMode, hookimpl" in block
        )
    )
    (registry,) = (DOCS.parent / "examples" / "random").glob("registry.yaml")
    command = ["--plugins-dir", str(tmp_path), "plan", str(registry), "--epoch", "--batch-size"]
    result = CliRunner().invoke(main, [*command, "100", "--nodes", "1", "--ranks-per-node", "2"])
    assert result.stdout == "5000 steps of 200 rows\n", result.output


def test_the_fake_device_refuses_to_mix(tmp_path):
    pages = blocks(page("plugins/README.md"), "python")
    (tmp_path / "check.py").write_text(next(block for block in pages if "fake_device" in block))
    done = forked.run([sys.executable, tmp_path / "check.py"])
    assert done.returncode == 1
    assert "RuntimeError: aten.addmm.default has tensors of cpu and of fake_device" in done.stderr


def test_the_kind_has_a_section_and_its_entries_are_called(tmp_path):
    plugin, call, _ = blocks(text_of("kind"), "python")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme_alert.py").write_text(plugin)
    section = blocks(text_of("kind"), "yaml")[0]
    head = "version: 1\ndataset: {use: recd.session_parquet, options: {path: a}}\n"
    (tmp_path / "r.yaml").write_text(f"{head}converter: {{use: recd.kjt}}\n{section}")
    found = {"registry": load_registry(tmp_path / "r.yaml", plugins_dir=tmp_path / "plugins")}
    exec(call, found)
    assert found["said"] == {name: f"{name} has 2,000,000 rows" for name in ("t_user", "t_item")}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_listed(name):
    assert name == "README.md" or f"]({name})" in page("plugins/README.md")
