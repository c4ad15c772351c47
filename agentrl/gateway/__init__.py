"""An OpenAI-style API whose model is the policy, so that existing agents can be trained.

requests.py   requests of clients and answers to them
dialects.py   translates them from and to the JSON of an API
session.py    matches the requests of an episode with the turns that the policy sampled
stateless.py  answers requests without an episode, for `agentrl serve`
serve.py      the HTTP server
agent.py      the agent loop `external`, which runs the user's agent
check.py      `agentrl check agent`: plays an agent against a scripted policy
"""
