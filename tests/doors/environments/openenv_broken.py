"""A server of OpenEnv's protocol whose answers to a step are broken: `python THIS.py PORT`."""

import json
import sys

import uvicorn
from fastapi import FastAPI, WebSocket

ANSWERS = (
    "no JSON",
    "[]",
    "{}",
    '{"type": "observation", "data": null}',
    '{"type": "observation", "data": {"observation": null, "reward": 1.0}}',
    '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": "high"}}',
    '{"type": "error", "data": null}',
)
app = FastAPI()


@app.get("/schema")
def schema():
    return {"action": {"type": "object", "properties": {"number": {"type": "integer"}}}}


@app.get("/health")
def health():
    return {}


@app.websocket("/ws")
async def session(socket: WebSocket):
    await socket.accept()
    async for text in socket.iter_text():
        message = json.loads(text)
        if message["type"] == "step":
            await socket.send_text(ANSWERS[message["data"]["number"]])
        else:
            data = {"observation": {"text": "Go."}, "reward": None, "done": False}
            await socket.send_json({"type": "observation", "data": data})


uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
