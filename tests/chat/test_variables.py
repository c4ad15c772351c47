"""The variables that a chat template reads."""

from __future__ import annotations

import pytest
from support.any_template import tokenizer_for
from support.families import FAMILIES, family_tokenizer

from agentrl.chat import ChatTemplate
from agentrl.chat.render import check_variables
from agentrl.errors import ConfigError, TemplateError

READ = {
    "qwen3": "enable_thinking",
    "gemma4": "enable_thinking, preserve_thinking",
    "gptoss": "builtin_tools, model_identity, reasoning_effort",
    "llama3_1": "builtin_tools, custom_tools, date_string, tools_in_user_message",
    "qwen2_5": "no variables but its own",
}


@pytest.mark.parametrize("name", READ)
def test_the_error_for_an_unused_variable_lists_the_used_ones(name):
    text = str(family_tokenizer(name).chat_template)
    with pytest.raises(ConfigError) as e:
        check_variables(text, ["zzz"])
    assert str(e.value) == (
        f"model.template_kwargs: the chat template never reads 'zzz'. It reads: {READ[name]}"
    )
    if name != "qwen2_5":
        check_variables(text, READ[name].split(", "))


def test_the_closest_name_is_suggested():
    text = str(family_tokenizer("qwen3").chat_template)
    with pytest.raises(ConfigError, match=r"Did you mean 'enable_thinking'\? It reads:"):
        check_variables(text, ["enable_thinkin"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_template_can_be_read(name):
    """None is let through for being no plain Jinja."""
    with pytest.raises(ConfigError):
        check_variables(str(family_tokenizer(name).chat_template), ["zzz"])


@pytest.mark.parametrize(
    "text",
    [
        "{% if x is defined %}{% endif %}",
        "{% set x = x if x is defined else 1 %}{{ x }}",
        "{% if not x %}{% set x = 1 %}{% endif %}{{ x }}",
        "{% macro m() %}{{ x }}{% endmacro %}{{ m() }}",
        "{% for m in messages %}{% if x %}{% continue %}{% endif %}{% endfor %}",
        "{% generation %}{{ x }}{%- endgeneration -%}",
    ],
)
def test_a_variable_is_found_anywhere_in_a_template(text):
    check_variables(text, ["x"])
    with pytest.raises(ConfigError):
        check_variables(text, ["y"])


@pytest.mark.parametrize(
    "text", ["{% set x = 1 %}{{ x }}", "{% for x in messages %}{{ x }}{% endfor %}"]
)
def test_variables_that_a_template_sets_itself_do_not_count(text):
    with pytest.raises(ConfigError, match="no variables but its own"):
        check_variables(text, ["x"])


NEEDY = """
{{- bos_token + '<|system|>' + functions + today + (style or '') + (mood | default('')) -}}
{%- if place is defined -%}{{- place -}}{%- endif -%}
{%- for message in messages -%}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def test_a_template_that_needs_variables_says_which():
    tokenizer = tokenizer_for(NEEDY)
    with pytest.raises(TemplateError, match=r"'functions' is undefined.*model\.template_kwargs"):
        ChatTemplate(tokenizer)
    with pytest.raises(TemplateError, match="'today' is undefined"):
        ChatTemplate(tokenizer, variables={"functions": "[]"})
    values = {"functions": "[]", "today": "Monday", "style": "plain"}
    template = ChatTemplate(tokenizer, variables=values)
    assert "[]Mondayplain" in template.render([{"role": "user", "content": "Q"}])


def test_a_template_that_fails_for_another_reason_says_that_reason():
    failing = tokenizer_for(NEEDY.replace("functions + today", "messages[7].content"))
    with pytest.raises(TemplateError, match="fails on the roles"):
        ChatTemplate(failing)
