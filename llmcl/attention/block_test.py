"""A mask_mod over a block of positions, in OpenCL C: does it hide every key, show every key, or neither?

Kernels run this code once per key tile, with the rules from `intervals.bounds`. Decode and prefill can thus skip tiles
at any position without a block list. Batch and head are numbers, q_idx and kv_idx ranges.
Every value has two int variables: least and greatest value, or for a bool "certain" and "possible". Sums and products
of bounds saturate. Kernels compute in int32 without overflow, so a bound outside int32 comes from operands that never
meet. (Bounds in long failed with Mesa 22: it miscompares a widened int with a constant.) Unknown values (floats, tables
with long ranges) may be anything; the kernel then tests each key in the tile.
"""

from __future__ import annotations

from llmcl.attention.tracing.graph import C_TYPES, Emitter, Node
from llmcl.attention.tracing.trace import TracedMod

Pair = tuple[str, str]
# Least and greatest among a few elements. For many elements "unknown" is cheaper.
MASK_RANGE = """inline int2 mask_range(__global const int* x, const int first, const int last) {
    if (last - first >= 64) return (int2)(INT_MIN, INT_MAX);
    int2 range = (int2)(x[first]);
    for (int i = first + 1; i <= last; ++i) range = (int2)(min(range.x, x[i]), max(range.y, x[i]));
    return range;
}
"""
RANGES = {"q_idx": ("q_first", "q_last"), "kv_idx": ("kv_first", "kv_last")}
# If one operand is a number, both ends of the range occur as values.
ATTAINED = frozenset({"input", "add", "sub", "mul", "floordiv", "shr", "min", "max"})


def block_test(mod: TracedMod) -> str:
    """Returns the body of `int mask_block(b, h, q_first, q_last, kv_first, kv_last)`: 0 hidden, 1
    undecided, 2 visible."""
    return _Writer(mod).body()


class _Writer:
    def __init__(self, mod: TracedMod):
        self.mod = mod
        self.graph = mod.graph
        self.numbers = Emitter(mod.graph, mod.root, 1)  # writes values that are constant inside the block
        self.pairs: dict[int, Pair] = {}
        self.lines: list[str] = []

    def body(self) -> str:
        for number in self.numbers.order:
            node = self.graph.nodes[number]
            if self._is_number(number):
                self._number(number, node)
            elif node.dtype != "float32":
                low, high = self._range(node)
                name = f"{self.graph.prefix}_r{number}"
                self.lines.append(f"const int {name}a = {low}, {name}b = {high};")
                self.pairs[number] = f"{name}a", f"{name}b"
        certain, possible = self._pair(self.mod.root)
        return "\n".join((*self.lines, f"return {certain} ? 2 : {possible} ? 1 : 0;"))

    def _is_number(self, number: int) -> bool:
        return self.graph.nodes[number].depends <= {"b", "h"}

    def _number(self, number: int, node: Node) -> None:
        text = self.numbers._text(node)
        if node.op not in ("const", "input"):
            name = f"{self.graph.prefix}_r{number}"
            self.lines.append(f"const {C_TYPES[node.dtype]} {name} = {text};")
            text = name
        self.numbers.texts[number] = text

    def _pair(self, number: int) -> Pair:
        if not self._is_number(number):
            return self.pairs[number]
        return self.numbers.texts[number], self.numbers.texts[number]

    def _constant(self, number: int) -> int | None:
        node = self.graph.nodes[number]
        return node.value if node.op == "const" and isinstance(node.value, int) else None

    def _range(self, node: Node) -> Pair:
        if node.op == "input":
            return RANGES[str(node.value)]
        if node.op == "load":
            return self._load(node)
        if any(self.graph.nodes[arg].dtype == "float32" for arg in node.args):
            return _anything(node)
        args = [self._pair(arg) for arg in node.args]
        if node.op in ("lt", "le", "eq", "ne"):
            return _compare(node.op, *args)
        if node.op == "where":
            (certain, possible), a, b = args
            pick = "{0} ? {1} : {2} ? {3} : {4}"
            either = ("&", "|") if node.dtype == "bool" else ("min", "max")
            joined = [
                f"({x} {how} {y})" if node.dtype == "bool" else f"{how}({x}, {y})"
                for how, x, y in zip(either, a, b, strict=True)
            ]
            low, high = (pick.format(certain, a[i], possible, joined[i], b[i]) for i in (0, 1))
            return low, high
        if node.op == "cast":
            return args[0] if node.dtype != "bool" else _compare("ne", args[0], ("0", "0"))
        if node.dtype == "bool":
            return _logic(node.op, args)
        return self._integer(node, args)

    def _integer(self, node: Node, args: list[Pair]) -> Pair:
        a = args[0]
        b = args[1] if len(args) > 1 else a
        constant = self._constant(node.args[-1])
        if node.op == "add":
            return f"add_sat({a[0]}, {b[0]})", f"add_sat({a[1]}, {b[1]})"
        if node.op == "sub":
            return f"sub_sat({a[0]}, {b[1]})", f"sub_sat({a[1]}, {b[0]})"
        if node.op == "mul":
            corners = [f"mad_sat({x}, {y}, 0)" for x in a for y in b]
            return tuple(  # type: ignore[return-value]
                f"{pick}({pick}({corners[0]}, {corners[1]}), {pick}({corners[2]}, {corners[3]}))"
                for pick in ("min", "max")
            )
        if node.op in ("min", "max"):
            return f"{node.op}({a[0]}, {b[0]})", f"{node.op}({a[1]}, {b[1]})"
        if node.op == "neg":
            return _negative(a[1]), _negative(a[0])
        if node.op == "abs":
            return f"max(max({a[0]}, {_negative(a[1])}), 0)", f"max({_negative(a[0])}, {a[1]})"
        if constant is not None and constant > 0 and node.op == "floordiv":
            return _floor(a[0], constant), _floor(a[1], constant)
        if constant is not None and constant > 0 and node.op == "mod":
            # Within one period the remainder only grows.
            same = f"{_floor(a[0], constant)} == {_floor(a[1], constant)}"
            low, high = (f"{x} % {constant} + ({x} % {constant} < 0 ? {constant} : 0)" for x in a)
            return f"{same} ? {low} : 0", f"{same} ? {high} : {constant - 1}"
        if constant is not None and constant >= 0 and node.op == "shr":
            return f"({a[0]} >> {constant})", f"({a[1]} >> {constant})"
        if constant is not None and constant >= 0 and node.op == "and":
            return "0", str(constant)
        return _anything(node)

    def _load(self, node: Node) -> Pair:
        """Bounds a load by the elements between first and last index, if they are few. All indices are valid."""
        capture = self.graph.capture_of(node)
        *outer, inner = node.args
        if node.dtype != "int32" or not all(self._is_number(arg) for arg in outer) or not self._attained(inner):
            return _anything(node)
        offset = "0"
        for arg, size in zip(outer, capture.shape, strict=False):
            offset = f"({offset} * {size} + {self.numbers.texts[arg]})"
        if outer:
            offset = f"{offset} * {capture.shape[-1]}"
        first, last = (f"{offset} + {bound}" for bound in self._pair(inner))
        name = f"{self.graph.prefix}_l{len(self.lines)}"
        self.lines.append(f"const int2 {name} = mask_range({capture.name}, {first}, {last});")
        return f"{name}.x", f"{name}.y"

    def _attained(self, number: int) -> bool:
        node = self.graph.nodes[number]
        ranged = [arg for arg in node.args if not self._is_number(arg)]
        return self._is_number(number) or (
            node.op in ATTAINED and len(ranged) <= 1 and all(self._attained(arg) for arg in ranged)
        )


def _anything(node: Node) -> Pair:
    return ("0", "1") if node.dtype == "bool" else ("INT_MIN", "INT_MAX")


def _negative(text: str) -> str:
    return f"sub_sat(0, {text})"


def _floor(text: str, divisor: int) -> str:
    return f"({text} / {divisor} - ({text} % {divisor} < 0))"


def _compare(op: str, a: Pair, b: Pair) -> Pair:
    if op in ("lt", "le"):
        sign = "<" if op == "lt" else "<="
        return f"({a[1]} {sign} {b[0]})", f"({a[0]} {sign} {b[1]})"
    equal = f"({a[0]} == {b[1]} && {a[1]} == {b[0]})"
    disjoint = f"({a[1]} < {b[0]} || {a[0]} > {b[1]})"
    return (equal, f"!{disjoint}") if op == "eq" else (disjoint, f"!{equal}")


def _logic(op: str, args: list[Pair]) -> Pair:
    a = args[0]
    if op == "not":
        return f"!{a[1]}", f"!{a[0]}"
    b = args[1]
    if op in ("and", "or"):
        sign = "&" if op == "and" else "|"
        return f"({a[0]} {sign} {b[0]})", f"({a[1]} {sign} {b[1]})"
    # xor is certain where both operands are decided and differ, impossible where both are decided and agree.
    certain = f"(({a[0]} & !{b[1]}) | (!{a[1]} & {b[0]}))"
    return certain, f"!(({a[0]} & {b[0]}) | (!{a[1]} & !{b[1]}))"
