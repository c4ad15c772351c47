"""What the gateway costs: CPU time per request, and how many agents it serves at the same time.

    python benchmarks/gateway.py                    # all cases: a minute
    python benchmarks/gateway.py cpu_8k             # some of them
    python benchmarks/gateway.py cpu_8k --profile   # where the time goes

One JSON object per line: name, value, unit, context. The engine answers at once, so the figures are
those of HTTP, JSON, matching, tokens and parsing. For `cpu_...` and `responses_8k` the agent is a
process of its own, which is not included: the figure is the CPU time of the process that serves it,
from one request that reaches the engine to the next. It includes what every agent loop does for a
turn: encoding the tool's result, decoding and parsing the turn. Other processes on the same cores
make it larger; `p10_ms` is the figure of the least disturbed tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from workload.conversations import SYSTEM, Talk, passages, wide
from workload.prepared import Prepared
from workload.timing import print_figure
from workload.tokenizer import workload_tokenizer

from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play_episode
from agentrl.chat import ChatTemplate
from agentrl.config import AgentConfig, Config, RolloutConfig
from agentrl.engine.base import Sampling
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Generation, Message, Sample

SPREAD = 1 / 8
"""The measured requests have a history of so many tokens, give or take this share."""
REQUESTS = 8
"""The requests of an agent in the cases with many agents."""
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class History:
    """A case with a long history.

    Attributes:
        tokens: the tokens of the prompts that are measured.
        result_tokens: about the number of tokens of a tool's result.
        episodes: the number of episodes.
        dialect: the API of the agent, a key of `AGENTS`.
    """

    tokens: int
    result_tokens: int
    episodes: int
    dialect: str = "chat_completions"


HISTORIES = {
    "cpu_8k": History(8_000, 300, 16),
    "cpu_8k_messages": History(8_000, 300, 16, "messages"),
    "cpu_8k_responses": History(8_000, 300, 16, "responses"),
    "cpu_128k": History(128_000, 900, 2),
    "cpu_128k_messages": History(128_000, 900, 2, "messages"),
}
HEAD = """
import http.client, json, os, sys, urllib.parse

results, tool = json.load(open(sys.argv[1]))
messages = json.loads(os.environ["AGENTRL_SAMPLE"])["prompt"]
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port)
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
function = tool["function"]

def post(path, **body):
    body = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    connection.request("POST", url.path + path, body, headers)
    return json.load(connection.getresponse())
"""
CHAT_AGENT = """
for result in results:
    answer = post("/chat/completions", model="policy", messages=messages, tools=[tool])
    message = answer["choices"][0]["message"]
    messages.append(message)
    for call in message["tool_calls"]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
"""
RESPONSES_AGENT = """
tool = {"type": "function", **function}
for result in results:
    output = post("/responses", model="policy", input=messages, tools=[tool])["output"]
    messages += output
    for item in output:
        if item["type"] == "function_call":
            call = {"call_id": item["call_id"], "output": result}
            messages.append({"type": "function_call_output", **call})
"""
MESSAGES_AGENT = """
tool = {"name": function["name"], "description": function["description"],
        "input_schema": function["parameters"]}
system = [{"type": "text", "text": messages.pop(0)["content"]}]
for result in results:
    answer = post("/messages", model="policy", max_tokens=10000, system=system, tools=[tool],
                  messages=messages)
    messages.append({"role": "assistant", "content": answer["content"]})
    messages.append({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": block["id"], "content": result}
        for block in answer["content"] if block["type"] == "tool_use"]})
"""
AGENTS = {
    "chat_completions": HEAD + CHAT_AGENT,
    "responses": HEAD + RESPONSES_AGENT,
    "messages": HEAD + MESSAGES_AGENT,
}
FUNCTION = """
import asyncio, json
import httpx

async def run(sample, base_url, api_key):
    results, tool = json.load(open({file!r}))
    messages = sample["prompt"]
    headers = {{"authorization": f"Bearer {{api_key}}"}}
    async with httpx.AsyncClient(headers=headers, timeout=60, verify=False) as client:
        for result in results:
            body = {{"model": "policy", "messages": messages, "tools": [tool]}}
            answer = await client.post(base_url + "/chat/completions", json=body)
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            for call in message["tool_calls"]:
                messages.append(dict(role="tool", tool_call_id=call["id"], content=result))
"""


class Clocked(Prepared):
    """Returns the turns of one conversation at once, to each episode from the beginning.

    Attributes:
        calls: for each request the CPU seconds of this process, and the tokens of the prompt.
    """

    is_concurrent = True

    def __init__(self, talk: Talk):
        super().__init__(lambda _: talk)
        self.calls: list[tuple[float, int]] = []

    async def generate(self, prompt_ids: array[int], *args: Any, **kwargs: Any) -> Generation:
        self.calls.append((time.process_time(), len(prompt_ids)))
        return await super().generate(prompt_ids, *args, **kwargs)


async def play(
    engine: Clocked, template: ChatTemplate, talk: Talk, number: int, **agent: Any
) -> float:
    """Play so many episodes of an agent at once; return the seconds that they took."""
    rollout = RolloutConfig(max_turns=10**6, max_tool_calls=10**6, max_trajectory_tokens=10**7)
    config = Config(agent=AgentConfig(slots=number, **agent), rollout=rollout)
    runtime = Runtime(engine, template, LocalToolbox(), config)
    prompt = Message("system", SYSTEM), talk.prompt[1]
    sample = Sample("s", prompt, agent_name="external")
    begin = time.perf_counter()
    for i in range(number):
        engine.begin(f"e{i}")
    await asyncio.gather(
        *(
            play_episode(
                runtime, sample, episode_id=f"e{i}", rollout=i, sampling=Sampling(), seed=0
            )
            for i in range(number)
        )
    )
    return time.perf_counter() - begin


def write_agent(
    folder: Path, results: Sequence[str], dialect: str = "chat_completions"
) -> dict[str, str]:
    """Write the agents, a process and a function; return `agent.command` and `agent.python`."""
    (folder / "talk.json").write_text(json.dumps([results, TOOL]))
    (folder / "agent.py").write_text(AGENTS[dialect])
    (folder / "function.py").write_text(FUNCTION.format(file=str(folder / "talk.json")))
    command = f"{sys.executable} {folder}/agent.py {folder}/talk.json"
    return {"processes": command, "functions": f"{folder}/function.py:run"}


async def measure_history(name: str, case: History, template: ChatTemplate, profile: bool) -> None:
    """Measure requests with a long history."""
    used: list[float] = []
    lengths: list[int] = []
    texts, profiler = passages(), cProfile.Profile()
    low, high = case.tokens * (1 - SPREAD), case.tokens * (1 + SPREAD)
    for episode in range(1 + case.episodes):
        turns = round(high / (case.result_tokens + 90))
        (talk,) = wide(template.tokenizer, turns, case.result_tokens, 1, texts)
        engine = Clocked(talk)
        with tempfile.TemporaryDirectory() as folder:
            command = write_agent(Path(folder), talk.results, case.dialect)["processes"]
            if profile and episode:
                profiler.enable()
            await play(engine, template, talk, 1, command=command)
            profiler.disable()
        for (begin, _), (end, length) in zip(engine.calls, engine.calls[1:], strict=False):
            if episode and low <= length <= high:  # The first one fills caches.
                used.append(end - begin)
                lengths.append(length)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    deciles = statistics.quantiles(used, n=10)
    print_figure(
        f"gateway/{name}",
        round(statistics.median(used) * 1e3, 3),
        "ms",
        tokens=round(statistics.median(lengths)),
        p10_ms=round(deciles[0] * 1e3, 3),
        p90_ms=round(deciles[-1] * 1e3, 3),
        calls=len(used),
        result_tokens=case.result_tokens,
        includes="the whole process without the client",
    )


async def measure_agents(template: ChatTemplate, kind: str, number: int) -> None:
    """Measure so many agents at the same time, of 8 requests each."""
    (talk,) = wide(template.tokenizer, REQUESTS, 100, 1, passages())
    with tempfile.TemporaryDirectory() as folder:
        agents, cpu = write_agent(Path(folder), talk.results), time.process_time()
        key = "python" if kind == "functions" else "command"
        seconds = await play(Clocked(talk), template, talk, number, **{key: agents[kind]})
    print_figure(
        f"gateway/{kind}",
        round(number * REQUESTS / seconds, 1),
        "requests/s",
        agents=number,
        requests=REQUESTS,
        cpu_s=round(time.process_time() - cpu, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cases = (*HISTORIES, "functions", "processes")
    parser.add_argument("cases", nargs="*", help=", ".join(cases))
    parser.add_argument("--profile", action="store_true", help="show the slowest functions")
    args = parser.parse_args()
    template = ChatTemplate(workload_tokenizer())
    gc.collect()
    gc.freeze()  # as in a run
    for name in args.cases or cases:
        # Each case has its own event loop, because `agent.slots` applies to a whole loop.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if name in HISTORIES:
                runner.run(measure_history(name, HISTORIES[name], template, args.profile))
            else:
                number = 256 if name == "functions" else 16
                runner.run(measure_agents(template, name, number))


if __name__ == "__main__":
    main()
