"""docs/plugins/dataset-wrapper.md: its wrapper keeps the contract, in the page's registry file."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import blocks, page, run_tests_of_plugins

PAGE = page("plugins/dataset-wrapper.md")


def test_the_wrapper_passes_its_test(tmp_path: Path) -> None:
    plugin, test = blocks(PAGE, "python")
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "acme_reversed.py").write_text(plugin)
    (tmp_path / "test_acme_reversed.py").write_text(test)
    (tmp_path / "registry.yaml").write_text(blocks(PAGE, "yaml")[0])
    run_tests_of_plugins(tmp_path)
