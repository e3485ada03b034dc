"""Splits a score_mod into parts a kernel can compute once a row or skip: constant factors, a slope along the keys, and
a soft cap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmcl.attention.tracing.graph import Emitter, Graph, Node
from llmcl.attention.tracing.trace import TracedMod

WHERE = "a score_mod"
MOST_CAP = 1000.0


@dataclass(frozen=True)
class ScoreForm:
    """score_mod(score, ...) = factor * f(unit * score, ...).

    slope: set if f is score plus a linear term in the key.
    """

    graph: Graph
    root: int  # the node f
    unit: float  # constant above 0
    factor: float  # constant above 0
    slope: int | None  # node (of b, h, q_idx) for the increase per key, or None

    @property
    def is_soft_cap(self) -> bool:
        """Whether f is only tanh, with a cap small enough for float16."""
        node = self.graph.nodes[self.root]
        return self.factor <= MOST_CAP and node.op == "tanh" and _is_score(self.graph.nodes[node.args[0]])

    def body(self) -> str:
        """Returns f in OpenCL C: the statements of a function, `return` last."""
        return Emitter(self.graph, self.root, 1).body()

    def slope_body(self) -> str:
        """Returns the slope in OpenCL C, or an empty string without a slope."""
        return "" if self.slope is None else Emitter(self.graph, self.slope, 1).body()


def score_form(mod: TracedMod) -> ScoreForm:
    graph = Graph(mod.graph.prefix)
    graph.captures = mod.graph.captures
    factor, root = _outer_factor(mod.graph, mod.root)
    unit = _common_unit(mod.graph, root)
    root = _copy_in_units(mod.graph, root, graph, unit)
    linear = _along_keys(graph, root)
    slope = None if linear is None or linear.scores != 1 else _as_float(graph, linear.slope)
    return ScoreForm(graph, root, unit, factor, slope)


def _constant_factor(graph: Graph, number: int) -> tuple[float, int] | None:
    """Returns (c, x) if the node is x * c or x / c with a finite constant above 0."""
    node = graph.nodes[number]
    if node.op not in ("mul", "div") or node.dtype != "float32":
        return None
    pairs = [(node.args[1], node.args[0])]
    if node.op == "mul":
        pairs.append((node.args[0], node.args[1]))
    for constant, other in pairs:
        value = graph.nodes[constant].value
        if graph.nodes[constant].op == "const" and isinstance(value, float) and 0.0 < value < math.inf:
            return (1.0 / value if node.op == "div" else value), other
    return None


def _outer_factor(graph: Graph, root: int) -> tuple[float, int]:
    factor = _constant_factor(graph, root)
    if factor is None or "score" not in graph.nodes[factor[1]].depends or graph.nodes[factor[1]].op == "input":
        return 1.0, root
    return factor


def _common_unit(graph: Graph, root: int) -> float:
    """Returns the constant factor the score has at every use, or 1 if the factors differ."""
    units = set()
    for number in graph.reachable(root):
        if any(_is_score(graph.nodes[arg]) for arg in graph.nodes[number].args):
            factor = _constant_factor(graph, number)
            units.add(factor[0] if factor is not None and _is_score(graph.nodes[factor[1]]) else 1.0)
    return units.pop() if len(units) == 1 and not _is_score(graph.nodes[root]) else 1.0


def _is_score(node: Node) -> bool:
    return node.op == "input" and node.value == "score"


def _copy_in_units(graph: Graph, root: int, to: Graph, unit: float) -> int:
    """Copies the node into `to`, where the input score is already multiplied by `unit`."""
    places: dict[int, int] = {}
    for number in graph.reachable(root):
        node = graph.nodes[number]
        factor = _constant_factor(graph, number) if unit != 1.0 else None
        if factor is not None and _is_score(graph.nodes[factor[1]]):
            places[number] = places[factor[1]]
        else:
            args = tuple(places[arg] for arg in node.args)
            places[number] = to.add(node.op, args, node.dtype, node.where, node.value)
    return places[root]


@dataclass(frozen=True)
class _Linear:
    """A value that is linear along the keys."""

    scores: int  # coefficient of the score: 0 or 1
    slope: int  # node for the increase per key; constant along the keys


def _along_keys(graph: Graph, root: int) -> _Linear | None:
    """Returns how a node depends on score and key, or None if the dependence isn't linear."""
    known: dict[int, _Linear | None] = {}
    for number in graph.reachable(root):
        known[number] = _of_node(graph, number, known)
    return known[root]


def _of_node(graph: Graph, number: int, known: dict[int, _Linear | None]) -> _Linear | None:
    node = graph.nodes[number]
    zero = graph.constant(0, "int32", WHERE)
    if _is_score(node):
        return _Linear(1, zero)
    if node.op == "input" and node.value == "kv_idx":
        return _Linear(0, graph.constant(1, "int32", WHERE))
    if not node.per_key:
        return _Linear(0, zero)
    args = [known[arg] for arg in node.args]
    if node.op == "cast" and node.dtype == "float32" and args[0] is not None and args[0].scores == 0:
        return args[0]
    if node.op in ("add", "sub") and args[0] is not None and args[1] is not None:
        scores = args[0].scores + (1 if node.op == "add" else -1) * args[1].scores
        if scores not in (0, 1):
            return None
        return _Linear(scores, _arithmetic(graph, node.op, args[0].slope, args[1].slope))
    if node.op == "mul":
        for i in (0, 1):
            linear, other = args[i], node.args[1 - i]
            if linear is not None and linear.scores == 0 and not graph.nodes[other].per_key:
                return _Linear(0, _arithmetic(graph, "mul", linear.slope, other))
    if node.op == "neg" and args[0] is not None and args[0].scores == 0:
        return _Linear(0, _arithmetic(graph, "sub", zero, args[0].slope))
    return None


def _as_float(graph: Graph, number: int) -> int:
    return number if graph.nodes[number].dtype == "float32" else graph.add("cast", (number,), "float32", WHERE)


def _arithmetic(graph: Graph, op: str, a: int, b: int) -> int:
    return graph.add(op, (_as_float(graph, a), _as_float(graph, b)), "float32", WHERE)
