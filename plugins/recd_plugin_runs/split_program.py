"""Splits an exported program into a part that runs once per request and a part per candidate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves


def split_program(
    program: ExportedProgram, inputs: Sequence[tuple[Any, ...]], sizes: Sequence[tuple[Any, ...]]
) -> tuple[ExportedProgram, ExportedProgram]:
    """Split a program into the operations that need only user inputs, and all others.

    Args:
        program: takes the arguments ``user`` and ``candidates``, and returns a tensor.
        inputs: example arguments, each a tuple of tensors and of dicts of tensors.
        sizes: the dynamic shapes of the arguments, as in ``torch.export.export``.

    Returns:
        The first program takes the elements of ``user``, and returns a dict of tensors. The second
        takes this dict and the elements of ``candidates``, and returns the result of ``program``.
    """
    user, candidates = inputs
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch's own code
        # Without in-place operations, all dependencies are edges of the graph.
        whole = program.run_decompositions({}).module(check_guards=False)
    nodes = list(whole.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    of_user = set(placeholders[: len(tree_leaves(user))])
    of_rows = set(placeholders) - of_user
    for node in nodes:
        used = set(node.all_input_nodes)
        if node.op == "output" or used & of_rows:
            of_rows.add(node)
        elif used & of_user:
            of_user.add(node)
    sent: dict[Node, None] = {}  # ordered
    for node in nodes:
        if node in of_rows:
            _find_sent(node, of_user, of_rows, sent)
    first, second = _Part(), _Part()
    for node in nodes:
        if node in of_user:
            first.copy(node)
    first.graph.output({node.name: first.copies[node] for node in sent})
    for node in sent:
        second.copies[node] = copy = second.graph.placeholder(node.name)
        copy.meta = node.meta
    for node in nodes:
        if node in of_rows:
            second.copy(node)
    of_request = _Flat(first.module(whole))
    with torch.no_grad():
        results = of_request(*user)
        exported_user = _export(of_request, user, sizes[0])
        sent_sizes = {node.name: _dynamic(node.meta["val"]) for node in sent}
        exported_rows = _export(
            _Flat(second.module(whole)), (results, *candidates), (sent_sizes, *sizes[1])
        )
    return exported_user, exported_rows


class _Part:
    """The graph of one part."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}

    def copy(self, node: Node) -> None:
        """Copy a node, after its inputs. Both parts copy constants, sizes and weights they use."""
        if node not in self.copies:
            for each in node.all_input_nodes:
                self.copy(each)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def module(self, whole: nn.Module) -> GraphModule:
        self.graph.set_codegen(CodeGen())
        return GraphModule(whole, self.graph)


def _find_sent(node: Node, of_user: set[Node], of_rows: set[Node], sent: dict[Node, None]) -> None:
    """Add the tensors of the user part that ``node`` of the other part needs to ``sent``."""
    for each in node.all_input_nodes:
        if each in of_user and isinstance(each.meta["val"], Tensor):
            sent[each] = None
        elif each not in of_rows:  # a size or a constant, which the other part computes again
            _find_sent(each, of_user, of_rows, sent)


class _Flat(nn.Module):
    """Calls a graph, whose inputs are tensors, with nested inputs."""

    def __init__(self, part: GraphModule) -> None:
        super().__init__()
        self.part = part
        # The dimensions of the inputs that have the same size, by this size.
        self.equal: dict[str, list[tuple[int, int]]] = {}
        for number, node in enumerate(part.graph.find_nodes(op="placeholder")):
            for dim in _dynamic(node.meta["val"]):
                size = str(node.meta["val"].shape[dim])
                self.equal.setdefault(size, []).append((number, dim))

    def forward(self, *inputs: Any) -> Any:
        tensors = tree_leaves(inputs)
        for (first, dim), *others in self.equal.values():
            for number, other in others:
                equal = tensors[number].shape[other] == tensors[first].shape[dim]
                torch._check(equal)  # type: ignore[no-untyped-call]
        found = self.part(*tensors)
        return found[0] if isinstance(found, tuple) else found


def _export(module: nn.Module, inputs: tuple[Any, ...], dynamic: Any) -> ExportedProgram:
    return torch.export.export(module, inputs, dynamic_shapes=(dynamic,), strict=False)


def _dynamic(value: Tensor) -> dict[int, Any]:
    return {n: Dim.DYNAMIC for n, size in enumerate(value.shape) if not isinstance(size, int)}
