"""An environment in another program, in plain FastAPI (docs/environments.md).

    uvicorn environment_server:app --port 9000
    agentrl check --dataset rows.jsonl --model tiny 'environments={number: "http://127.0.0.1:9000"}'

A row: {"prompt": "Guess.", "environment": "number", "environment_kwargs": {"secret": 7}}

The requests, and their answers:

- GET /tools: {tools: [...]}, the environments, each with `name`, `schemas`, `timeout`, `stateful`,
  and in `environment` which of `respond` and `reward` it has
- POST /sessions {episode_id, sample, create_kwargs}: {opening, tools}, the messages of `start` and
  the names of the functions
- POST /sessions/{id}/calls {turn, call_index, name, arguments}: {content, ok}
- POST /sessions/{id}/respond {turn, messages}: {content, score, done}, or null
- POST /sessions/{id}/reward {messages}: {reward}, and optionally `parts` (metrics) and `turns` as
  in `Scores`
- DELETE /sessions/{id}: {reward: 0}

A request that arrives twice, because a connection broke, must get the first answer again. The key
of a call is (turn, call_index), that of a reply is the turn; an episode has one reward. Errors are
{error, message} with a status of 400 or more. With the variable AGENTRL_TOOLS_TOKEN, requests have
its value as a bearer token.
"""

from fastapi import FastAPI, HTTPException

app = FastAPI()
sessions = {}
PROPERTIES = {"number": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["number"]}
GUESS = {"name": "guess", "description": "Guess the number.", "parameters": PARAMETERS}


class Session:
    def __init__(self, secret):
        self.secret, self.found, self.answers = secret, False, {}

    def once(self, key, answer):
        """Return the first answer again if a request arrives twice."""
        if key not in self.answers:
            self.answers[key] = answer()
        return self.answers[key]

    def guess(self, number):
        self.found = self.found or number == self.secret
        hint = "Higher." if number < self.secret else "Lower."
        return {"content": "Right!" if self.found else hint}

    def respond(self):
        return {"content": "Use the tool.", "score": -0.1, "done": self.found}


def session(episode_id):
    if episode_id not in sessions:
        raise HTTPException(404, "no such session")
    return sessions[episode_id]


@app.get("/tools")
async def tools():
    return {
        "tools": [
            {
                "name": "number",
                "schemas": [{"type": "function", "function": GUESS}],
                "timeout": 30.0,
                "stateful": True,
                "environment": ["respond", "reward"],
            }
        ]
    }


@app.post("/sessions")
async def start(body: dict):
    secret = body["create_kwargs"]["number"]["secret"]
    sessions.setdefault(body["episode_id"], Session(secret))
    return {"opening": [{"role": "user", "content": "From 1 to 9."}], "tools": ["guess"]}


@app.post("/sessions/{episode_id}/calls")
async def call(episode_id: str, body: dict):
    own, key = session(episode_id), (body["turn"], body["call_index"])
    return own.once(key, lambda: own.guess(body["arguments"]["number"]))


@app.post("/sessions/{episode_id}/respond")
async def respond(episode_id: str, body: dict):
    own = session(episode_id)
    return own.once(body["turn"], own.respond)


@app.post("/sessions/{episode_id}/reward")
async def reward(episode_id: str):
    return {"reward": float(session(episode_id).found)}


@app.delete("/sessions/{episode_id}")
async def close(episode_id: str):
    sessions.pop(episode_id, None)
    return {"reward": 0.0}
