"""The expression graph of a traced mod: nodes, evaluation in NumPy, and code generation for OpenCL C.

Each node operates on earlier nodes, so list order is evaluation order. Equal nodes are stored once. Values are int32,
float32 or bool; every conversion is a separate node.
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
Value = bool | int | float | str | None  # int and float are distinct here

INPUTS: dict[str, Dtype] = {"score": "float32", "b": "int32", "h": "int32", "q_idx": "int32", "kv_idx": "int32"}
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1

# Functions with a single float argument: NumPy function and OpenCL text.
ROUNDINGS = ("floor", "ceil", "rint", "trunc")
_SAME_NAMES = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sin", "cos", *ROUNDINGS)
FUNCTIONS: dict[str, tuple[Callable[[Array], Array], str]] = {
    **{name: (getattr(np, name), f"{name}({{}})") for name in _SAME_NAMES},
    "rsqrt": (lambda x: 1 / np.sqrt(x), "rsqrt({})"),
    "erf": (lambda x: np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype), "erf({})"),
}
# The functions that common.cl defines for 16 lanes.
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
    """An array that a mod indexes. It becomes an argument in the compiled kernels."""

    name: str  # identifier in the generated code
    label: str  # the user's name for the array
    array: Array  # C-contiguous float32 or int32: the user's array if it has this form, else a copy
    is_bool: bool  # stored as 0 and 1
    source: Any = None  # the user's device array if kernels can read it; `array` then holds its traced values

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@dataclass(frozen=True)
class Node:
    """An operation on earlier nodes."""

    op: str
    args: tuple[int, ...]
    dtype: Dtype
    value: Value  # a constant's value, an input's name, or a load's capture number
    where: str  # file and line in the user's function
    depends: frozenset[str]  # names of the inputs that reach this node

    @property
    def per_key(self) -> bool:
        """Whether the value varies along the keys."""
        return not self.depends.isdisjoint(("score", "kv_idx"))


class Graph:
    """Nodes in evaluation order, and the captures that loads read."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.captures: list[Capture] = []
        self.sources: dict[int, int] = {}  # id(user's array) -> capture number
        self.kept: list[object] = []  # the arrays in `sources`, kept alive so that no id is reused
        self._numbers: dict[tuple[object, ...], int] = {}

    def renamed(self, prefix: str) -> Graph:
        """Returns a graph with the same nodes and captures under another name prefix. The copy must not grow."""
        graph = Graph(prefix)
        graph.nodes = self.nodes
        graph.captures = [replace(c, name=capture_name(prefix, i)) for i, c in enumerate(self.captures)]
        return graph

    def add(self, op: str, args: tuple[int, ...], dtype: Dtype, where: str, value: Value = None) -> int:
        """Returns the number of a new or equal existing node. Folds an operation on constants."""
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
        """Adds a bool, int32 or float32 constant. Raises UsageError for an integer outside int32."""
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
        """Returns, in order, the numbers of all nodes that `root` depends on, `root` included."""
        seen, stack = {root}, [root]
        while stack:
            new = set(self.nodes[stack.pop()].args) - seen
            seen |= new
            stack += new
        return sorted(seen)

    def walk(self, root: int, compute: Callable[[Node, list[T]], T]) -> T:
        """Evaluates `root` with compute(node, argument values). Frees each value after its last use."""
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
        """Evaluates `root` on broadcastable inputs. Integers are int64.

        Raises UsageError for an index outside its capture and, with check_overflow, for an integer outside int32.
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
# Operations with a repeated argument in their text: the argument needs a variable.
NEEDS_NAMES = frozenset({"floordiv", "mod", "min", "max", "abs"})
MAX_NESTING = 64  # Intel's compiler aborts at about 2000 nested parentheses


class Emitter:
    """Writes the graph under `root` as OpenCL C for `lanes` keys at a time (1 or an even number up to 16).

    With one lane `score` is a float and the other inputs are ints; the result is a float (score_mod), or an int 0 or 1
    (mask_mod). With several lanes `score` is a float vector and `kv_idx` an int vector; b, h and q_idx stay scalar. The
    result is always a vector, even without `kv_idx`: float, or int with 0 and -1.
    """

    def __init__(self, graph: Graph, root: int, lanes: int):
        self.graph = graph
        self.root = root
        self.lanes = lanes
        self.order = graph.reachable(root)
        self.texts: dict[int, str] = {}
        self.nonnegative = _nonnegative(graph, self.order)

    def body(self) -> str:
        """Returns one declaration per line in dependency order, ending with `return expression;`."""
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
        """Returns the nodes that get a variable: nodes used twice or required by name, values computed once a row and
        used at every key, and every MAX_NESTING-th nested operation.
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
        """Returns a node's text for all lanes, broadcasting a scalar."""
        node, text = self.graph.nodes[number], self.texts[number]
        if self.lanes == 1 or node.per_key:
            return text
        # A vector comparison gives -1 for true, a scalar comparison 1.
        return f"({C_TYPES[node.dtype]}{self.lanes})({f'-({text})' if node.dtype == 'bool' else text})"

    def _halves(self, form: str, result: str, *args: int) -> str:
        """Applies `form` to both halves: no vector with 16 lanes may be passed to a library function in the driver."""
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
            return f"TANH({args[0]})"  # a macro, because a kernel may define its own tanh
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
        return f"FLOAT_OF({text})" if kind == "float" else f"({kind})({text})"  # a macro: a kernel may define its own

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
        """Integer // and %, rounded towards minus infinity. `trace` guarantees a nonzero divisor."""
        a, b = args
        divisor = self.graph.nodes[node.args[1]].value if self.graph.nodes[node.args[1]].op == "const" else None
        if isinstance(divisor, int) and divisor > 0 and divisor & (divisor - 1) == 0:
            # OpenCL's >> keeps the sign, so it is right for negative values too.
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
    """Maps each node to whether it is an int32 that can't be negative. Positions and heads never are negative."""
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
    """Strides in elements. NumPy's strides may differ for axes with length 1."""
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
