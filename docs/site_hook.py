"""The hook of mkdocs.yml: pages of the site from all over the repository, and those of the API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: What the site has of the repository, under the same paths.
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/assets/*",
    "plugins/*/README.md",
    "examples/*/README.md",
    "examples/*/*.yaml",
)
#: Packages that plugins import.
PUBLIC = ("api", "testing")
#: Modules of classes whose methods are those of a private base class, too.
WITH_INHERITED = ("recd_plugins.api",)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Files of the site: the theme's, the repository's and a page a public module."""
    site = Files(file for file in files if file.src_dir != config.docs_dir)
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            site.append(File.generated(config, name, abs_src_path=str(path)))
    for module in public_modules():
        text = f"---\ntitle: {module}\n---\n\n::: {module}\n"
        if module in WITH_INHERITED:
            text += "    options:\n      inherited_members: true\n"
        site.append(File.generated(config, f"docs/api/{module}.md", content=text))
    pages = [page.src_uri for page in site.documentation_pages()]
    config.nav = [expanded(entry, pages) for entry in config.nav or []]
    return site


def public_modules() -> Iterator[str]:
    """Modules of the public packages; what a package lists in ``__all__`` stands on its page."""
    for package in PUBLIC:
        folder = ROOT / "src" / "recd_plugins" / package
        for path in sorted([*folder.parent.glob(f"{package}.py"), *folder.rglob("*.py")]):
            text, init = path.read_text("utf-8"), path.parent / "__init__.py"
            listed = path != init and path.parent != folder and _has_all(init.read_text("utf-8"))
            if _has_all(text) or (re.search("^(class|def) ", text, re.MULTILINE) and not listed):
                parts = path.relative_to(ROOT / "src").with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__")


def _has_all(text: str) -> bool:
    return bool(re.search("^__all__ =", text, re.MULTILINE))


class Comments(griffe.Extension):
    """Docstrings as Markdown, and comments of attributes that begin with ``#:`` as docstrings."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Let ``recd_plugins.api`` export each name that it imports from the framework."""
        if mod.path == "recd_plugins.api":
            mod.exports = [
                name
                for name, each in sorted(mod.members.items())
                if isinstance(each, griffe.Alias) and each.target_path.startswith("recd_plugins.")
            ]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.is_attribute and obj.docstring is None and obj.lineno:
            above = reversed(obj.lines_collection[Path(str(obj.filepath))][: obj.lineno - 1])
            found = [line.strip()[2:] for line in takewhile(lambda s: s.strip()[:2] == "#:", above)]
            if found:
                obj.docstring = griffe.Docstring("\n".join(reversed(found)), parent=obj)
        if obj.docstring is not None:
            # Blocks of code are indented, below a blank line.
            text = re.sub(
                "^( *)Example::?\n+", r"\1For example:\n\n", obj.docstring.value, flags=re.M
            )
            obj.docstring.value = re.sub("::$", ":", text, flags=re.M)


def expanded(entry: Any, pages: list[str]) -> Any:
    """An entry of ``nav``, with the pages that stand for its stars, an index first."""
    if isinstance(entry, dict):
        return {title: expanded(value, pages) for title, value in entry.items()}
    if isinstance(entry, list):
        found = [expanded(value, pages) for value in entry]
        return [each for value in found for each in (value if isinstance(value, list) else [value])]
    if "*" not in entry:
        return entry
    found = [page for page in pages if fnmatchcase(page, entry)]
    return sorted(
        found,
        key=lambda page: (page.count("/"), not page.endswith(("README.md", "index.md")), page),
    )
