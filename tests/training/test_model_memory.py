"""A model larger than the machine is refused before its memory is asked for."""

from __future__ import annotations

import pytest

from recd_plugins import load_registry
from recd_plugins.errors import SetupError
from recd_plugins.training.model_memory import check_model_fits

REGISTRY = """\
version: 1
dataset: {use: dlrm.random, options: {rows: 64, sparse: 2, num_ids: 50}}
converter: {use: recd.kjt}
training: {batch_size: 16, device: cpu}
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{num_embeddings: 1000000000000}", "take 128,000.0 GB, of which bags.embedding_bags.t_"),
        ("{num_embeddings: 9, top_mlp: [1048576, 1048576]}", "of which top.over_arch."),
    ],
)
def test_it_is_named(tmp_path, model, said):
    path = tmp_path / "r.yaml"
    path.write_text(f"{REGISTRY}model: {model}\n")
    registry = load_registry(path)
    with pytest.raises(SetupError) as caught:
        check_model_fits(registry, registry.dataset.schema())
    assert f"{path}: the model's parameters take" in str(caught.value)
    assert said in str(caught.value)
    assert "take fewer rows or smaller layers" in str(caught.value)
