"""Plays rollouts with an engine and tools over HTTP, in a process whose limits its parent set.

`python rollouts_over_http.py FOLDER PROMPTS N SECONDS TIMEOUT` plays N rollouts of each of PROMPTS
prompts, with turns of SECONDS seconds and episodes of at most TIMEOUT seconds. It prints one line
of JSON: counts of rollouts, errors and sockets.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from support.small_sglang import small_sglang

import agentrl.agent_loops
import agentrl.rewards  # noqa: F401  (registers what rows name)
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.base import Sampling
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.http import fetch_json
from agentrl.registry import load_file
from agentrl.rewards import Scorer
from agentrl.rollout import open_rollouts
from agentrl.store import TrajectoryStore
from agentrl.testing import byte_tokenizer, call
from agentrl.trajectory import Message, Sample


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    folder, prompts, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seconds, timeout = float(sys.argv[4]), float(sys.argv[5])
    load_file("shelf:calculator")
    template = ChatTemplate(byte_tokenizer())
    end = template.stop_ids[0]
    texts = [call("calculator", expression="3*4"), "#### 12"]
    turns = [[*template.encode(text), end] for text in texts]
    config = Config.model_validate(
        {"files": ["shelf:calculator"], "rollout": {"timeout_s": timeout}}
    )
    question = (Message("user", "How much is 3*4?"),)
    samples = [
        Sample(f"r{i}", question, data_source="openai/gsm8k", ground_truth="12",
               agent_name="tool_agent", tools=("calculator",), row=i)
        for i in range(prompts)
    ]  # fmt: skip
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.01):
            most = max(most, open_now())

    scorer = Scorer(config.reward)
    with small_sglang(turns, seconds) as url:
        engine = SGLangEngine(url, vocabulary=len(template.tokenizer))
        with open_rollouts(config, engine, template, scorer) as rollouts:
            threading.Thread(target=watch, daemon=True).start()
            began = time.monotonic()
            groups = rollouts.collect(samples, n=n, sampling=Sampling(), step=0)
            took = time.monotonic() - began
            TrajectoryStore(folder).write(1, groups)
            _, served = fetch_json(url, "/requests", timeout=5)
        over.set()
    scored = [s for group in groups for s in group.scored]
    print(
        json.dumps(
            {
                "rollouts": len(scored),
                "dropped": sum(group.dropped for group in groups),
                "rewards": sum(s.reward for s in scored),
                "stops": Counter(s.trajectory.stop_reason for s in scored),
                "tries": Counter(s.trajectory.episode_id.partition("+")[2] for s in scored),
                "stored": sum(1 for _ in TrajectoryStore(folder).read()),
                "seconds": took,
                "open at most": most,
                "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
                "turns at once": served["most"],
                "turns": served["turns"],
            }
        )
    )


if __name__ == "__main__":
    main()
