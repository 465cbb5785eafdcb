"""CUDA graphs of dense layers: one launch replays all kernels of their forward or backward pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recd_plugins.model import stored_gradients

logger = logging.getLogger(__name__)

Layers = Callable[..., tuple[Tensor, Tensor]]
_MOST_CAPTURES = 3
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GraphedLoss:
    """Replays the layers of a module as CUDA graphs while the shapes of their inputs repeat.

    The second batch in a row with equal shapes captures the graphs. Other batches, CPU tensors,
    autocast and modules with hooks run without graphs.
    """

    def __init__(self) -> None:
        self._graphs: _Graphs | None = None
        self._seen: object = None
        self._captures = 0

    def __reduce__(self) -> tuple[type[GraphedLoss], tuple[()]]:
        return GraphedLoss, ()  # copies of a model capture their own graphs

    def __call__(self, module: nn.Module, layers: Layers, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``layers(*inputs)``: the scalar loss and the logits, without gradient.

        Args:
            module: has all parameters of ``layers``.
            layers: function that launches the same kernels in each call and does not wait for them.
            inputs: tensors that may change in each step. Parameters may change only in place.
        """
        if not (inputs[0].is_cuda and torch.is_grad_enabled()) or torch.is_autocast_enabled("cuda"):
            return layers(*inputs)
        parts = list(module.modules())
        parameters = [p for each in parts for p in each._parameters.values() if p is not None]
        shapes = [(each.shape, each.dtype, each.requires_grad) for each in inputs]
        seen = shapes, [(each.data_ptr(), each.requires_grad) for each in parameters]
        repeats, self._seen = seen == self._seen, seen
        if any(getattr(each, name) for each in parts for name in _HOOKS):
            return layers(*inputs)
        if self._graphs is None or self._graphs.seen != seen:
            if not repeats or self._captures == _MOST_CAPTURES:
                return layers(*inputs)
            self._captures += 1
            try:
                self._graphs = _Graphs(layers, parameters, inputs, seen)
                why = "" if self._graphs.equal_eager else "their results differ"
            except RuntimeError as error:  # the layers wait for the GPU, for example
                why = f"the capture failed: {error}"
            if why:
                self._graphs, self._captures = None, _MOST_CAPTURES
                logger.warning("the dense layers run without CUDA graphs, because %s", why)
                return layers(*inputs)
        edges = () if stored_gradients.allowed(parameters, inputs) else parameters
        replayed: tuple[Tensor, Tensor] = _Replay.apply(self._graphs, *inputs, *edges)  # type: ignore[no-untyped-call]
        return replayed


class _Graphs:
    """The captured graphs, with the tensors that they read and write."""

    def __init__(
        self, layers: Layers, parameters: Sequence[Tensor], inputs: Sequence[Tensor], seen: object
    ) -> None:
        self.seen, self.parameters, self.step = seen, parameters, 0
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        surface = [*self.inputs, *parameters]
        at = [n for n, each in enumerate(surface) if each.requires_grad]
        trained = [surface[n] for n in at]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # the first launches on a stream must not be captured
            loss, logits = layers(*self.inputs)
            eager = logits.flatten(), *torch.autograd.grad(loss, trained, allow_unused=True)
            self.gradient = torch.ones_like(loss)
        current.wait_stream(stream)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads, such as readers that pin memory, may continue during the capture.
        mode: Any = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward, **mode):
            loss, logits = layers(*self.inputs)
            self.outputs = torch.cat([loss.detach().view(1), logits.flatten()])
            self.shape = logits.shape
        with torch.cuda.graph(self.backward, pool=self.forward.pool(), **mode):
            found = torch.autograd.grad(loss, trained, self.gradient, allow_unused=True)
        self.gradients: list[Any] = [None] * len(surface)
        for n, each in zip(at, found, strict=True):
            self.gradients[n] = each
        self.forward.replay()
        self.backward.replay()
        pairs = zip(eager, (self.outputs[1:], *(self.gradients[n] for n in at)), strict=True)
        self.equal_eager = all(a is b or torch.allclose(a, b, 1e-3, 1e-5) for a, b in pairs)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *surface: Tensor) -> tuple[Tensor, Tensor]:
        torch._foreach_copy_(graphs.inputs, surface[: len(graphs.inputs)])
        graphs.forward.replay()
        graphs.step += 1
        ctx.graphs, ctx.step = graphs, graphs.step
        ctx.set_materialize_grads(False)
        outputs = graphs.outputs.clone()  # the next replay overwrites them
        loss, logits = outputs[0], outputs[1:].view(graphs.shape)
        ctx.mark_non_differentiable(logits)
        return loss, logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        graphs: _Graphs = ctx.graphs
        if ctx.step != graphs.step:
            raise RuntimeError(
                "the model ran another forward pass before this backward pass. Call backward after "
                "each forward pass, or set training.cuda_graphs: false."
            )
        at = len(graphs.inputs)
        for parameter, found in zip(graphs.parameters, graphs.gradients[at:], strict=True):
            kept = parameter.grad
            if kept is not None and found is not None and kept.data_ptr() == found.data_ptr():
                parameter.grad = kept.clone()  # gradients accumulate; the replay overwrites these
        graphs.gradient.copy_(gradient)
        graphs.backward.replay()
        gradients = graphs.gradients
        if len(ctx.needs_input_grad) == 1 + at:
            stored_gradients.store(graphs.parameters, gradients[at:])
            gradients = gradients[:at]
        return None, *(None if each is None else each.detach() for each in gradients)
