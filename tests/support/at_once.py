"""Many scripted episodes at the same time."""

import asyncio
from collections.abc import Sequence

from agentrl import load_config
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play_episode
from agentrl.engine.base import Sampling
from agentrl.testing import Scripted
from agentrl.tools.toolbox import LocalToolbox
from agentrl.trajectory import Sample, Trajectory


def play_at_once(
    samples: Sequence[Sample],
    script,
    tokenizer,
    overrides: Sequence[str] = (),
    keep_errors: bool = False,
) -> list[Trajectory]:
    """Play samples at the same time, each with a script of its own: a list of texts, or a function
    from the sample to one. With `keep_errors`, the error of an episode is its result."""
    config = load_config(None, ["rollout.timeout_s=600", *overrides])
    template = make_template(tokenizer, config)

    async def play(number: int, sample: Sample, toolbox: LocalToolbox) -> Trajectory:
        sampler = Scripted(script(sample) if callable(script) else script, tokenizer)
        runtime = Runtime(sampler, template, toolbox, config)
        name = f"episode-{number}"
        sampler.begin(name)
        return await play_episode(
            runtime, sample, episode_id=name, rollout=0, sampling=Sampling(), seed=0
        )

    async def play_all() -> list[Trajectory]:
        toolbox = LocalToolbox()
        try:
            plays = (play(i, s, toolbox) for i, s in enumerate(samples))
            return await asyncio.gather(*plays, return_exceptions=keep_errors)
        finally:
            await toolbox.aclose()

    return asyncio.run(play_all())
