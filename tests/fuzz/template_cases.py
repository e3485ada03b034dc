"""Cases whose subject is a chat template: constructs of Jinja in one another, and sound templates with odd tokens."""

from __future__ import annotations

import re

from fuzz.cases import Case
from fuzz.mutations import LONG, TEXTS, Draw
from fuzz.seeds import CHATML, Folders
from hypothesis import strategies as st

_SOUND = [
    CHATML,
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}"
    "{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' ~ m.content }}"
    "{% endfor %}",
    "{%- macro text(m, depth=1) -%}{{ m.content | replace('a', 'b') }}{%- endmacro -%}{% set ns = namespace(n=0) %}"
    "{% for m in messages | reverse %}{% set ns.n = ns.n + 1 %}{{ text(m) }}{% if ns.n > 3 %}{% break %}{% endif %}"
    "{% endfor %}{{ strftime_now('%d %b %Y') }}{{ messages | tojson(indent=2) }}",
]
_ATOMS = [
    "messages", "messages[0]", "messages[0].content", "bos_token", "add_generation_prompt", "tools", "none", "true",
    "x", "1", "0", "-1", "2.5", "1e308", "9" * 400, "'a'", "'é\\u202e'", "''", "[]", "[1, 2, 3]", "{}", "{'a': [1]}",
    "()", "range(3)", "range(100000)", "range(10**9)", "range(-5, 10**30)", "namespace(a=1)", "loop", "loop.index",
    "self", "caller", "varargs", "cycler('a', 'b')", "joiner(',')", "dict(a=1)", "raise_exception", "strftime_now",
    "raise_exception('no')",
    f"raise_exception('{LONG[:500]}')", f"{LONG[:500]}.x.y", f"'{LONG[:500]}'.x()",
    "raise_exception(messages * 1000)", "strftime_now('%Y')", "strftime_now('%' * 99999)",
    "'a' * 10**6", "('a' * 1000000) * 1000000", "[0] * 10**6", "2 ** 100000", "10 ** 10 ** 10", "7 // 0", "1 % 0",
    "'%s' % 'a'", "'%999999999d' % 1", "'{0:>999999999}'.format(1)", "'{0.__class__}'.format(1)", "'a'.join",
    "'' .__class__.__mro__", "messages.__class__", "messages.append(1)", "'a'.encode()", "'%c' % 55296",
    "'abc'.center(999999999)", "'a'.ljust(10**12)", "'a'.zfill(10**9)", "'\\t'.expandtabs(10**9)",
    "'aaaa'.replace('', 'b' * 9999)", "(1).to_bytes(10**9, 'big')", "'x'.translate({120: 'y' * 999999})",
]  # fmt: skip
_FILTERS = [
    "abs", "attr('content')", "batch(2)", "batch(10**9, 'x')", "capitalize", "center(10**9)", "default('a', true)",
    "dictsort", "escape", "filesizeformat", "first", "float", "forceescape", "format('a')", "groupby('role')",
    "indent(10**9)", "int", "int(base=37)", "items", "join(',' * 100000)", "last", "length", "list", "lower",
    "map('upper')", "map(attribute='a.b.c')", "max", "min", "pprint", "random", "reject('odd')", "replace('', 'ab')",
    "reverse", "round(400)", "round(-400)", "safe", "select('in', messages)", "selectattr('role')", "slice(10**9)",
    "slice(0)", "sort", "string", "striptags", "sum", "title", "tojson", "tojson(indent=10**8)", "trim", "truncate(-1)",
    "unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(0)", "wordwrap(1)", "xmlattr", "nothing",
]  # fmt: skip
_TESTS = [
    "defined", "none", "string", "mapping", "iterable", "sequence", "odd", "divisibleby(0)", "sameas(1)",
    "in(messages)", "eq(1)", "callable", "filter('x')", "nothing", "number", "boolean",
]  # fmt: skip
_OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "if", "not in"]

_expressions = st.recursive(
    st.sampled_from(_ATOMS),
    lambda inner: st.one_of(
        st.builds("{} | {}".format, inner, st.sampled_from(_FILTERS)),
        st.builds("({}) | {}".format, inner, st.sampled_from(_FILTERS)),
        st.builds("({}) is {}".format, inner, st.sampled_from(_TESTS)),
        st.builds("({}) {} ({})".format, inner, st.sampled_from(_OPERATORS), inner),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("({})({})".format, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{} if {} else {}".format, inner, inner, inner),
    ),
    max_leaves=4,
)
_bodies = st.recursive(
    st.one_of(
        _expressions.map("{{{{ {} }}}}".format),
        st.sampled_from(
            ["text", "", "{% break %}", "{% continue %}", "{# c #}", "{% raw %}{{{% endraw %}", "{%", "}}"]
        ),
        st.sampled_from([text for text in TEXTS if text.isprintable()]),
    ),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for a in {} %}}{}{{% endfor %}}".format, _expressions, inner),
        st.builds("{{% for a in b recursive %}}{}{{{{ loop({}) }}}}{{% endfor %}}".format, inner, _expressions),
        st.builds(
            "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{}{{% endfor %}}{{% endfor %}}".format, inner
        ),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, _expressions, inner, inner),
        st.builds("{{% set x = {} %}}{}".format, _expressions, inner),
        st.builds("{{% set x %}}{}{{% endset %}}{{{{ x }}}}".format, inner),
        st.builds("{{% macro m(a={}) %}}{}{{% endmacro %}}{{{{ m() }}}}".format, _expressions, inner),
        st.builds("{{% macro m(a) %}}{}{{{{ m(a) }}}}{{% endmacro %}}{{{{ m(1) }}}}".format, inner),
        st.builds("{{% filter {} %}}{}{{% endfilter %}}".format, st.sampled_from(_FILTERS), inner),
        st.builds("{{% call m() %}}{}{{% endcall %}}".format, inner),
        st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, _expressions, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
        st.builds("{{% block b %}}{}{{% endblock %}}{{{{ self.b() }}}}".format, inner),
        st.builds("{{% import {} as y %}}{}".format, _expressions, inner),
        st.builds("{{% include {} %}}{}".format, _expressions, inner),
        st.builds("{{% autoescape true %}}{}{{% endautoescape %}}".format, inner),
    ),
    max_leaves=5,
)
_WHOLE = [
    "{{ '(' * 100 }}" * 3000,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 500 + "x" + "{% endif %}" * 500,
    "{{ 1" + " + 1" * 20_000 + " }}",
    "{{ x" + ".a" * 5000 + " }}",
    "{% set x = [1] %}" + "{% set x = x + x %}" * 40 + "{{ x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% set x = {} %}{% set y = {'a': x} %}{{ y | tojson }}",
    "{{ ('a' ~ 'b') | list | map('upper') | sum(start='') }}",
    "\ud800 {{ '\ud800' }}",
    "",
]  # fmt: skip
_TOKEN = re.compile(r"\{[%{#]-?|-?[%}#]\}|\w+|\s+|.", re.DOTALL)


@st.composite
def template_cases(draw: Draw, folders: Folders) -> Case:
    kind = draw(st.sampled_from(["made", "made", "made", "tokens", "whole"]))
    if kind == "made":
        source = draw(_bodies)
    elif kind == "whole":
        source = draw(st.sampled_from(_WHOLE))
    else:
        tokens = _TOKEN.findall(draw(st.sampled_from(_SOUND)))
        words = tokens + _ATOMS + _FILTERS + _OPERATORS
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(tokens) - 1))
            new = draw(st.sampled_from(["drop", "twice", "swap"]) | st.sampled_from(words).map("={}".format))
            if new == "swap":
                other = draw(st.integers(0, len(tokens) - 1))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            else:
                tokens[at : at + 1] = {"drop": [], "twice": [tokens[at]] * 2}.get(new, [new[1:]])
            tokens = tokens or ["x"]
        source = "".join(tokens)
    return Case("template", [kind], {"template.jinja": source.encode("utf-8", "surrogatepass")})
