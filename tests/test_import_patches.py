"""``import recd_plugins`` changes nothing of torch, torchrec and FBGEMM."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib, sys
import torch, torchrec, fbgemm_gpu
import torchrec.distributed.embedding, torchrec.distributed.embeddingbag
import torchrec.distributed.train_pipeline, torchrec.distributed.planner
import torch.distributed, torch.nn.parallel
import fbgemm_gpu.split_table_batched_embeddings_ops_training

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "torchrec", "fbgemm_gpu") or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for of_class, each in list(vars(value).items()):
                    found[name, key, of_class] = each
    return found

before = attributes()
import recd_plugins
for name in recd_plugins.__all__:
    getattr(recd_plugins, name)
after = attributes()
caches = {"__abstractmethods__", "_abc_impl", "__warningregistry__", "__annotations__"}
changed = [
    place
    for place, value in before.items()
    if place[-1] not in caches and after.get(place, value) is not value
]
print(changed)
"""


def test_importing_patches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
