"""Preprocessing that is fitted to training rows: to what, how often, and who has it then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.plugin_files import write_plugins
from tests.small_registry import hashed, papercal, write_registry

from recd_plugins import load_registry
from recd_plugins.data.loader import build_dataloader
from recd_plugins.data.preprocess import fitted_state, fitted_steps
from recd_plugins.data.rows import training_rows
from recd_plugins.planning.profile import measure_profile
from recd_plugins.runtime.errors import DataError, RecdError, SetupError
from recd_plugins.testing.gloo import run_on_ranks
from recd_plugins.training.checkpoint_files import (
    FITTED,
    IDENTITY,
    MANIFEST,
    DamagedError,
    manifest_text,
    write_arrays,
)
from recd_plugins.training.identity import (
    check_fitted_alike,
    check_resumable,
    identity_of,
    identity_text,
    load_fitted,
)

PLUGINS = '''
class Known(Preprocessing):
    """Make an id that was not seen 0, and number the others."""

    name = "acme.known"
    scope = "id"

    class Options(PluginOptions):
        rows: int | None = 100
        together: bool = False
        fault: str = ""

    def __init__(self, options):
        super().__init__(options)
        self.fit_rows, self.fits_together = options.rows, options.together
        self.features, self.ids, self.num_rows = [], set(), 0

    def fit(self, feature, rows):
        if self.options.fault == "refuses fit":
            raise DataError("too few rows to fit. Use more data")
        if self.options.fault == "by rank":
            import torch.distributed as dist
            self.ids.add(-dist.get_rank())
        self.features.append(feature)
        for values, offsets in rows:
            self.ids.update(values.tolist())
            self.num_rows += offsets.numel() - 1

    def identity(self):
        return {"ids": sorted(self.ids)}

    def fitted_state(self):
        import torch
        return {"ids": torch.tensor(sorted(self.ids))}

    def load_fitted_state(self, state):
        self.ids = set(state["ids"].tolist())

    def transform(self, values, offsets):
        import torch
        if self.options.fault == "refuses":
            raise DataError("remove option 'fault'")
        ids = torch.tensor(sorted(self.ids))
        return torch.where(torch.isin(values, ids), torch.searchsorted(ids, values), 0), offsets
'''


def known(**options: Any) -> dict[str, Any]:
    return {"use": "acme.known", "features": ["*"], "options": options}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    write_plugins(folder, PLUGINS, "Known")
    registry(folder, known()).dataset.prepare()
    return folder


def registry(folder: Path, *entries: dict[str, Any], workers: int = 0) -> Any:
    path = write_registry(
        folder,
        dataset=papercal(folder, 512, 128, sparse=["seq_0_0", "seq_0_1", "item_0"]),
        preprocessing=entries,
        training={"batch_size": 64, "workers": workers},
    )
    return load_registry(path, plugins_dir=folder / "plugins")


def steps(found: Any) -> dict[str, Any]:
    return {name: chain[-1] for name, chain in fitted_steps(found, found.dataset.schema()).items()}


def test_each_feature_has_a_copy_fitted_to_it_alone_once(folder: Path) -> None:
    found = registry(folder, known(rows=70))
    fitted = steps(found)
    assert {name: step.features for name, step in fitted.items()} == {n: [n] for n in fitted}
    assert {step.num_rows for step in fitted.values()} == {70}
    assert fitted == steps(found.with_training({"batch_size": 32}))


def test_features_that_are_fitted_together_share_one(folder: Path) -> None:
    (shared,) = set(steps(registry(folder, known(together=True))).values())
    assert shared.features == ["seq_0_0", "seq_0_1", "item_0"]
    apart = steps(registry(folder, known())).values()
    assert shared.ids == set().union(*(step.ids for step in apart))


@pytest.mark.parametrize("kept_bytes", [1 << 28, 400_000, 0], ids=["all", "some", "no features"])
def test_passes_are_few(folder: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int) -> None:
    """A pass that fails begins anew."""
    entries = [known(rows=None), known(rows=None, together=True)]
    expected = {name: step.identity() for name, step in steps(registry(folder, *entries)).items()}
    asked: list[Any] = []

    def counted(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 2:
            raise DataError("the disk is gone")
        return training_rows(*given)

    monkeypatch.setattr("recd_plugins.data.preprocess.training_rows", counted)
    monkeypatch.setattr("recd_plugins.data.preprocess._KEPT_BYTES", kept_bytes)
    found = registry(folder, *entries)
    with pytest.raises(DataError, match="the disk is gone"):
        steps(found)
    assert {name: step.identity() for name, step in steps(found).items()} == expected
    assert kept_bytes < 1 << 28 or len(asked) == 3


def test_an_entry_is_fitted_to_what_those_before_it_leave(folder: Path) -> None:
    assert steps(registry(folder, *hashed(5), known()))["seq_0_0"].ids == set(range(5))
    before = steps(registry(folder, known()))["seq_0_0"].ids
    twice = steps(registry(folder, known(), known()))["seq_0_0"].ids
    assert twice == set(range(len(before)))


def rows_of(found: Any) -> list[dict[str, list[list[int]]]]:
    with build_dataloader(found, 0, 1) as loader:
        return [
            {key: [row.tolist() for row in jagged.to_dense()] for key, jagged in each.items()}
            for each in (batch.sparse_features.to_dict() for batch in loader)
        ]


def test_a_checkpoint_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    before = identity_of(registry(folder, known()), [])
    (tmp_path / IDENTITY).write_text(identity_text(before), encoding="utf-8")
    found = registry(folder, known())
    assert check_resumable(tmp_path, identity_of(found, []), ()) == []
    (entry,) = found.preprocessing
    entry.plugin.fitted["item_0"].ids.add(-1)
    now = identity_of(found, [])
    with pytest.raises(RecdError, match=re.escape("preprocessing[0].identity.item_0.ids was [")):
        check_resumable(tmp_path, now, ())
    assert check_resumable(tmp_path, now, ("preprocessing",))


@pytest.mark.parametrize("together", [False, True])
def test_a_checkpoint_stands_for_fitting(
    folder: Path, tmp_path: Path, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = known(together=together)
    before = registry(folder, entry)
    expected = rows_of(before)
    arrays = {name: each.numpy() for name, each in fitted_state(before).items()}
    manifest = manifest_text({FITTED: write_arrays(tmp_path / FITTED, arrays)})
    (tmp_path / MANIFEST).write_text(manifest, encoding="utf-8")
    (tmp_path / IDENTITY).write_text(identity_text(identity_of(before, [])), encoding="utf-8")
    other = registry(folder, known(together=together, rows=50))
    load_fitted(other, tmp_path)
    assert other.preprocessing[0].plugin.fitted is None
    monkeypatch.setattr("recd_plugins.data.preprocess.training_rows", None)
    after = registry(folder, entry)
    load_fitted(after, tmp_path)
    assert rows_of(after) == expected
    assert identity_of(after, []) == identity_of(before, [])
    (tmp_path / FITTED).write_bytes(b"another")
    with pytest.raises(DamagedError, match=FITTED):
        load_fitted(registry(folder, entry), tmp_path)


def check_alike(rank: int, world_size: int, folder: Path) -> None:
    found = load_registry(folder / "registry.yaml", plugins_dir=folder / "plugins")
    check_fitted_alike(found)
    assert all(entry.plugin.fitted for entry in found.preprocessing)


def test_ranks_are_fitted_alike(folder: Path) -> None:
    registry(folder, known())
    run_on_ranks(check_alike, 2, folder)
    registry(folder, known(fault="by rank"))
    with pytest.raises(SetupError, match=r"fit of .*acme\.known to .* on rank 0, .* on rank 1"):
        run_on_ranks(check_alike, 2, folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_step_refuses_names_its_entry(folder: Path, workers: int) -> None:
    found = registry(folder, known(fault="refuses"), workers=workers)
    message = f"{folder}/registry.yaml:6 preprocessing[0]: acme.known: remove option 'fault'"
    with pytest.raises(RecdError, match=f"^{re.escape(message)}$"):
        rows_of(found)
    found = registry(folder, known(fault="refuses fit"))
    with pytest.raises(RecdError, match=r"acme\.known: too few rows"):
        measure_profile(found)
