"""An OpenAI-style API whose model is the policy, so that existing agents can be trained.

requests.py       requests of clients and answers to them
dialects/         translate them from and to the JSON of an API, one file each
session.py        matches the requests of an episode with the turns that the policy sampled
memory.py         the answers of a session that later requests name by their ids
output_format.py  the JSON schema that a client wants an answer to match
stateless.py      answers requests without an episode, for `agentrl serve`
serve.py          the HTTP server
agent.py          the agent loop `external`, which runs the user's agent
check.py          `agentrl check agent`: plays an agent against a scripted policy
served.py         compares what `agentrl serve` answers with episodes of an evaluation
"""
