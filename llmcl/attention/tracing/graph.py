"""The expression graph of a traced mod: what its nodes are, what they compute, and how they read in OpenCL C.

A node is an operation on earlier nodes, so the list of nodes is in an order in which they can be computed, and equal
nodes are stored once. Values are int32, float32 or bool; conversions between them are nodes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcl.errors import UsageError

T = TypeVar("T")
Dtype = Literal["bool", "int32", "float32"]
Array = NDArray[Any]
Value = bool | int | float | str | None  # int and float are not the same here

INPUTS: dict[str, Dtype] = {"score": "float32", "b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1

# Functions of one float: NumPy's and OpenCL's form of each.
ROUNDINGS = ("floor", "ceil", "rint", "trunc")
_SAME_NAMES = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sin", "cos", *ROUNDINGS)
FUNCTIONS: dict[str, tuple[Callable[[Array], Array], str]] = {
    **{name: (getattr(np, name), f"{name}({{}})") for name in _SAME_NAMES},
    "rsqrt": (lambda x: 1 / np.sqrt(x), "rsqrt({})"),
    "erf": (lambda x: np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype), "erf({})"),
}
# The functions that common.cl has for 16 values.
WIDE_FUNCTIONS = frozenset({"exp", "tanh"})
OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "fmod": np.fmod,
    "pow": np.power,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "where": np.where,
    **{name: function for name, (function, _) in FUNCTIONS.items()},
}
MAY_OVERFLOW = frozenset({"add", "sub", "mul", "neg", "abs", "shl", "cast"})


@dataclass(frozen=True)
class Capture:
    """An array that a mod looks values up in: an argument of the kernels compiled from it.

    name is the identifier in the expression; label is what the user calls it. array is C-contiguous, float32 or
    int32 (is_bool: 0 and 1). It is the user's own if that has this form. source: the user's array on a device, if
    kernels can read it; array then has the values that it had in the trace.
    """

    name: str
    label: str
    array: Array
    is_bool: bool
    source: Any = None

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@dataclass(frozen=True)
class Node:
    """value: a constant's value, an input's name, or the number of the capture that a load reads.

    where: file and line of the user's function that made the node. depends: the inputs it is computed from.
    """

    op: str
    args: tuple[int, ...]
    dtype: Dtype
    value: Value
    where: str
    depends: frozenset[str]

    @property
    def per_key(self) -> bool:
        """Whether it differs from key to key."""
        return not self.depends.isdisjoint(("score", "kv_idx"))


class Graph:
    """Nodes, each after its arguments, and the captures that loads read."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.captures: list[Capture] = []
        self.sources: dict[int, int] = {}  # id of a user's array -> number of its capture
        self.kept: list[object] = []  # those arrays: an id stays theirs as long as they live
        self._numbers: dict[tuple[object, ...], int] = {}

    def renamed(self, prefix: str) -> Graph:
        """The same nodes and captures, with names of another prefix. No node may be added to it."""
        graph = Graph(prefix)
        graph.nodes = self.nodes
        graph.captures = [replace(c, name=capture_name(prefix, i)) for i, c in enumerate(self.captures)]
        return graph

    def add(self, op: str, args: tuple[int, ...], dtype: Dtype, where: str, value: Value = None) -> int:
        """The number of the node, new or found; an operation on constants becomes a constant."""
        if args and op != "load" and all(self.nodes[arg].op == "const" for arg in args):
            return self._fold(op, args, dtype, where)
        key = (op, args, dtype, repr(value))
        number = self._numbers.get(key)
        if number is None:
            depends = frozenset({str(value)} if op == "input" else ()).union(*(self.nodes[a].depends for a in args))
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(Node(op, args, dtype, value, where, depends))
        return number

    def constant(self, value: float, dtype: Dtype, where: str) -> int:
        """A bool, int32 or float32; raises UsageError for an integer beyond int32."""
        if dtype == "int32" and not INT_MIN <= value <= INT_MAX:
            raise UsageError(
                f"{where}: the integer {value} does not fit into int32, which kernels compute in; "
                "use a smaller one, or a float"
            )
        if dtype == "float32":
            with np.errstate(over="ignore"):
                value = float(np.float32(value))
        return self.add("const", (), dtype, where, bool(value) if dtype == "bool" else value)

    def _fold(self, op: str, args: tuple[int, ...], dtype: Dtype, where: str) -> int:
        with np.errstate(all="ignore"):
            operands = [np.asarray(self.nodes[arg].value, numpy_dtype(self.nodes[arg].dtype)) for arg in args]
            result = _compute(op, operands, numpy_dtype(dtype))
        return self.constant(result.item(), dtype, where)

    def reachable(self, root: int) -> list[int]:
        """The numbers of the nodes that the root is computed from, in order."""
        seen, stack = {root}, [root]
        while stack:
            new = set(self.nodes[stack.pop()].args) - seen
            seen |= new
            stack += new
        return sorted(seen)

    def walk(self, root: int, compute: Callable[[Node, list[T]], T]) -> T:
        """What compute(node, values of its arguments) gives for the root, with a value kept until its last use."""
        order = self.reachable(root)
        last_use = {arg: number for number in order for arg in self.nodes[number].args}
        values: dict[int, T] = {}
        with np.errstate(all="ignore"):
            for number in order:
                args = self.nodes[number].args
                values[number] = compute(self.nodes[number], [values[arg] for arg in args])
                for arg in args:
                    if last_use[arg] == number:
                        values.pop(arg, None)
        return values[root]

    def evaluate(
        self, root: int, inputs: Mapping[str, Array], float_dtype: type[np.floating[Any]], *, check_overflow: bool
    ) -> Array:
        """The root's values for inputs that broadcast against each other; integers are int64.

        Raises UsageError when an index lies outside its capture, and with check_overflow when an integer leaves int32.
        """

        def compute(node: Node, args: list[Array]) -> Array:
            dtype = numpy_dtype(node.dtype, float_dtype)
            if node.op == "input":
                return np.asarray(inputs[str(node.value)], dtype)
            if node.op == "const":
                return np.asarray(node.value, dtype)
            if node.op == "load":
                return self._load(node, args).astype(dtype, copy=False)
            value = _compute(node.op, args, dtype)
            if check_overflow and node.dtype == "int32" and node.op in MAY_OVERFLOW:
                self._check_overflow(node, value, args)
            return value

        return self.walk(root, compute)

    def capture_of(self, load: Node) -> Capture:
        assert isinstance(load.value, int)
        return self.captures[load.value]

    def _load(self, node: Node, indices: list[Array]) -> Array:
        capture = self.capture_of(node)
        for axis, (index, size) in enumerate(zip(indices, capture.shape, strict=True)):
            if index.size and (index.min() < 0 or index.max() >= size):
                raise UsageError(
                    f"{node.where}: the captured array `{capture.label}` of shape {capture.shape} is indexed with "
                    f"{index.min()} to {index.max()} along axis {axis}, whose indices are 0 to {size - 1}; make the "
                    "array longer, or keep the index inside with minimum and maximum"
                )
        return np.asarray(capture.array[tuple(indices)])

    @staticmethod
    def _check_overflow(node: Node, value: Array, args: list[Array]) -> None:
        if node.op == "shl" and args[1].size and (args[1].min() < 0 or args[1].max() > 31):
            raise UsageError(
                f"{node.where}: a shift by {args[1].min()} to {args[1].max()} bits; kernels compute in int32, "
                "so shift by 0 to 31"
            )
        if value.size and (value.min() < INT_MIN or value.max() > INT_MAX):
            raise UsageError(
                f"{node.where}: an integer reaches {value.min()} to {value.max()}, and kernels compute in int32; "
                "compute it in float, or keep it small with minimum and maximum"
            )


def capture_name(prefix: str, number: int) -> str:
    return f"{prefix}_{number}"


def numpy_dtype(dtype: Dtype, float_dtype: type[np.floating[Any]] = np.float32) -> type[np.generic]:
    return {"bool": np.bool_, "int32": np.int64, "float32": float_dtype}[dtype]


def _compute(op: str, args: list[Array], dtype: type[np.generic]) -> Array:
    result: Array = args[0] if op == "cast" else OPERATIONS[op](*args)
    return np.asarray(result).astype(dtype, copy=False)


C_TYPES: dict[Dtype, str] = {"bool": "int", "int32": "int", "float32": "float"}
C_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
}
# Operations whose text repeats an argument, which therefore must be a name.
NEEDS_NAMES = frozenset({"floordiv", "mod", "min", "max", "abs"})
MAX_NESTING = 64  # Intel's compiler ends the process at some 2000 parentheses within one another


class Emitter:
    """Writes the graph under `root` as OpenCL C for `lanes` keys at a time (1 or an even number up to 16).

    With one lane `score` is a float and the other inputs are ints; the result is a float (score_mod), or an int 0 or 1
    (mask_mod). With more, `score` is a float vector and `kv_idx` an int vector of that many lanes; b, h and q_idx stay
    scalar. The result is then a float vector, or an int vector of 0 and -1, even if it does not depend on `kv_idx`.
    """

    def __init__(self, graph: Graph, root: int, lanes: int):
        self.graph = graph
        self.root = root
        self.lanes = lanes
        self.order = graph.reachable(root)
        self.texts: dict[int, str] = {}
        self.nonnegative = _nonnegative(graph, self.order)

    def body(self) -> str:
        """Declarations, each using only earlier ones, and `return expression;`: a line each."""
        lines: list[str] = []
        named = self._named()
        for number in self.order:
            node = self.graph.nodes[number]
            text = self._text(node)
            if number in named:
                name = f"{self.graph.prefix}_t{len(lines)}"
                lanes = str(self.lanes) if self._is_vector(node) else ""
                lines.append(f"const {C_TYPES[node.dtype]}{lanes} {name} = {text};")
                text = name
            self.texts[number] = text
        return "\n".join((*lines, f"return {self._wide(self.root)};"))

    def _is_vector(self, node: Node) -> bool:
        return self.lanes > 1 and node.per_key

    def _named(self) -> set[int]:
        """Nodes with a declaration: used twice, needed by name, computed once a row for a use at every key, or the
        MAX_NESTING-th of operations within one another.
        """
        named: set[int] = set()
        seen: set[int] = set()
        nesting: dict[int, int] = {}
        for number in self.order:
            node = self.graph.nodes[number]
            by_name = node.op in NEEDS_NAMES or (
                self._is_vector(node) and (node.op in ("cast", "load", "pow", "fmod") or node.op in FUNCTIONS)
            )
            for arg in node.args:
                hoisted = node.per_key and not self.graph.nodes[arg].per_key
                if arg in seen or by_name or hoisted:
                    named.add(arg)
                seen.add(arg)
            nesting[number] = 1 + max((nesting[arg] for arg in node.args if arg not in named), default=0)
            if nesting[number] == MAX_NESTING:
                named.add(number)
        return {number for number in named if self.graph.nodes[number].op not in ("const", "input")}

    def _wide(self, number: int) -> str:
        """The text of a node with all lanes: a scalar is spread over them."""
        node, text = self.graph.nodes[number], self.texts[number]
        if self.lanes == 1 or node.per_key:
            return text
        # A comparison of vectors gives -1 for true, one of scalars 1.
        return f"({C_TYPES[node.dtype]}{self.lanes})({f'-({text})' if node.dtype == 'bool' else text})"

    def _halves(self, form: str, result: str, *args: int) -> str:
        """`form` on both halves of its arguments: no vector of 16 may cross a call into the driver's library."""
        half = self.lanes // 2

        def part(arg: int, which: str) -> str:
            node = self.graph.nodes[arg]
            return f"{self.texts[arg]}.{which}" if node.per_key else f"({C_TYPES[node.dtype]}{half})({self.texts[arg]})"

        parts = ", ".join(form.format(*(part(arg, which) for arg in args)) for which in ("lo", "hi"))
        return f"({result}{self.lanes})({parts})"

    def _text(self, node: Node) -> str:
        vector = self._is_vector(node)
        args = [self.texts[arg] for arg in node.args]
        wide = [self._wide(arg) for arg in node.args] if vector else args
        if node.op == "input":
            return str(node.value)
        if node.op == "const":
            return _literal(node.value, node.dtype)
        if node.op == "load":
            return self._load_text(node, vector)
        if node.op == "cast":
            return self._cast_text(node, vector)
        if node.op in ("shl", "shr") or (node.op in ("and", "or", "xor") and node.dtype == "bool"):
            args = wide
        if node.op in C_OPERATORS:
            return f"({args[0]} {C_OPERATORS[node.op]} {args[1]})"
        if node.op == "neg":
            return f"(-{args[0]})"
        if node.op == "not":
            return f"(!{args[0]})" if node.dtype == "bool" and not vector else f"(~{args[0]})"
        if node.op == "where":
            return f"({args[0]} ? {wide[1]} : {wide[2]})"
        if node.op in ("min", "max"):
            return f"({wide[0]} {'<' if node.op == 'min' else '>'} {wide[1]} ? {wide[0]} : {wide[1]})"
        if node.op == "abs":
            zero = "0" if node.dtype == "int32" else "0.0f"
            return f"({args[0]} < {zero} ? -{args[0]} : {args[0]})"
        if node.op in ("floordiv", "mod"):
            return self._division_text(node, wide)
        if vector and self.lanes == 16 and node.op in WIDE_FUNCTIONS:
            return f"{node.op}16({args[0]})"
        if node.op == "tanh" and not vector:
            return f"TANH({args[0]})"  # a macro, since a kernel may have its own tanh
        form = FUNCTIONS[node.op][1] if node.op in FUNCTIONS else f"{node.op}({{}}, {{}})"
        return self._halves(form, "float", *node.args) if vector else f"({form.format(*args)})"

    def _cast_text(self, node: Node, vector: bool) -> str:
        (arg,) = node.args
        text, source = self.texts[arg], self.graph.nodes[arg].dtype
        if node.dtype == "bool":
            return f"({text} != 0)"
        if source == "bool":
            return f"({text} & 1)" if vector else text
        kind = C_TYPES[node.dtype]
        if vector:
            return self._halves(f"convert_{kind}{self.lanes // 2}({{}})", kind, arg)
        return f"FLOAT_OF({text})" if kind == "float" else f"({kind})({text})"  # a macro: a kernel may have its own

    def _load_text(self, node: Node, vector: bool) -> str:
        capture = self.graph.capture_of(node)
        strides = _row_major_strides(capture.array)

        def at(lane: str) -> str:
            terms = []
            for arg, stride in zip(node.args, strides, strict=True):
                text = self.texts[arg] + (lane if self.graph.nodes[arg].per_key else "")
                terms.append(text if stride == 1 else f"{text} * {stride}")
            return f"{capture.name}[{' + '.join(terms)}]"

        if not vector:
            return at("")
        return f"({C_TYPES[node.dtype]}{self.lanes})({', '.join(at(f'.s{lane:x}') for lane in range(self.lanes))})"

    def _division_text(self, node: Node, args: list[str]) -> str:
        """Integer // and %, towards minus infinity; the divisor is not 0 (`trace` sees to it)."""
        a, b = args
        divisor = self.graph.nodes[node.args[1]].value if self.graph.nodes[node.args[1]].op == "const" else None
        if isinstance(divisor, int) and divisor > 0 and divisor & (divisor - 1) == 0:
            # OpenCL's >> keeps the sign, so this holds for negative values too.
            shift, mask = divisor.bit_length() - 1, divisor - 1
            return f"({a} >> {shift})" if node.op == "floordiv" else f"({a} & {mask})"
        operator = "/" if node.op == "floordiv" else "%"
        if self.nonnegative[node.args[0]] and self.nonnegative[node.args[1]]:
            return f"({a} {operator} {b})"
        if isinstance(divisor, int):
            differs = f"{a} % {b} {'<' if divisor > 0 else '>'} 0"
        else:
            differs = f"({a} % {b} != 0) & (({a} ^ {b}) < 0)"
        correction = "- 1" if node.op == "floordiv" else f"+ {b}"
        return f"({differs} ? {a} {operator} {b} {correction} : {a} {operator} {b})"


def _nonnegative(graph: Graph, order: list[int]) -> dict[int, bool]:
    """Which int32 nodes are plainly never negative. Positions and heads never are."""
    known: dict[int, bool] = {}
    for number in order:
        node = graph.nodes[number]
        args = [known[arg] for arg in node.args]
        if node.op == "const":
            known[number] = node.value is not None and not isinstance(node.value, str) and node.value >= 0
        elif node.op == "input":
            known[number] = node.dtype == "int32"
        elif node.op in ("add", "mul", "floordiv", "min", "shr"):
            known[number] = all(args)
        elif node.op in ("max", "and", "mod"):
            known[number] = args[1] if node.op == "mod" else any(args)
        elif node.op == "where":
            known[number] = args[1] and args[2]
        else:
            known[number] = node.dtype == "bool" or node.op == "abs" or (node.op == "cast" and args[0])
    return known


def _row_major_strides(array: Array) -> list[int]:
    """Strides in elements. NumPy's own may differ for axes of length 1."""
    return [int(np.prod(array.shape[axis + 1 :], dtype=np.int64)) for axis in range(array.ndim)]


def _literal(value: Value, dtype: Dtype) -> str:
    assert isinstance(value, (bool, int, float))
    if dtype != "float32":
        number = int(value)
        if number == INT_MIN:
            return f"({INT_MIN + 1} - 1)"
        return f"({number})" if number < 0 else str(number)
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = f"{value:.9g}"
    text = text if "." in text or "e" in text else text + ".0"
    return f"({text}f)" if text.startswith("-") else f"{text}f"
