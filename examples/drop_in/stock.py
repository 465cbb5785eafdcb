"""Trains a DLRM with stock TorchRec on the Parquet files in folder `table`.

README.md shows the command.
"""

from __future__ import annotations

import gc
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import SGD
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from reader import build_loader

SEQUENCES = [f"seq_{group}_{i}" for group in range(3) for i in range(3)]
SPARSE = [*SEQUENCES, *(f"usr_{i}" for i in range(23)), *(f"item_{i}" for i in range(8))]
DENSE = [f"dense_{i}" for i in range(13)]
NUM_EMBEDDINGS = 10_000
EMBEDDING_DIM = 16
BATCH_SIZE = 256
LEARNING_RATE = 0.1


def build_model() -> nn.Module:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=EMBEDDING_DIM,
            num_embeddings=NUM_EMBEDDINGS,
            feature_names=[feature],
            pooling=PoolingType.MEAN,
        )
        for feature in SPARSE
    ]
    dlrm = DLRM(
        EmbeddingBagCollection(tables=tables),
        dense_in_features=len(DENSE),
        dense_arch_layer_sizes=[64, EMBEDDING_DIM],
        over_arch_layer_sizes=[64, 1],
    )
    apply_optimizer_in_backward(SGD, dlrm.sparse_arch.parameters(), {"lr": LEARNING_RATE})
    return DLRMTrain(dlrm)


def load_weights(dmp: DistributedModelParallel, whole: dict[str, Tensor]) -> None:
    """Copy the unsharded weights ``whole`` into the sharded model."""
    for name, target in dmp.state_dict().items():
        if isinstance(target, ShardedTensor):
            for shard in target.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.tensor.shape
                shard.tensor.detach().copy_(
                    whole[name][row : row + rows, column : column + columns]
                )
        else:
            target.detach().copy_(whole[name])


def train(rank: int, world_size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = build_model()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dmp = DistributedModelParallel(
        model,
        device=device,
        sharders=[EmbeddingBagCollectionSharder()],
    )
    load_weights(dmp, weights)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: SGD(parameters, lr=LEARNING_RATE),
    )
    pipeline = TrainPipelineSparseDist(dmp, optimizer, device)
    loader = build_loader("table", SPARSE, DENSE, NUM_EMBEDDINGS, BATCH_SIZE, device)

    batches, losses, start = iter(loader), [], time.perf_counter()
    while True:
        try:
            loss, _logits, _labels = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(loss)
    seconds = time.perf_counter() - start

    mean = torch.stack(losses)
    dist.all_reduce(mean)
    if rank == 0:
        for step, value in enumerate((mean / world_size).tolist()):
            print(f"step {step} loss {value:.8f}")
        rows = len(losses) * BATCH_SIZE * world_size
        print(f"{rows} rows in {seconds:.1f} s: {rows / seconds:.0f} rows/s")


def main() -> None:
    if "RANK" not in os.environ:  # not under torchrun
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size(), device)
    gc.collect()  # free the model's modules before the process group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
