"""docs/plugins/sharding.md: its module and sharder train as TorchRec's do, and count ids."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import page

from recd_plugins.training.session import session

REGISTRY = """
version: 1
dataset: {use: dlrm.random, options: {rows: 256, sparse: {user: 90, item: 90}}}
converter: {use: recd.kjt}
sharding:
  - {use: SHARDING, tables: [t_user]}
  - {use: torchrec.row_wise, tables: [t_item]}
cache: [{use: scars.cache, tables: [t_item], options: {share: 0.2, policy: lru}}]
model: {embedding_dim: 4, num_embeddings: 100, bottom_mlp: [4], top_mlp: [4]}
training: {batch_size: 16, ranks: 2, device: cpu, evaluate: false}
"""


def test_rewritten_bags_train_as_before(tmp_path: Path) -> None:
    for path, code in re.findall(
        r"`plugins/(acme_seen/\w+\.py)` .*?```python\n(.*?)```", page("plugins/sharding.md"), re.S
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(code)
    losses = []
    for sharding in ("acme.seen", "torchrec.planner"):
        registry = tmp_path / "registry.yaml"
        registry.write_text(REGISTRY.replace("SHARDING", sharding))
        with session(registry, plugins_dir=tmp_path, overrides={}) as trainer:
            losses.append(trainer.train("plugins").losses)
    assert losses[0] == losses[1]
