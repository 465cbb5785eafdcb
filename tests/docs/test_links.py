"""Links lead somewhere, the index to every page, and the site needs no network."""

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
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *DOCS.rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
)


def without_code_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code_blocks(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"https?://|mailto:", target)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_index_leads_to_every_page() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md" and page.is_file():
            reached.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert {*DOCS.rglob("*.md"), *ROOT.glob("plugins/*/README.md")} <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:tests|src|plugins|benchmarks)/[\w./*-]+)`", without_code_blocks(page))
    folders = (ROOT, page.parent)
    assert not [p for p in named if not any(any(f.glob(p.rstrip("/"))) for f in folders)]


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


def test_the_site_has_every_public_name(site: Path) -> None:
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


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=\"?([^\" >]+)", html)
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    assert (site / "search" / "search_index.json").exists()
