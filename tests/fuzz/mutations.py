"""What every subject is changed with: hostile values, changes of a JSON tree, and changes of bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from fuzz.messages import FOREIGN
from hypothesis import strategies as st

Draw = Callable[..., Any]

LONG = FOREIGN * 3000
# Stands for a list in a list in a list..., which json.dumps cannot write.
DEEP = "@deep@"
DEPTH = 100_000

INTEGERS = [0, -1, 1, 2, 3, 7, 64, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400]
FLOATS = [0.5, -0.5, -0.0, 1e-320, 1e-30, 1e30, 1.8e308, float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    " ",
    "64",
    "null",
    "a\x00b",
    "\x1b[2J\x1b]0;title\x07",
    "one\ntwo\r\nthree",
    "\u202eabc\u2066def",
    "\ud800",
    "\udcff\udfff",
    "\ufeff\u200b\u2028",
    "../../etc/passwd",
    "%s %d {0} {x!r}",
    "{{ 7 * 7 }}",
    "<|im_end|>",
    "\U0010ffff\U0001f600",
    LONG,
]

numbers = st.sampled_from(INTEGERS) | st.sampled_from(FLOATS) | st.integers(-(2**70), 2**70) | st.floats()
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
json_values = st.one_of(
    scalars,
    scalars,
    st.lists(scalars, max_size=4),
    st.dictionaries(texts, scalars, max_size=3),
    st.sampled_from([[], {}, [[]], [{}], {"": {}}, DEEP, [0] * 70_000]),
)


def dump(tree: Any) -> bytes:
    """JSON text of a tree; surrogates stay escaped, numbers as Python has them (NaN, 400 digits)."""
    text = json.dumps(tree)
    return text.replace(f'"{DEEP}"', "[" * DEPTH + "]" * DEPTH).encode()


def shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)})"


def change_json(draw: Draw, tree: Any, known: dict[str, list[Any]]) -> str:
    """Changes a tree (an object) in place at one place; what was done. known: keys that mean something to the reader,
    with values to try besides the hostile ones."""
    if known and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(known)))
        values = st.sampled_from(known[key]) if known[key] and draw(st.integers(0, 2)) else json_values
        tree[key] = deepcopy(draw(values))  # a next change may be made in it
        return f"{key} = {shown(tree[key])}"
    parent, key, path = _place(draw, tree)
    what = draw(st.sampled_from(["value", "value", "like", "like", "like", "drop", "rename", "copy", "nest"]))
    if what == "drop":
        del parent[key]
        return f"{path} dropped"
    if what == "rename" and isinstance(parent, dict):
        name = draw(texts)
        parent[name] = parent.pop(key)
        return f"{path} renamed {shown(name)}"
    if what == "copy":
        other, other_key, other_path = _place(draw, tree)
        value = json.loads(json.dumps(other[other_key]))
        parent[key] = value
        return f"{path} = what {other_path} is"
    if what == "nest":
        parent[key] = draw(st.sampled_from([[parent[key]], {"a": parent[key]}, str(parent[key])[:50]]))
    else:
        parent[key] = _like(draw, parent[key]) if what == "like" else deepcopy(draw(json_values))
    return f"{path} = {shown(parent[key])}"


def _like(draw: Draw, value: Any) -> Any:
    """Another value of the same type, which a reader gets further with."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return draw(st.sampled_from([value + 1, value - 1, value * 2, -value, *INTEGERS[:10], *FLOATS[:6]]))
    if isinstance(value, str):
        return draw(st.sampled_from([value + value, value[:-1], value.upper(), *TEXTS]))
    if isinstance(value, dict):
        return dict(draw(st.permutations(list(value.items())))) if len(value) < 20 else {}
    return draw(st.sampled_from([value[:-1], value[1:], value * 2, value[::-1], []]))


def _place(draw: Draw, tree: Any) -> tuple[Any, Any, str]:
    """A parent in the tree, one of its keys, and the path to it. Every level is as likely, however large it is."""
    parent, path = tree, ""
    while True:
        keys: list[Any] = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not keys:
            parent["" if isinstance(parent, dict) else slice(0, 0)] = "" if isinstance(parent, dict) else [None]
            keys = [""] if isinstance(parent, dict) else [0]
        key = draw(st.sampled_from(keys))
        path += f".{shown(key)[1:-1] if isinstance(key, str) else key}"
        child = parent[key]
        if not isinstance(child, (dict, list)) or not child or draw(st.integers(0, 2)) == 0:
            return parent, key, path[1:]
        parent = child


def change_bytes(draw: Draw, data: bytes, end: int | None = None) -> tuple[bytes, str]:
    """The bytes, changed at one place before `end`; and what was done."""
    end = min(len(data), end or len(data))
    random = draw(st.randoms(use_true_random=True))  # every place as likely; st.integers prefers the ends
    at = random.randrange(max(end, 1))
    what = draw(st.sampled_from(["set", "set", "flip", "cut", "insert", "repeat", "zero", "remove"]))
    length = draw(st.sampled_from([1, 2, 4, 8, 32, 1000]))
    if what == "set":
        new = draw(st.sampled_from([b"\0", b"\xff", b"\x80", b"\xff" * 8, b'"', b"{", b"}", b"9", b"-", b"\\u"]))
        changed = data[:at] + new + data[at + len(new) :]
    elif what == "flip":
        changed = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :] if data else data
    elif what == "cut":
        changed = data[: random.randrange(len(data) + 1)]
    elif what == "insert":
        changed = data[:at] + draw(st.binary(min_size=1, max_size=16)) + data[at:]
    elif what == "repeat":
        changed = data[:at] + data[at : at + length] * draw(st.sampled_from([2, 3, 50])) + data[at + length :]
    elif what == "zero":
        changed = data[:at] + bytes(len(data[at : at + length])) + data[at + length :]
    else:
        changed = data[:at] + data[at + length :]
    return changed, f"bytes: {what} at {at}"
