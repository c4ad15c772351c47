"""A chat template with tools for models whose own shows none: ChatML with calls as in Hermes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.chat.tokenizer import CHATML, has_chatml
from agentrl.chat.turn_delta import PROBE_TOOL
from agentrl.errors import UserError

START = "<|im_start|>system\n"
PROBE = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]


def hermes_template(tokenizer: Any) -> str:
    """Return a chat template with tools for a tokenizer with `CHATML`.

    A conversation without tools has the same text as before, with the system message that the
    tokenizer's own template adds.

    Raises:
        UserError: the tokenizer has no such tokens, or a template that shows tools or writes
            conversations in another way.
    """
    if not has_chatml(tokenizer):
        raise UserError(
            f"the tokenizer does not have the tokens {' and '.join(CHATML)}. Write a"
            " chat_template.jinja with the model's own control tokens into its folder"
        )

    def render(template: str, tools: Any = None) -> str:
        return tokenizer.apply_chat_template(
            PROBE, tools, chat_template=template, add_generation_prompt=True, tokenize=False
        )

    own, system = tokenizer.chat_template, ""
    plain = render(own) if own else ""
    if own and render(own, [PROBE_TOOL]) != plain:
        raise UserError("the tokenizer has a chat template that shows tools")
    if plain.startswith(START):
        system = plain.removeprefix(START).partition("<|im_end|>")[0]
    template = Path(__file__).with_name("hermes.jinja").read_text(encoding="utf-8")
    template = template.replace("DEFAULT_SYSTEM", repr(system))
    if own and render(template) != plain:
        raise UserError(
            f"the tokenizer's chat template is not plain ChatML: it writes {plain!r:.500}"
        )
    return template
