"""An OpenAI-style API whose model is the policy, so that existing agents can be trained.

requests.py   what a client asks and is answered
session.py    the conversations of an episode: what the policy sampled, what it did not
dialects.py   the JSON of APIs
serve.py      the HTTP server
agent.py      the agent loop `external`, which runs the user's agent
"""
