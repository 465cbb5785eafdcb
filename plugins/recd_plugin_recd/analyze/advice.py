"""What to deduplicate and how: from DedupeFactors to a section of registry.yaml."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML

from recd_plugin_recd.analyze.table_analysis import DedupGroupReport, FeatureReport, Form

#: A feature is worth deduplicating from this DedupeFactor on (RecD, section 4.3).
MIN_FACTOR = 1.5
#: Partial deduplication is worth its offsets where it stores so much less than exact.
MIN_GAIN = 1.2


def choose_form(exact: float, partial: float) -> Form:
    """The form that pays for a feature with these DedupeFactors."""
    if partial >= MIN_FACTOR and partial >= MIN_GAIN * exact:
        return "partial"
    return "exact" if exact >= MIN_FACTOR else "plain"


def converter_section(features: Sequence[FeatureReport], groups: Sequence[DedupGroupReport]) -> str:
    """The section ``converter`` of a registry file that follows these reports."""
    partial = [each.name for each in features if each.form == "partial"]
    kept = [[name for name in group.features if name not in partial] for group in groups]
    exact = [names for names in kept if names]
    section: dict[str, Any] = {"use": "recd.kjt"}
    if partial:
        section = {"use": "recd.partial_ikjt", "options": {"features": partial, "groups": exact}}
    elif exact:
        section = {"use": "recd.ikjt", "options": {"groups": exact}}
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = None
    yaml.width = 88
    yaml.dump({"converter": section}, text)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
