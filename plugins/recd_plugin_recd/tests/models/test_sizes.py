"""Sizes of the models at any scale, and the page that shows them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from recd_plugin_recd.models import ModelName, sizes_of
from recd_plugin_recd.papercal import shape_of

PAGE = Path(__file__).parents[4] / "docs" / "models.md"


def table_rows() -> dict[str, list[str]]:
    """The cells of the page's table of sizes, by the first of each line."""
    section = PAGE.read_text().split("\n### Sizes\n")[1].split("\n### ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_page_shows_the_sizes():
    rows = table_rows()
    for column, scale in enumerate(map(float, rows["scale"])):
        sizes, shape = sizes_of("rm1", scale), shape_of("rm1", scale)

        def cell(name: str, column: int = column) -> str:
            return rows[name][column]

        assert int(cell("`embedding_dim`")) == sizes.embedding_dim
        assert (
            int(cell("rows of a sequence feature's table").replace(",", "")) == sizes.sequence_rows
        )
        assert int(cell("rows of any other table").replace(",", "")) == sizes.other_rows
        assert cell("bottom MLP") == ", ".join(map(str, sizes.bottom_mlp))
        assert cell("top MLP") == ", ".join(map(str, sizes.top_mlp))
        lengths = sorted({f.mean_length for f in shape.features if f.name.startswith("seq_")})
        assert cell("mean length of sequences") == ", ".join(map(str, lengths))
        users = [f.mean_length for f in shape.features if f.name.startswith("usr_")]
        assert cell("mean length of the user's lists") == f"{min(users)} - {max(users)}"
        tables = [
            sizes.sequence_rows if f.name.startswith("seq_") else sizes.other_rows
            for f in shape.features
        ]
        value, unit = cell("bytes of rm1's tables").split()
        scalars = sum(tables) * sizes.embedding_dim
        assert 4 * scalars / {"MB": 1e6, "GB": 1e9}[unit] == pytest.approx(float(value), rel=0.03)
        named: tuple[tuple[ModelName, str], ...] = (
            ("rm1", "multiply-adds of MLPs and interaction in those of rm1"),
            ("rm2", "of rm2"),
            ("rm3", "of rm3"),
        )
        for name, row in named:
            shown = float(cell(row).rstrip(" %"))
            assert 100 * dense_share(name, scale) == pytest.approx(shown, rel=0.04)


def dense_share(name: ModelName, scale: float) -> float:
    """Multiply-adds of MLPs and interaction over those of all but lookups."""
    sizes, shape = sizes_of(name, scale), shape_of(name, scale)
    dim, num_features = sizes.embedding_dim, len(shape.features)

    def mlp(*widths: int) -> int:
        return sum(width * following for width, following in pairwise(widths))

    dense = mlp(shape.num_dense, *sizes.bottom_mlp, dim)
    dense += (num_features + 1) ** 2 * dim
    dense += mlp(dim + num_features * (num_features + 1) // 2, *sizes.top_mlp, 1)
    pooling = 0.0
    for feature in shape.features:
        if feature.name.startswith("seq_"):
            length = feature.mean_length
            # Attention to all of a row: lengths vary, uniformly over 0.5-1.5 of their mean.
            pooling += 2 * dim * length**2 * 13 / 12
            pooling += dim**2 * (12 * length if name == "rm1" else 3 * length + 1)
    return dense / (dense + pooling)


@pytest.mark.parametrize("name", ["rm1", "rm2", "rm3"])
def test_a_smaller_scale_does_not_flatter_deduplication(name):
    shares = [dense_share(name, scale) for scale in (1.0, 0.5, 0.25, 0.125, 0.0625)]
    assert all(larger > share for share, larger in pairwise(shares))
