"""The teacher of on-policy distillation, which scores the tokens that the policy samples."""

from __future__ import annotations

import re
from string import Formatter
from typing import Any

from pydantic import field_validator

from agentrl.config.section import Section, key, refuse_url

POLICY = "policy"
"""The teacher that is the present policy itself, with another prompt."""


def is_url(teacher: str) -> bool:
    """Return whether a teacher is a server, not a model."""
    return teacher.startswith(("http://", "https://"))


class TeacherConfig(Section):
    """The teacher of on-policy distillation (docs/distillation.md)."""

    model: str | dict[str, str] = key(
        "", allowed="a model, the URL of a server, or a mapping from data sources to these"
    )
    """A model folder, a hub name, `policy` (the present policy, with teacher.prompt), the URL of an
    SGLang server, or a mapping from data sources to these. Empty: no teacher."""
    prompt: str = ""
    """The last user message as the teacher reads it, for example `{prompt} The solution:
    {ground_truth}`. Empty: as the policy reads it."""
    weight: float = key(1.0, gt=0)
    """Weight of the teacher's advantages, which are added to those of the rewards."""
    clip: float = key(10.0, gt=0)
    """The largest log ratio of teacher and policy for a token, in nats, in both directions."""

    @property
    def names(self) -> list[str]:
        """The different teachers."""
        model = self.model
        return [*dict.fromkeys([model] if isinstance(model, str) else model.values())] * bool(model)

    @property
    def local(self) -> list[str]:
        """The teachers that the learner holds: models of their own, or the initial policy."""
        return [name for name in self.names if name != POLICY and not is_url(name)]

    @property
    def fields(self) -> list[str]:
        """The fields that `prompt` names, `prompt` among them."""
        names = [name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None]
        return [re.split(r"[.\[]", name)[0] for name in names]

    def of(self, data_source: str) -> str:
        """Return the teacher of rows with a data source; "" if there is none."""
        return self.model if isinstance(self.model, str) else self.model.get(data_source, "")

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str | dict[str, str]) -> str | dict[str, str]:
        def check(name: str) -> str:
            if not is_url(name):
                return refuse_url(name)
            if not re.fullmatch(r"https?://[^\s@?#]+", name):
                raise ValueError(
                    f"{name!r} is not of the form http://HOST:PORT (the API key is read from"
                    " AGENTRL_TEACHER_TOKEN)"
                )
            return name.rstrip("/")

        if isinstance(model, str):
            return check(model)
        if empty := [source for source, name in model.items() if not name]:
            raise ValueError(f"the data source {empty[0]!r} has no teacher")
        return {source: check(name) for source, name in model.items()}

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str) -> str:
        try:
            fields: list[Any] = [name for _, name, _, _ in Formatter().parse(prompt)]
        except ValueError as e:
            raise ValueError(f"{e}. Write {{{{ and }}}} for braces in the text") from None
        if prompt and "prompt" not in fields:
            raise ValueError("it has no {prompt}, which is the text of the user's message")
        return prompt
