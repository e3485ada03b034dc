"""Answers as families of models write them, with the calls that are in them."""

from __future__ import annotations

import json

NAMES = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": ["string", "null"]}}},
}
W, A = '{"city": "Z\\u00fcrich, \\"old\\" {town}"}', '{"a": 1, "b": [2, {"c": "}"}]}'

# llama.cpp, vLLM and SGLang test how these models write calls; these cases say the same in our words.
OTHERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "mistral 3.2": (
        "mistral 3.2",
        f"I look.[TOOL_CALLS]add[CALL_ID]9Ae3bDc2F[ARGS]{A}[TOOL_CALLS]weather[CALL_ID]000000001[ARGS]{W}",
        "I look.",
        [("add", A), ("weather", W)],
    ),
    "mistral 3.2, a list": ("mistral 3.2", f'[TOOL_CALLS][{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
    "mistral 3.2, spaces": ("mistral 3.2", f"[TOOL_CALLS] add [CALL_ID] x1 [ARGS] {A}", "", [("add", A)]),
    "mistral 3": (
        "mistral 3",
        f"[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]weather[ARGS]{W}",
        "",
        [("add", A), ("weather", W)],
    ),
    "lfm2, JSON": (
        "lfm2",
        f'<|tool_call_start|>[{{"name": "add", "arguments": {A}}}, {{"name": "weather", "arguments": {W}}}]'
        "<|tool_call_end|>Done.",
        "Done.",
        [("add", A), ("weather", W)],
    ),
    "qwen, JSON": (
        "qwen",
        f'<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n'
        "</tool_call>",
        "",
        [("add", A), ("add", "{}")],
    ),
    "seed-oss": (
        "seed-oss",
        "I look.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Z\u00fcrich,\n<old></parameter>\n"
        "<parameter=unit>C</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n"
        '<parameter=a>1</parameter>\n<parameter=b>[2, {"c": 3}]</parameter>\n</function>\n</seed:tool_call>',
        "I look.",
        [("weather", '{"city": "Z\u00fcrich,\\n<old>", "unit": "C"}'), ("add", '{"a": 1, "b": [2, {"c": 3}]}')],
    ),
    "seed-oss, none": (
        "seed-oss",
        "<seed:tool_call>\n<function=add>\n</function>\n</seed:tool_call>",
        "",
        [("add", "{}")],
    ),
    "seed-oss, cut": (
        "seed-oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Be",
        "",
        [("weather", '{"city": "Be')],
    ),
    "glm, escaped": (
        "glm",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>[{\\"task\\": \\"say \\\\\\"hi\\\\\\"\\", \\"n\\": 1}]</arg_value>\n</tool_call>',
        "",
        [("add", '{"a": 1, "b": [{"task": "say \\"hi\\"", "n": 1}]}')],
    ),
    "glm, as Python": (
        "glm",
        "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value>[{'c': True, 'd': None}]</arg_value>\n"
        "<arg_key>a</arg_key>\n<arg_value>[no list</arg_value>\n</tool_call>",
        "",
        [("add", '{"b": [{"c": true, "d": null}], "a": "[no list"}')],
    ),
    "kimi k2": (
        "kimi k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{W}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        [("weather", W), ("add", A)],
    ),
    "kimi k2, names alone": (
        "kimi k2",
        f"<|tool_call_begin|>add:3<|tool_call_argument_begin|> {A} <|tool_call_end|><|tool_call_begin|>weather"
        f"<|tool_call_argument_begin|>{W}<|tool_call_end|>",
        "",
        [("add", A), ("weather", W)],
    ),
    "kimi k2, the same number": (
        "kimi k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{A}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [("add", A), ("add", A)],
    ),
    "minimax m2": (
        "minimax m2",
        'I look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Z\u00fcrich "old"</parameter>\n'
        '</invoke>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">{"x": [1]}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "I look.",
        [("weather", '{"city": "Z\u00fcrich \\"old\\""}'), ("add", '{"a": 1, "b": {"x": [1]}}')],
    ),
    "minimax m2, none": (
        "minimax m2",
        '<minimax:tool_call>\n<invoke name="add">\n</invoke>\n</minimax:tool_call>\nDone.',
        "Done.",
        [("add", "{}")],
    ),
    "deepseek v3.2": (
        "deepseek v3.2",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Z\u00fcrich\n</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "I look.",
        [("weather", '{"city": "Z\u00fcrich\\n"}'), ("add", '{"a": 1, "b": "12"}')],
    ),
    "cohere": (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "add", "parameters": {A}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "weather", "parameters": {W}}}\n]<|END_ACTION|>',
        "",
        [("add", A), ("weather", W)],
    ),
    "apertus": (
        "apertus",
        f'I look.<|tools_prefix|>[{{"add": {A}}}, {{"weather": {W}}}]<|tools_suffix|>',
        "I look.",
        [("add", A), ("weather", W)],
    ),
    "apertus, none": ("apertus", '<|tools_prefix|>[{"add": {}}]<|tools_suffix|>', "", [("add", "{}")]),
}

# Family; the answer; its text; (name, arguments) of its calls.
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>', "", [("weather", W)]),
    "hermes, two": (
        "hermes",
        f'I look.\n\n<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "add", "arguments": {A}}}\n</tool_call>\n',
        "I look.",
        [("weather", W), ("add", A)],
    ),
    "hermes, text behind": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {A}}}</tool_call>\nThat is it.',
        "That is it.",
        [("add", A)],
    ),
    "arguments first": ("hermes", f'<tool_call>\n{{"arguments": {A}, "name": "add"}}\n</tool_call>', "", [("add", A)]),
    "none": ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>', "", [("add", "{}")]),
    "in a string": (
        "hermes",
        f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(A)}}}\n</tool_call>',
        "",
        [("add", A)],
    ),
    "text alone": (
        "hermes",
        "1 < 2 and <tool> is \n no call <tool_cal",
        "1 < 2 and <tool> is \n no call <tool_cal",
        [],
    ),
    "no object": ("hermes", "<tool_call> is a word", "<tool_call>is a word", []),
    "no call": ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "llama": ("llama 3", f'{{"name": "add", "parameters": {A}}}', "", [("add", A)]),
    "llama, two": (
        "llama 3",
        f'{{"type": "function", "name": "add", "parameters": {A}}}; {{"name": "weather", "parameters": {W}}}',
        "",
        [("add", A), ("weather", W)],
    ),
    "llama, tag": ("llama 3", f'<|python_tag|>{{"name": "add", "parameters": {A}}}', "", [("add", A)]),
    "llama, other JSON": ("llama 3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    "llama, text": ("llama 3", 'Say {"name": "add"}', 'Say {"name": "add"}', []),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, {{"name": "weather", "arguments": {W}}}]',
        "",
        [("add", A), ("weather", W)],
    ),
    "mistral, without its token": ("mistral", f'[{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
    "mistral, newer": (
        "mistral",
        f"[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]weather[ARGS]{W}",
        "",
        [("add", A), ("weather", W)],
    ),
    "mistral, a list": ("mistral", "[1, 2]", "[1, 2]", []),
    "qwen": (
        "qwen",
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nZ\u00fcrich,\n"old" <town>\n</parameter>\n'
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n"
        '1\n</parameter>\n<parameter=b>\n[2, {"c": "}"}]\n</parameter>\n</function>\n</tool_call>\n',
        "I look.",
        [
            ("weather", '{"city": "Z\u00fcrich,\\n\\"old\\" <town>", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": "}"}]}'),
        ],
    ),
    "qwen, without its opening": (
        "qwen",
        "<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=other>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("weather", '{"city": "12", "other": "3"}')],
    ),
    "qwen, values of their own": (
        "qwen",
        "<tool_call><function=add><parameter=a>True</parameter><parameter=b>two</parameter><parameter=c>\nnull\n"
        "</parameter></function></tool_call>\nDone.",
        "Done.",
        [("add", '{"a": true, "b": "two", "c": null}')],
    ),
    "qwen, none": ("qwen", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", "{}")]),
    "qwen, no call": ("qwen", "<tool_call> is a word", "<tool_call>is a word", []),
    "qwen, no name": ("qwen", "See <function=a b>c", "See<function=a b>c", []),
    "glm": (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>C</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "",
        [("weather", '{"city": "Bern\\n", "unit": "C"}'), ("add", '{"a": 1}')],
    ),
    "lfm2": (
        "lfm2",
        """Well. <|tool_call_start|>[weather(city='Z\u00fcrich, "old" (town)', unit="C"), """
        """add(a=1, b=[2, {'c': ")"}])] <|tool_call_end|>""",
        "Well.",
        [
            ("weather", '{"city": "Z\u00fcrich, \\"old\\" (town)", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": ")"}]}'),
        ],
    ),
    "lfm2, values of their own": (
        "lfm2",
        "[add(a=True, b=null, c=007, from='it\\'s', e=x)]",
        "",
        [("add", '{"a": true, "b": null, "c": "007", "from": "it\'s", "e": "x"}')],
    ),
    "olmo 3": (
        "olmo 3",
        """I look.\n<function_calls>weather(city="Z\u00fcrich, (old)\\n", unit='C')\nadd(a=1, b=[2, null])\n"""
        "add(b=true)</function_calls>\nDone.",
        "I look.Done.",
        [
            ("weather", '{"city": "Z\u00fcrich, (old)\\n", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, null]}'),
            ("add", '{"b": true}'),
        ],
    ),
    "olmo 3, cut": ("olmo 3", "<function_calls>add(a=1)\nadd(", "", [("add", '{"a": 1}'), ("add", "{")]),
    "olmo 3, lines between": (
        "olmo 3",
        "<function_calls>\nadd(a=1)\n\nadd()\n</function_calls>",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    "olmo 3, no call": ("olmo 3", "<function_calls> is a word", "<function_calls>is a word", []),
    "lfm2, none": ("lfm2", "<|tool_call_start|>[a.b-c()]<|tool_call_end|>Done.", "Done.", [("a.b-c", "{}")]),
    "lfm2, no call": ("lfm2", "[1] says (so)", "[1] says (so)", []),
    "lfm2, of no tool": ("lfm2", "[see(x=1)]", "[see(x=1)]", []),
    "gemma": (
        "gemma 4",
        'I look.\n<|tool_call>call:weather{city:<|"|>Zürich, "old" {town}\n<b><|"|>,unit:<|"|>C<|"|>}<tool_call|>'
        "<|tool_call>call:add{a:1,b:[2,{c:true}]}<tool_call|>",
        "I look.",
        [
            ("weather", '{"city": "Zürich, \\"old\\" {town}\\n<b>", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": true}]}'),
        ],
    ),
    "gemma, none": ("gemma 4", "<|tool_call>call:add{}<tool_call|>\nDone.", "Done.", [("add", "{}")]),
    "gemma, as JSON": ("gemma 4", f"<|tool_call>call:add{A}<tool_call|>", "", [("add", A)]),
    "gemma, values of their own": (
        "gemma 4",
        '<|tool_call>add { a : 007, <|"|>b<|"|>:None, c:[x y,], d, e: }<tool_call|>',
        "",
        [("add", '{"a": "007", "b": null, "c": ["x y"], "d": null, "e": null}')],
    ),
    "gemma, signs left out": (
        "gemma 4",
        '<|tool_call>call:add{{1}<|"|>a<|"|>[<|"|>b<|"|><|"|>c<|"|>}}<tool_call|>',
        "",
        [("add", '{"": {"1": null}, "a": null, "": ["b", "c"]}')],
    ),
    "gemma, cut": ("gemma 4", '<|tool_call>call:add{a:1,b:<|"|>tw<|"', "", [("add", '{"a": 1, "b": "tw')]),
    "gemma, no call": ("gemma 4", "<|tool_call> is a word", "<|tool_call>is a word", []),
    "deepseek": (
        "deepseek v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{A}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("weather", W), ("add", A)],
    ),
    "deepseek, newer": (
        "deepseek v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done.",
        "Done.",
        [("weather", W), ("add", A)],
    ),
    "deepseek, without the first opening": (
        "deepseek v3",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>\n```json\n{A}\n```\n<｜tool▁call▁end｜>",
        "",
        [("add", A)],
    ),
    "deepseek, none": (
        "deepseek v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add<｜tool▁call▁end｜>",
        "",
        [("add", "{}")],
    ),
    "deepseek, cut": (
        "deepseek v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a',
        "",
        [("add", '{"a')],
    ),
    "deepseek, no call": (
        "deepseek v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b{}",
        [],
    ),
    **OTHERS,
    "nemotron": (
        "nemotron",
        f'I look.<TOOLCALL>[{{"name": "add", "arguments": {A}}}, {{"name": "weather", "arguments": {W}}}]</TOOLCALL>',
        "I look.",
        [("add", A), ("weather", W)],
    ),
    "granite": ("granite", f'<|tool_call|>[{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
}
