"""What the gateway costs: CPU time per request, and how many agents it serves at the same time.

    python benchmarks/gateway.py

One JSON object per line: name, value, unit, context. The engine answers at once, so the figures are
those of HTTP, JSON, matching and tokens.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from workload.timing import print_figure

from agentrl.agent_loops import Episode, agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play_episode
from agentrl.config import AgentConfig, Config, RolloutConfig
from agentrl.engine.base import Sampling
from agentrl.engine.scripted import Scripted
from agentrl.gateway.serve import Gateway
from agentrl.gateway.session import Session
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

CALLS = 30
"""The measured requests of an episode."""
CALL = call("calc", expression="3*4")
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
AGENT = """
import json, os, urllib.request

messages = json.loads(os.environ["AGENTRL_SAMPLE"])["prompt"]
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(8):
    body = json.dumps({"messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
"""
TOKENIZER = byte_tokenizer()


class Script(Scripted):
    """Answers at once, whatever the length of the prompt."""

    def _text(self, episode_id: str, prompt_ids: Any, turn: int) -> str:
        return CALL


def make_runtime(**agent: Any) -> Runtime:
    rollout = RolloutConfig(max_turns=10**6, max_tool_calls=10**6, max_trajectory_tokens=10**7)
    config = Config(agent=AgentConfig(**agent), rollout=rollout)
    engine = Script([], TOKENIZER, max_length=10**7)
    return Runtime(engine, make_template(TOKENIZER, config), LocalToolbox(), config)


async def play(runtime: Runtime, loop: str, number: int) -> None:
    sample = Sample(str(number), (Message("user", "How much?"),), agent_name=loop)
    runtime.sampler.begin(f"e{number}")
    await play_episode(
        runtime, sample, episode_id=f"e{number}", rollout=0, sampling=Sampling(), seed=0
    )


async def measure_history(tokens: int) -> None:
    """Measure requests whose history has about so many tokens (one for each byte)."""
    runtime, gateway = make_runtime(), Gateway()
    seconds: list[float] = []
    lengths: list[int] = []

    @agent_loop(f"history_{tokens}")
    async def loop(ep: Episode) -> None:
        session = Session(ep)
        turns = max(tokens // 1000 - CALLS, 0)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 200}]
        async with gateway.session(session) as (url, key):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
                for i in range(turns + CALLS):
                    body = json.dumps({"messages": messages, "tools": [TOOL]}).encode()
                    begin = time.process_time()
                    response = await client.post("/chat/completions", content=body)
                    used = time.process_time() - begin
                    if i >= turns:
                        seconds.append(used)
                        lengths.append(response.json()["usage"]["prompt_tokens"])
                    message = response.json()["choices"][0]["message"]
                    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
                    messages += [message, result | {"content": "y" * 900}]
        await session.close()

    await play(runtime, f"history_{tokens}", 0)
    print_figure(
        "gateway_call_cpu",
        round(statistics.median(seconds) * 1e3, 3),
        "ms",
        tokens=round(statistics.mean(lengths)),
        calls=len(seconds),
        includes="the client",
    )


async def measure_agents(number: int, **agent: Any) -> None:
    """Measure so many agents at the same time, of 8 requests each."""
    runtime = make_runtime(slots=number, **agent)
    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(play(runtime, "external", i) for i in range(number)))
    kind = "functions" if "python" in agent else "processes"
    print_figure(
        f"gateway_{kind}",
        round(number * 8 / (time.perf_counter() - begin), 1),
        "requests/s",
        agents=number,
        requests=8,
        cpu_s=round(time.process_time() - cpu, 2),
    )


FUNCTION = """
import httpx

async def run(sample, base_url, api_key):
    messages = sample["prompt"]
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, verify=False) as client:
        for _ in range(8):
            answer = await client.post(base_url + "/chat/completions", json={"messages": messages})
            message = answer.json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "Go on."}]
"""


def main() -> None:
    for tokens in (8_000, 128_000):
        asyncio.run(measure_history(tokens))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "function.py").write_text(FUNCTION)
        (Path(folder) / "agent.py").write_text(AGENT)
        asyncio.run(measure_agents(256, python=f"{folder}/function.py:run"))
        asyncio.run(measure_agents(16, command=f"{sys.executable} {folder}/agent.py"))


if __name__ == "__main__":
    main()
