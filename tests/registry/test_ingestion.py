from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import recd, refusal
from tests.plugin_files import write_plugins

from recd_plugins import RunConfig, load_registry
from recd_plugins.data.loader import build_dataloader, check_ingestion
from recd_plugins.runtime.errors import RegistryError

PLUGINS = '''
class Far(Ingestion):
    """Reads in this process, and refuses where it is told to."""
    name = "acme.far"
    class Options(PluginOptions):
        readers: int = Field(default=1, gt=0)
        refuses: str = ""
    def check(self): self.at("check")
    def open(self, work):
        self.at("open")
        return FarFeed(self, work)
    def at(self, what):
        if self.options.refuses == what:
            raise SetupError(f"'acme.far' has no engine to {what}. Start an engine")

class FarFeed(Feed):
    def __init__(self, plugin, work):
        self.plugin, self.reader, self.closed = plugin, work.open(), 0
    def read(self, reader):
        from recd_plugins.data.workers import hand_out
        return hand_out(self.reader.blocks(reader.state_dict(), 0, 1), reader)
    def report(self):
        return {"readers": self.plugin.options.readers, "closed": self.closed}
    def close(self): self.closed += 1
'''

FILE = """\
version: 1
dataset: {use: recd.interactions, options: {path: log.inter}}
converter: {use: recd.ikjt}
ingestion:
  use: acme.far
  options: OPTIONS
training: {batch_size: 4, evaluate: false}
"""

LOG = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(
    f"{row % 3}\t{row % 5}\t{1 + row % 5}\t{row}\n" for row in range(200)
)


@pytest.fixture(autouse=True)
def _files(cwd: Path) -> None:
    write_plugins(cwd, PLUGINS, "Far")
    (cwd / "log.inter").write_text(LOG)


def write(options: str = "{}", **changes: str) -> Path:
    text = FILE.replace("OPTIONS", options)
    for old, new in changes.items():
        text = text.replace(old, new)
    path = Path("registry.yaml")
    path.write_text(text)
    return path


def registry(options: str = "{}") -> RunConfig:
    return load_registry(write(options), plugins_dir="plugins")


RUN = ["--plugins-dir", "plugins", "run", "registry.yaml"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"acme.far": "acme.fa"}, "registry.yaml:5 ingestion.use: no ingestion plugin is named "
         "'acme.fa'. Did you mean 'acme.far'?"),
        ({"{}": "{reader: 2}"}, "registry.yaml:6 ingestion.options.reader: unknown option of "
         "'acme.far'. Did you mean 'readers'?"),
        ({"batch_size: 4": "workers: 2"}, "registry.yaml:7 training.workers: 2 workers and "
         "ingestion plugin 'acme.far' would both read the data. Set training.workers: 0, or "
         "remove the ingestion: section"),
    ],
)  # fmt: skip
def test_mistakes_have_lines(changes, expected):
    with pytest.raises(RegistryError) as caught:
        load_registry(write(**changes), plugins_dir="plugins")
    assert str(caught.value) == expected


def test_workers_may_not_be_added_later():
    made = registry()
    assert made.with_training({"workers": 0}).ingestion is made.ingestion
    with pytest.raises(RegistryError, match=r"training\.workers: 2 workers and ingestion"):
        made.with_training({"workers": 2})
    assert "ingestion plugin 'acme.far'" in refusal(*RUN, "--workers", "2")


def test_what_it_refuses_has_the_line_of_its_entry():
    with pytest.raises(RegistryError, match=r"registry\.yaml:4 ingestion: .* no engine to check"):
        check_ingestion(registry("{refuses: check}"))
    with pytest.raises(RegistryError, match=r"registry\.yaml:4 ingestion: .* no engine to open"):
        build_dataloader(registry("{refuses: open}"), 0, 1)
    write("{refuses: check}")
    assert "yaml:4 ingestion: 'acme.far' has no engine to check. Start" in refusal(*RUN)


def test_the_loader_closes_it_and_reports_its_figures():
    with build_dataloader(registry("{readers: 3}"), 0, 1) as loader:
        assert dict(loader.report()) == {"readers": 3, "closed": 0}
        assert len(list(loader)) == len(loader)
    assert dict(loader.report()) == {"readers": 3, "closed": 1}


def test_a_run_reads_by_it_and_shows_its_figures():
    path = write("{readers: 3}", **{"batch_size: 4": "batch_size: 4, steps: 3"})
    path.write_text(path.read_text() + "model: {embedding_dim: 4, num_embeddings: 100}\n")
    recd(*RUN, "--json", "run.json")
    report = json.loads(Path("run.json").read_text())
    assert '"ingestion": [{"readers": 3, "closed": 1}]' in json.dumps(report)
