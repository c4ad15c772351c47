"""Which variables a chat template reads."""

from __future__ import annotations

import pytest
from families import FAMILIES, family_tokenizer

from agentrl.chat.variables import check_variables
from agentrl.errors import ConfigError

READ = {
    "qwen3": "enable_thinking",
    "gemma4": "enable_thinking, preserve_thinking",
    "gptoss": "builtin_tools, model_identity, reasoning_effort",
    "llama3_1": "builtin_tools, custom_tools, date_string, tools_in_user_message",
    "qwen2_5": "no variables but its own",
}


@pytest.mark.parametrize("name", READ)
def test_a_name_that_is_never_read_is_answered_with_those_that_are(name):
    text = str(family_tokenizer(name).chat_template)
    with pytest.raises(ConfigError) as e:
        check_variables(text, ["zzz"])
    assert str(e.value) == (
        f"model.template_kwargs: the chat template never reads 'zzz'. It reads: {READ[name]}"
    )
    if name != "qwen2_5":
        check_variables(text, READ[name].split(", "))


def test_the_closest_name_is_offered():
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
def test_a_name_is_read_wherever_it_stands(text):
    check_variables(text, ["x"])
    with pytest.raises(ConfigError):
        check_variables(text, ["y"])


@pytest.mark.parametrize(
    "text", ["{% set x = 1 %}{{ x }}", "{% for x in messages %}{{ x }}{% endfor %}"]
)
def test_what_a_template_sets_before_it_reads_is_its_own(text):
    with pytest.raises(ConfigError, match="no variables but its own"):
        check_variables(text, ["x"])
