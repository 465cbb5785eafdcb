"""The page on tiers names every option of the cost model."""

from __future__ import annotations

from dataclasses import fields

from tests.docs.pages import plugin_page

from recd_plugin_flexshard.planning import CostOptions


def test_the_page_names_every_option() -> None:
    text = plugin_page("flexshard", "tiers.md")
    assert all(f"`{option.name}`" in text for option in fields(CostOptions))
