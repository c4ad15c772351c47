"""Kills the processes of doors during episodes."""

from contextlib import closing

from agentrl import load_config
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.engine.base import Sampling
from agentrl.preflight import make_plan
from agentrl.rewards.scorer import Scorer
from agentrl.rollout import Rollouts
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.tools import LocalToolbox
from agentrl.workers import child_process

TOKENIZER = byte_tokenizer()


def outcomes_with_a_kill(keys, answer):
    """Play each row twice, and kill the processes of doors at the first turn of the last episode.

    Return the outcomes and the number of episodes that were played.
    """
    config = load_config(None, ["rollout.max_turns=20"], keys)
    samples = [*make_plan(config).train]
    played, killed = [], []

    def turn(prompt, number):
        if number == 0:
            played.append(prompt)
            if len(played) == 2 * len(samples) and not killed:
                killed.extend(child for child in child_process._children if child.running)
                for child in killed:
                    child.kill()
        return answer(samples, prompt, number)

    toolbox = LocalToolbox()
    runtime = Runtime(Scripted(turn, TOKENIZER), make_template(TOKENIZER, config), toolbox, config)
    with closing(Rollouts(runtime, Scorer(config.reward), seed=0)) as rollouts:
        groups = rollouts.collect(samples, n=2, sampling=Sampling(), step=0)
    assert killed
    return [s.reward for group in groups for s in group.scored], len(played)
