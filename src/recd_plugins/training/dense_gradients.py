"""Sums the gradients of dense layers over the ranks, in the same order in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recd_plugins.model import stored_gradients


def summed_in_fixed_buckets(*, always_trained: bool) -> DefaultDataParallelWrapper:
    """Return a DDP wrapper for dense layers that sums gradients in the same order in every step.

    DistributedDataParallel rebuilds its buckets after the first step. The position of a gradient in
    its bucket determines the order in which three or more ranks sum it. A resumed run would
    therefore differ by rounding. ``always_trained``: each parameter gets a gradient in every step.
    """
    return _DenseGradients(
        static_graph=False,
        find_unused_parameters=not always_trained,  # if set, buckets are not rebuilt
        ddp_kwargs={} if always_trained else {"skip_all_reduce_unused_params": True},
    )


class _DenseGradients(DefaultDataParallelWrapper):
    """Wraps the model in DDP if that is the fastest way to sum the gradients of dense layers.

    A single rank needs no sum. On CUDA, DDP launches two kernels per parameter, so
    ``_OneAllReduce`` replaces it if every parameter gets a gradient in each step. On the CPU, one
    backward pass with zero gradients makes DDP rebuild its buckets before training starts.
    """

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        group, module = env.process_group, dmp._dmp_wrapped_module.to(device)
        always_trained = not self._find_unused_parameters
        sharded = set(DistributedModelParallel._sharded_parameter_names(module))
        named = module.named_parameters()
        dense = [p for name, p in named if p.requires_grad and name not in sharded]
        if group is not None and group.size() == 1:
            stored_gradients.allow(dense)
            return
        one_dtype = len({parameter.dtype for parameter in dense}) == 1
        if group is not None and always_trained and one_dtype and device.type == "cuda":
            _OneAllReduce(dense, group)
            stored_gradients.allow(dense)
            return
        super().wrap(dmp, env, device)
        for child in dmp.children() if always_trained else ():
            if isinstance(child, DistributedDataParallel):
                _train_on_nothing(child)


class _OneAllReduce:
    """Averages the gradients of all parameters in one all-reduce.

    The all-reduce starts when the last gradient is ready, and the end of the backward pass waits
    for it. Gradients are views of one buffer, which the next step overwrites.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self._ready, self._task = 0, -1
        self._flat = torch.cat([each.detach().flatten() for each in parameters])
        pieces = torch.split(self._flat, [each.numel() for each in parameters])
        self._views = [p.view(each.shape) for p, each in zip(pieces, parameters, strict=True)]
        for each in parameters:
            each.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:  # the first gradient of a backward pass
            self._task, self._ready = task, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self._ready += 1
        if self._ready == len(self._parameters):
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            torch._foreach_copy_(self._views, gradients)
            self._flat.mul_(1 / self._group.size())  # as DistributedDataParallel does
            self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def _finish(self) -> None:
        if self._ready != len(self._parameters):
            raise RuntimeError(
                f"only {self._ready} of {len(self._parameters)} dense parameters got a gradient. "
                "Set always_trained = False in the class of the pooling plugin."
            )
        self._work.wait()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view


def _train_on_nothing(wrapped: DistributedDataParallel) -> None:
    ignored = wrapped.parameters_to_ignore
    named = wrapped.module.named_parameters()
    parameters = [p for name, p in named if p.requires_grad and name not in ignored]
    model, wrapped.module = wrapped.module, _Nothing(parameters)
    try:
        # Pass an argument: on a GPU, DistributedDataParallel fails without any.
        wrapped(0.0).backward()
    finally:
        wrapped.module = model
    for parameter in parameters:
        parameter.grad = None


class _Nothing(nn.Module):
    """Module whose loss is zero and has zero gradients, last parameter first."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._used = [*parameters]  # a list: they are the model's

    def forward(self, nothing: float) -> Tensor:
        return torch.stack([parameter.sum() * nothing for parameter in self._used]).sum()
