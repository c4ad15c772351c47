"""`agentrl play chat`: talk with a policy in the terminal, and let it use its tools."""

from __future__ import annotations

import secrets

from agentrl.cli.options import ConfigFile, Files, Model, Overrides, describe_sampling
from agentrl.terminal import echo

UNLIMITED = {
    "timeout_s": 1e6, "max_turns": 10**6, "max_tool_calls": 10**6, "max_trajectory_tokens": 10**7,
}  # fmt: skip
"""A person ends the conversation, not a budget."""


def chat(
    overrides: Overrides = None,
    model: Model = None,
    file: Files = None,
    config: ConfigFile = None,
    agent: str = "tool_agent",
    system: str = "",
) -> None:
    """Talk with a policy: you are the user, and it calls the tools of --file.

    An answer is printed while it is sampled, with its thinking and its calls as the policy writes
    them.

    If --model is the folder of a run, its config.yaml is used without --config, and the files that
    it names are loaded.

    `/reset` begins a new conversation, `/exit` or the end of the input ends it.

    Args:
        agent: The agent loop.
        system: The system message.

    Examples:
        agentrl play chat --model tiny --file shelf:calculator

        agentrl play chat --model runs/a
    """
    from transformers.utils import logging

    from agentrl import registry
    from agentrl.agent_loops.attempt import load_template
    from agentrl.agent_loops.play import play
    from agentrl.cli.options import read_config, with_model_folder
    from agentrl.engine.open import open_engine
    from agentrl.engine.pieces import SamplerInPieces
    from agentrl.errors import UserError
    from agentrl.interactions.person import Person, read_line
    from agentrl.trajectory import Message, Sample

    settings = read_config(
        config, overrides, model=model, file=file, needs_rows=False, uses_run_config=True
    )
    settings = with_model_folder(settings.with_values("rollout", **UNLIMITED))
    loop = registry.agent_loops.get(agent)
    if not loop.uses_interaction:
        raise UserError(f"the loop {agent!r} ends after the policy's message: use tool_agent")
    logging.disable_progress_bar()
    template = load_template(settings)
    engine = open_engine(settings, template.tokenizer)
    names = tuple(registry.tools.user_names()) or tuple(registry.tools.names())
    sampled = describe_sampling(settings.rollout)
    echo(f"tools: {', '.join(names) or 'none'}; {sampled}. /reset, /exit")
    registry.interactions.add("person", Person)
    Person.has_left = False
    opening = (Message("system", system),) if system else ()
    try:
        while (line := read_line()) is not None:
            if line == "/reset":
                continue
            prompt = (*opening, Message("user", line))
            sample = Sample("chat", prompt, agent, tools=names, interaction="person")
            seed = secrets.randbits(31)  # So the same words can get another answer.
            sampler = SamplerInPieces(engine, template, Person.show_piece)
            played = play(sample, sampler, template.tokenizer, config=settings, seed=seed)
            Person.show(played.messages)  # The last results, if a budget ended the conversation.
            if played.stop_reason != "done":
                reason = played.stop_reason
                if reason == "turn_tokens":
                    limit = settings.rollout.max_turn_tokens
                    reason += f" (the answer was cut: rollout.max_turn_tokens={limit})"
                echo(f"the conversation ended: {reason}")
            if Person.has_left:
                return
    finally:
        engine.close()
