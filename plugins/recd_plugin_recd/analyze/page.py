"""A report as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from recd_plugin_recd.analyze.plots import (
    MAX_FEATURES,
    duplication_plot,
    factor_plot,
    session_plot,
    storage_plot,
)
from recd_plugin_recd.analyze.table_analysis import TableAnalysis
from recd_plugin_recd.analyze.words import (
    bytes_in_words,
    factor,
    findings,
    session_rows,
    share,
    storage_rows,
)
from recd_plugins.api.pages import Html, element, html_page, html_section, html_table

_GLOSSARY = (
    ("exact", "ids in rows that equal the row before in their session, as a share of all ids"),
    ("partial", "ids that the row before in the session has too, wherever they stand"),
    ("d", "how often the next row of a session has the same list"),
    (
        "DedupeFactor",
        "ids over ids that are left when equal rows of a batch are stored once; worth it from "
        "about 1.5",
    ),
    (
        "predicted",
        "1 / (1 - (S - 1) / S * d), with S the samples of a session: in a batch as the table is, "
        "in a partition by session. It knows of no rows that repeat in other sessions",
    ),
    ("partial factor", "the same where a row that moved on by a few ids stores only the new ones"),
)


def page(report: TableAnalysis) -> str:
    """The page, with plots as SVG and tables."""
    title = f"recd analyze {report.path}"
    parts = [
        element("h1", title),
        element("ul", *(element("li", finding) for finding in findings(report))),
        *html_section(
            "Samples of a session",
            "Rows of a session repeat one another. Those that fall into one batch can be "
            "deduplicated there; those that lie together in a partition can be brought into one.",
            session_plot(report),
        ),
        _sessions(report),
        *html_section(
            "Duplication",
            "What each feature repeats of the row before in its session." + _shown(report),
            duplication_plot(report),
        ),
        *html_section(
            "DedupeFactors",
            "How many times fewer ids a batch holds when each list is stored once.",
            factor_plot(report),
        ),
        _features(report),
        _glossary(),
        *html_section(
            "Storage",
            "What the features take in Parquet. Of the files it is known, the rest was written to "
            "a scratch file to learn it, with the settings of recd cluster.",
            storage_plot(report),
        ),
        _storage(report),
        *_advice(report),
    ]
    return html_page(title, parts)


def _shown(report: TableAnalysis) -> str:
    more = len(report.features) > MAX_FEATURES
    return f" The plots show the {MAX_FEATURES} features with the most ids." if more else ""


def _sessions(report: TableAnalysis) -> Html:
    rows = [
        (label, share(partition), share(batch)) for label, partition, batch in session_rows(report)
    ]
    return html_table(("samples", "sessions, in a partition", "sessions, in a batch"), rows)


def _features(report: TableAnalysis) -> Html:
    headings = (
        "feature", "ids a row", "d", "exact", "partial", "predicted as is", "found as is",
        "predicted by session", "found by session", "partial factor", "pays",
    )  # fmt: skip
    rows = [
        (
            each.name,
            f"{each.length:.1f}",
            f"{each.stays:.3f}",
            share(each.exact),
            share(each.partial),
            factor(each.predicted_as_is),
            factor(each.measured_as_is),
            factor(each.predicted_by_session),
            factor(each.measured_by_session),
            factor(each.partial_factor),
            each.form or "-",
        )
        for each in report.features
    ]
    return html_table(headings, rows)


def _storage(report: TableAnalysis) -> Html:
    rows = [
        (what, f"{size:,.0f}", bytes_in_words(size * report.rows))
        for what, size in storage_rows(report.storage)
    ]
    return html_table(("", "bytes a row", "table"), rows)


def _glossary() -> Html:
    terms: list[str] = []
    for term, meaning in _GLOSSARY:
        terms += [element("b", term), f": {meaning}", "; "]
    return element("p", *terms[:-1], ".", css="note")


def _advice(report: TableAnalysis) -> Iterable[Html]:
    if report.converter is None:
        return
    later = "" if report.clustered else ", once the table is clustered by session"
    rows = [
        (", ".join(group.features), str(len(group.features)), factor(group.dedupe_factor))
        for group in report.groups
    ]
    yield element("h2", f"For registry.yaml{later}")
    yield element("pre", report.converter)
    if rows:
        yield element("p", "Features that change together, and their DedupeFactor as one group:")
        yield html_table(("features", "number", "DedupeFactor"), rows)
