"""Outputs of models in the formats of their chat templates, and what they say.

Calls are spelled as the models' own templates spell them in histories (Qwen2.5, Qwen3, Qwen3-Coder, Llama 3.1 and 3.2,
Mistral Small 3.1 and newer ones); the others are mistakes that models make, and texts that look like calls.
"""

import json
from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, Any]]

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
            "share": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "any": {},
            "unit": {"enum": ["C", "F"]},
        },
        "$defs": {"place": {"type": "object"}},
        "required": ["city"],
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {},
}


@dataclass(frozen=True)
class Output:
    """`text` says `content` and `calls`; arguments are those that the JSON of a call has."""

    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


PARIS = ("get_weather", {"city": "Paris"})
NOW = ("now", {})
_CODE = 'def f():\n    return "</tag> {\\"a\\": [1]}"\n'

_MANY = {
    "city": 'Zürich "X"\n2',
    "days": 3,
    "detailed": True,
    "share": None,
    "tags": ["a", "b"],
    "where": {"x": [1.5]},
}
"""What the templates of the models were given, for the outputs that are theirs."""
_MANY_JSON = json.dumps(_MANY, ensure_ascii=False)

HERMES = [
    Output(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_MANY_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        (("get_weather", _MANY), NOW),
    ),
    Output("Plain text, a < b, <tool> and <tool_call", "Plain text, a < b, <tool> and <tool_call"),
    Output('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", (PARIS,)),
    Output(
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "I look.",
        (PARIS, NOW),
    ),
    Output(
        '<tool_call>{"arguments": {"city": "Zürich"}, "name": "get_weather"}</tool_call>',
        "",
        (("get_weather", {"city": "Zürich"}),),
    ),
    Output('<tool_call>{"name": "now"}</tool_call> Done.', "Done.", (NOW,)),
    Output('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", (NOW,)),
    Output('<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", (PARIS,)),
    Output('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>', "", (PARIS,)),
    Output('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', "", (PARIS,)),
    Output(
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]</tool_call>', "", (NOW, NOW)
    ),
    Output(
        '<tool_call>{"name": "write_file", "arguments": {"path": "a", "text": "</tool_call> \\"{[\\\\ \\u00e9"}}'
        "</tool_call>",
        "",
        (("write_file", {"path": "a", "text": '</tool_call> "{[\\ é'}),),
    ),
    Output(
        '<tool_call>{"name": "write_file",\n "arguments": {\n"path": "a", "text": "one\ntwo\t\\\\"}}</tool_call>',
        "",
        (("write_file", {"path": "a", "text": "one\ntwo\t\\"}),),
    ),
    Output('<tool_call>{"name": "now", "arguments": {"a": "1\\\n2"}}</tool_call>', "", (("now", {"a": "1\n2"}),)),
    Output("<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>"),
    Output('<tool_call>{"nome": "x"}</tool_call> a', '<tool_call>{"nome": "x"}</tool_call> a'),
    Output("Use <tool_call> so.\n", "Use <tool_call> so.\n"),
    Output('A\n<tool_call>{"name": "now"}</tool_call>\nB', "A\nB", (NOW,)),
]

QWEN3_CODER = [
    Output(
        '\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "X"\n2\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n<parameter=detailed>\nTrue\n</parameter>\n<parameter=share>\nNone\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=where>\n{"x": [1.5]}\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        (("get_weather", _MANY), NOW),
    ),
    Output("<tool_call>\n<function=now>\n</function>\n</tool_call>", "", (NOW,)),
    Output(
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=detailed>\ntrue\n</parameter>\n<parameter=share>\n0.5\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=where>\n{"x": {"y": null}}\n</parameter>\n'
        "<parameter=any>\n12\n</parameter>\n<parameter=unit>\nC\n</parameter>\n<parameter=other>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        "I look.",
        (
            (
                "get_weather",
                {
                    "city": "Paris",
                    "days": 3,
                    "detailed": True,
                    "share": 0.5,
                    "tags": ["a", "b"],
                    "where": {"x": {"y": None}},
                    "any": 12,
                    "unit": "C",
                    "other": "7",
                },
            ),
        ),
    ),
    Output(
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n"
        f"{_CODE}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        (("write_file", {"path": "a.py", "text": _CODE}), NOW),
    ),
    Output(
        "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\nmany\n</parameter>\n"
        "<parameter=share>\nnull\n</parameter>\n<parameter=tags>\n['a']\n</parameter>\n</function>",
        "",
        (("get_weather", {"city": "12", "days": "many", "share": None, "tags": ["a"]}),),
    ),
    Output(
        "<tool_call>\n<function=get_weather>\n<parameter=where>\n"
        '{"mode": "AIR_CLEAN", "enabled": true}\n</function>\n</tool_call>\n',
        "",
        (("get_weather", {"where": {"mode": "AIR_CLEAN", "enabled": True}}),),
    ),
    Output(
        "<tool_call>\n<function=write_file>\n<parameter=path>\na</function>b\n<parameter=text>\nc\n</function>",
        "",
        (("write_file", {"path": "a</function>b", "text": "c"}),),
    ),
    Output("Tags as <tool_call> or <function= are text", "Tags as <tool_call> or <function= are text"),
    Output("<tool_call>\n{}\n</tool_call>", "<tool_call>\n{}\n</tool_call>"),
    Output("<tool_call><function=now></tool_call> Bye", "Bye", (NOW,)),
]

LLAMA3_JSON = [
    Output(f'{{"name": "get_weather", "parameters": {_MANY_JSON}}}', "", (("get_weather", _MANY),)),
    Output('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)),
    Output('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)),
    Output('{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)),
    Output(
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}', "", (PARIS, NOW)
    ),
    Output('I call:\n\n{"name": "get_weather", "arguments": {"city": "Paris"}}', "I call:", (PARIS,)),
    Output('{"name": "Bob", "parameters": {"age": 3}}', '{"name": "Bob", "parameters": {"age": 3}}'),
    Output('{"name": "now"}', '{"name": "now"}'),
    Output('{"a": {"name": "now", "parameters": {}}}', '{"a": {"name": "now", "parameters": {}}}'),
    Output('A set {1} and\n{ 2 }\n{"name": 3}', 'A set {1} and\n{ 2 }\n{"name": 3}'),
    Output('{"parameters": {"city": "Paris"}, "name": "get_weather"}', "", (PARIS,)),
]

PYTHONIC = [
    Output("[get_weather(city='Paris')]", "", (PARIS,)),
    Output('[get_weather(city="Paris"), now()]', "", (PARIS, NOW)),
    Output("<|python_start|>[now()]<|python_end|>", "", (NOW,)),
    Output(
        "[get_weather(city='a, \"b\") \\'c\\'', days=-3, detailed=True, share=None, tags=['x', 'y,'], "
        "where={'a': (1, 2)}, any=null)]",
        "",
        (
            (
                "get_weather",
                {
                    "city": "a, \"b\") 'c'",
                    "days": -3,
                    "detailed": True,
                    "share": None,
                    "tags": ["x", "y,"],
                    "where": {"a": [1, 2]},
                    "any": None,
                },
            ),
        ),
    ),
    Output("[ get_weather( 'Paris' ) ,\n now( ) ]", "", (PARIS, NOW)),
    Output("[1, 2, 3] and [unknown(a=1)]", "[1, 2, 3] and [unknown(a=1)]"),
    Output("[unknown(a=1)]", "[unknown(a=1)]"),
    Output("[now", "[now"),
    Output("I see\n[now()]\nDone", "I see\nDone", (NOW,)),
    Output("[get_weather(city=somewhere(else))]", "", (("get_weather", {"city": "somewhere(else)"}),)),
]

MISTRAL = [
    Output(
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {_MANY_JSON}, "id": "abcdefgh1"}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefgh2"}]',
        "",
        (("get_weather", _MANY), NOW),
    ),
    Output('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]', "", (PARIS,)),
    Output(
        'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "now", "arguments": {}}]',
        "I look.",
        (PARIS, NOW),
    ),
    Output('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", (PARIS, NOW)),
    Output('[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}', "", (PARIS,)),
    Output('[TOOL_CALLS]get_weather{"city": "Paris"}', "", (PARIS,)),
    Output("A list [1] and [TOOL_CALLS", "A list [1] and [TOOL_CALLS"),
    Output("[TOOL_CALLS] none of\nthem", "[TOOL_CALLS] none of\nthem"),
    Output("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]"),
]

BY_PARSER = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
}

TEMPLATES = {
    "hermes": """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}
<|im_start|>{{ message.role }}
{%- if message.content %}

{{ message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
        {%- endfor %}
<|im_end|>
    {% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "qwen3_coder": """{%- for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content or "" }}
    {%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
        {%- for name, value in call.function.arguments | items %}

<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
        {%- endfor %}

</function>
</tool_call>
    {%- endfor %}
<|im_end|>
{%- endfor %}""",
    "llama3_json": """{%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}

{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>ipython\n" + ({"output": message.content} | tojson) + "<|im_end|>" }}
    {%- else %}
        {{- "<|im_start|>" + message.role + "\n" + message.content | trim + "<|im_end|>" }}
    {%- endif %}
{%- endfor %}""",
    "pythonic": """{%- if tools %}Answer as [func_name1(params_name1=params_value1), func_name2(params)].
{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
    {%- if message.tool_calls %}

[
        {%- for call in message.tool_calls %}
            {{- ", " if not loop.first }}{{ call.function.name }}(
            {%- for name, value in call.function.arguments | items %}
                {{- ", " if not loop.first }}{{ name }}={{ "%r" | format(value) }}
            {%- endfor %})
        {%- endfor %}]
    {%- else %}

{{ message.content }}
    {%- endif %}
<|im_end|>
{%- endfor %}""",
    "mistral": """{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" if tools }}[INST]{{ message.content }}[/INST]
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS][" }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
            {{- ", " if not loop.first }}{{ (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}""",
}
"""Templates with what is particular to those of the models: how they write calls, and what they insist on."""
