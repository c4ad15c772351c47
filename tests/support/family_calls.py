"""The tool calls of single model families, as Jinja."""

from __future__ import annotations

DSML = "｜DSML｜"


JSON = "{{ call.arguments | tojson }}"


OPENAI = '{"name": "{{ call.name }}", "arguments": ' + JSON + "}"


def values_between(opening, closing):
    """Return the Jinja that writes each argument between two tags; `KEY` stands for its name."""
    text = "{{ v if v is string else v | tojson }}"
    return (
        "{% for k, v in call.arguments.items() %}" + opening + text + closing + "{% endfor %}"
    ).replace("KEY", "{{ k }}")


def dsml_template(section):
    """Return DeepSeek's XML-like calls in a section of this name."""
    value = values_between(
        f'<{DSML}parameter name="KEY" string="{{{{ (v is string) | tojson }}}}">',
        f"</{DSML}parameter>",
    )
    one = f'<{DSML}invoke name="{{{{ call.name }}}}">{value}</{DSML}invoke>'
    return f"<{DSML}{section}>", one, "", f"</{DSML}{section}>"


BRACED = (
    "{%- macro written(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is mapping %}"
    "{{ '{' }}{%- for k, x in v.items() %}{{ k }}:{{ written(x) }}{{ '' if loop.last else ',' }}"
    "{% endfor -%} }{% elif v is iterable %}[{% for x in v %}{{ written(x) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


CALLS_IN_JINJA = {
    "apertus": (
        "<|tools_prefix|>[",
        '{"{{ call.name }}": ' + JSON + "}",
        ", ",
        "]<|tools_suffix|>",
    ),
    "cohere_command": (
        "<|START_THINKING|><|END_THINKING|><|START_ACTION|>[",
        '{"tool_call_id": "0", "tool_name": "{{ call.name }}", "parameters": ' + JSON + "}",
        ",\n",
        "]<|END_ACTION|>",
    ),
    "deepseek_v32": dsml_template("function_calls"),
    "deepseek_v4": dsml_template("tool_calls"),
    "functiongemma": (
        BRACED,
        "<start_function_call>call:{{ call.name }}{{ written(call.arguments) }}<end_function_call>",
        "",
        "",
    ),
    "gigachat3": ("", "<|function_call|>" + OPENAI, "", ""),
    "granite": ("", "<|tool_call|> " + OPENAI, "", ""),
    "hunyuan": (
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>{{ call.name }}<tool_sep:opensource>\n"
        + values_between(
            "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
        )
        + "</tool_call:opensource>",
        "\n",
        "\n</tool_calls:opensource>",
    ),
    "hunyuan_a13b": ("<tool_calls>[", OPENAI, ", ", "]</tool_calls>"),
    "internlm": ("", "<|action_start|><|plugin|>\n" + OPENAI + "<|action_end|>", "", ""),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ call.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "lfm2": (
        "<|tool_call_start|>[",
        "{{ call.name }}({% for k, v in call.arguments.items() %}{{ k }}="
        "{{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})",
        ", ",
        "]<|tool_call_end|>",
    ),
    "minimax_m1": ("<tool_calls>\n", OPENAI, "\n", "\n</tool_calls>"),
    "minimax_m2": (
        "<minimax:tool_call>\n",
        '<invoke name="{{ call.name }}">\n'
        + values_between('<parameter name="KEY">', "</parameter>\n")
        + "</invoke>",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "phi4_mini": ("<|tool_call|>[", OPENAI, ", ", "]<|/tool_call|>"),
    "seed_oss": (
        "",
        "<seed:tool_call>\n<function={{ call.name }}>\n"
        + values_between("<parameter=KEY>", "</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "\n",
        "",
    ),
}


def jinja(before, each, between, after):
    """Return the Jinja that writes all calls of a message."""
    return (
        "{%- if message.tool_calls %}" + before + "{%- for c in message.tool_calls %}"
        "{%- set call = c.function %}" + each + "{{ '' if loop.last else " + repr(between) + " }}"
        "{%- endfor %}" + after + "{%- endif %}"
    )
