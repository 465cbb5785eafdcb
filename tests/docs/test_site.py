from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from inspect import ismodule
from pathlib import Path
from pkgutil import walk_packages

import pytest

from recd_plugins import api

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_is_on_its_page(site: Path) -> None:
    pages = sorted((site / "docs" / "api").glob("*.html"))
    modules = walk_packages(getattr(api, "__path__", ()), "recd_plugins.api.")
    public = {"recd_plugins.api", *(module.name for module in modules)}
    assert public | {"recd_plugins.testing.contracts"} <= {page.stem for page in pages}
    for page in pages:
        html = page.read_text(encoding="utf-8")
        module = importlib.import_module(page.stem)
        names = [n for n in getattr(module, "__all__", ()) if not ismodule(getattr(module, n))]
        missing = [name for name in names if f'id="{page.stem}.{name}"' not in html]
        assert not missing, f"without a docstring, or not where it is imported from: {missing}"


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=\"?([^\" >]+)", html)
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    assert (site / "search" / "search_index.json").exists()
