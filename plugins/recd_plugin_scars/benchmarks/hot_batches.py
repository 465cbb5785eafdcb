"""Whether a model learns as well from hot batches as from the plain order (SCARS, section IV).

Each source of data is trained on in both orders: the same rows and initial weights, one pass. Hot
rows are the share of each table's most read rows that makes half of the samples hot or more. A
control has windows like those of hot batches, of samples that are drawn at random in place of hot
ones. The noise that a change is held against is the spread over seeds of one order, that of the
plain one or of the control, whichever is larger: what one order changes against another is no part
of it. Seeds are of initial weights, and of the control's draws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recd_plugin_scars.benchmarks import hot_batches_data as data
from recd_plugins.testing.benchmark import Detail, Figure, Findings, Size, movielens

if TYPE_CHECKING:
    from recd_plugins.api.registry import Registry
    from recd_plugins.api.training import GroupShare, Quality

SUMMARY = "NE after training on hot batches and in the plain order (SCARS, sections III-IV)"

NUM_SEEDS: dict[Size, int] = {"tiny": 2, "small": 3, "reference": 3}
#: Samples that are to be hot, and the shares of each table's rows that are tried for it.
HOT_SAMPLES = 0.5
SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)

_WINDOW = 64
_HOT = (
    "\n  wrap: [{{use: scars.hot_batches, options: {{profile: {profile}, share: {share}, "
    "sessions: {sessions}}}}}]"
)
_RANDOM = (
    "\n  wrap: [{{use: bench.random_groups, options: {{share: {share}, batches: {batches}, "
    "seed: {seed}}}}}]"
)
_CONTROL = Path(__file__).parent / "control_plugins"


@dataclass(frozen=True)
class Source:
    """Data that is trained on in several orders.

    Attributes:
        name: of the source in figures.
        plain: text of the registry file of the plain order.
        hot: the same with hot batches.
        samples: share of samples of the first window that is hot.
        expected: share that is hot if lookups are independent.
        share: of each table's rows that is hot.
    """

    name: str
    plain: str
    hot: str
    samples: float
    expected: float
    share: float

    def random(self, seed: int) -> str:
        """The registry file of the order in which as many samples are drawn at random."""
        share = min(self.samples, 0.99)
        return _wrapped(self.plain, _RANDOM.format(share=share, batches=_WINDOW, seed=seed))


@dataclass(frozen=True)
class Trained:
    """What one run found; ``groups`` of hot batches by name, else empty."""

    quality: Quality
    groups: Mapping[str, GroupShare]


#: Of a seed: the plain order, hot batches, and batches of random samples.
Orders = tuple[Trained, Trained, Trained]


def workload(size: Size) -> str:
    """The input in words."""
    text = f"PAPERCAL, {data.ROWS[size]:,} rows, whole sessions"
    if size == "reference" and movielens() is not None:
        text += "; MovieLens-100K"
    return (
        f"{text}; {NUM_SEEDS[size]} seeds, one pass, batches of 256, windows of {_WINDOW} batches"
    )


def run(size: Size) -> Findings:
    """Train in every order on every seed."""
    from recd_plugins.api.distributed import launch

    found = Findings([], [], [])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [_papercal(folder, size)]
        if size == "reference" and (path := movielens()) is not None:
            sources.append(_movielens(folder, path))
        # As in the accuracy benchmark: one process and one thread for all of these small runs.
        for source in sources:
            seeds = launch(train_orders, 1, folder, source, NUM_SEEDS[size], threads=1)[0]
            found.figures.extend(figures(source, seeds))
            found.details.append(by_seed(source, seeds))
    return found


def train_orders(
    _rank: int, _world_size: int, folder: Path, source: Source, num_seeds: int
) -> list[Orders]:
    """The orders of each seed."""
    return [
        (
            _train(folder, source.plain, seed),
            _train(folder, source.hot, seed),
            _train(folder, source.random(seed), seed),
        )
        for seed in range(num_seeds)
    ]


def figures(source: Source, seeds: Sequence[Orders]) -> list[Figure]:
    """What hot batches change, next to what seeds change: signed, and the size of it."""
    plain, hot, random = ([of_seed[order].quality for of_seed in seeds] for order in range(3))
    ne_plain, ne_hot, ne_random = (
        [quality.normalized_entropy for quality in order] for order in (plain, hot, random)
    )
    spread_of_seeds, spread_of_random = (max(ne) - min(ne) for ne in (ne_plain, ne_random))
    ne_change = _minus(ne_hot, ne_plain)
    over_noise = sum(ne_change) / len(ne_change) / max(spread_of_seeds, spread_of_random)
    auc_change = _minus([quality.auc for quality in hot], [quality.auc for quality in plain])
    of = [with_hot.groups for _, with_hot, _ in seeds]
    batches = [sum(group.batches for group in groups.values()) for groups in of]
    mixed = [groups["mixed"].batches / total for groups, total in zip(of, batches, strict=True)]
    named: list[tuple[str, list[float], str, Any, float | None]] = [
        ("ne_plain", ne_plain, "NE", "lower", None),
        ("ne_hot_minus_plain", ne_change, "NE", "lower", None),
        ("ne_random_minus_plain", _minus(ne_random, ne_plain), "NE", "lower", None),
        ("ne_spread_of_seeds", [spread_of_seeds], "NE", "lower", None),
        ("ne_spread_of_random_orders", [spread_of_random], "NE", "lower", None),
        ("ne_change_over_noise", [over_noise], "ratio", "lower", None),
        ("ne_abs_change_over_noise", [abs(over_noise)], "ratio", "lower", 1.0),
        ("auc_hot_minus_plain", auc_change, "AUC", "higher", None),
        ("hot_samples", [groups["hot"].share for groups in of], "ratio", "higher", None),
        ("hot_samples_expected", [source.expected], "ratio", "higher", None),
        ("mixed_batches", mixed, "ratio", "lower", None),
    ]
    return [
        Figure.of(f"{source.name}_{name}", values, unit=unit, better=better, goal=goal)
        for name, values, unit, better, goal in named
    ]


def _minus(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


def by_seed(source: Source, seeds: Sequence[Orders]) -> Detail:
    """NE of each seed in every order."""
    return Detail(
        f"{source.name}: NE by seed; the first {source.share:.0%} of each table's rows are hot",
        ["seed", "plain", "hot batches", "random batches"],
        [
            [str(seed), *(f"{order.quality.normalized_entropy:.5f}" for order in orders)]
            for seed, orders in enumerate(seeds)
        ],
    )


def plot(result: dict[str, Any], folder: Path) -> list[Path]:
    """NE of each seed in every order, from a report."""
    from matplotlib.figure import Figure as Picture

    from recd_plugins.api.files import write_figure

    details = result["details"]
    picture = Picture(figsize=(4.5 * len(details), 3.5), layout="constrained")
    axes = picture.subplots(1, len(details), squeeze=False)[0]
    for axis, detail in zip(axes, details, strict=True):
        orders = detail["headings"][1:]
        for seed, *values in detail["rows"]:
            axis.plot(orders, [float(value) for value in values], "o-", label=f"seed {seed}")
        axis.set_title(detail["title"].partition(":")[0])
        axis.set_ylabel("normalized entropy, test split")
        axis.margins(x=0.4)
        axis.legend()
    path = folder / "hot_batches.svg"
    write_figure(path, picture)
    return [path]


def _papercal(folder: Path, size: Size) -> Source:
    """Row groups in one shuffled order, which is that of all seeds."""
    train, test = folder / "train.parquet", folder / "test.parquet"
    data.write_table(train, data.ROWS[size], seed=0)
    data.write_table(test, data.TEST_ROWS[size], seed=data.TEST_SEED)
    text = data.PAPERCAL.format(path=data.quoted(train), test_path=data.quoted(test))
    return _source("papercal", folder, text, sessions=True)


def _movielens(folder: Path, path: Path) -> Source:
    text = data.MOVIELENS.format(path=data.quoted(path))
    return _source("movielens", folder, text, sessions=False)


def _source(name: str, folder: Path, text: str, *, sessions: bool) -> Source:
    """Profile the data, and find how much of each table is to be hot."""
    from recd_plugins.api import DatasetWrapper
    from recd_plugins.api.access import measure_access
    from recd_plugins.api.model import build_model, tables_of
    from recd_plugins.api.registry import load_registry

    path, profile = folder / f"{name}.yaml", folder / f"{name}.access.parquet"
    path.write_text(text, encoding="utf-8")
    registry = load_registry(path)
    registry.dataset.prepare()
    tables = tables_of(build_model(registry, registry.dataset.schema()))
    measure_access(registry, tables, deduplicated=False).save(profile)
    for share in SHARES:
        wrap = _HOT.format(
            profile=data.quoted(profile), share=share, sessions=str(sessions).lower()
        )
        hot = _wrapped(text, wrap)
        path.write_text(hot, encoding="utf-8")
        registry = load_registry(path)
        samples = _hot_samples(registry)
        if samples >= HOT_SAMPLES:
            break
    dataset = registry.wrapped_dataset
    assert isinstance(dataset, DatasetWrapper), "its file wraps it"
    return Source(name, text, hot, samples, dataset.expected_groups()["hot"], share)


def _wrapped(text: str, wrap: str) -> str:
    return text.replace("\nconverter:", f"{wrap}\nconverter:", 1)


def _hot_samples(registry: Registry) -> float:
    """The share of hot samples in the first window."""
    reader = registry.wrapped_dataset.reader(
        rank=0, world_size=1, batch_size=registry.training.batch_size, split="train"
    )
    rows = list(islice(reader, _WINDOW))
    return sum(batch.groups.get("hot", 0) for batch in rows) / sum(map(len, rows))


def _train(folder: Path, text: str, seed: int) -> Trained:
    from recd_plugins.api.training import session

    registry = folder / "registry.yaml"
    registry.write_text(text, encoding="utf-8")
    with session(registry, plugins_dir=_CONTROL, overrides={"seed": seed}) as trainer:
        result = trainer.train("plugins")
    assert result.test is not None, "every source has a test split"
    groups = result.groups.groups if result.groups is not None else ()
    return Trained(result.test, {group.name: group for group in groups})
