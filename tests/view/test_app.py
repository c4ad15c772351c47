"""The server of `agentrl view`: its numbers, and who may read them."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from support.recorded import HOSTILE, write_run

from agentrl import load_run
from agentrl.errors import DataError, UserError
from agentrl.view.app import FILES, MAX_TEXT, PAGE, ViewServer, create_app, describe_tunnel
from agentrl.view.query import find_episodes, parse_query

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"
TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def client(folder):
    app = create_app([folder, OLD], "secret", frozenset({"127.0.0.1"}))
    return TestClient(app, base_url="http://127.0.0.1")


def get(client, path, **params):
    answer = client.get(path, params=params, headers=TOKEN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_numbers_are_those_of_load_run(client, folder):
    run = load_run(folder)
    assert get(client, "/api/runs/0/metrics") == run.metrics.to_pydict()
    assert get(client, "/api/runs/0/findings") == run.findings.to_pylist()
    found = get(client, "/api/runs/0/episodes", q="step=1", after=1, limit=2)
    rows = find_episodes(run, parse_query("step=1")).rows.to_pylist()
    assert found["rows"] == rows[1:3] and found["total"] == 4
    table = [row for row in run.tokens.to_pylist() if row["episode_id"] == "e2-0-1"]
    tokens = get(client, "/api/runs/0/tokens", id="e2-0-1")
    names = ("position", "logprob", "advantage", "clipped", "entropy", "version")
    assert [[t[n] for n in names] for t in tokens] == [[t[n] for n in names] for t in table]
    assert tokens[0]["advantage"] == 0.0 and tokens[2]["advantage"] is None
    assert get(client, "/api/runs/0/tokens", id="e2-0-1", **{"from": 1, "to": 2}) == tokens[1:2]
    assert get(client, "/api/runs/0/gaps", step=2)[0]["position"] == 1


def test_an_old_run_opens(client):
    [*_, row] = get(client, "/api/runs/1/episodes")["rows"]
    episode = get(client, "/api/runs/1/episode", id=row["episode"], step=row["step"])
    assert episode["reward"] == row["reward"] and episode["group"] is None
    assert get(client, "/api/runs/1/gaps", step=row["step"]) == []


def test_a_long_message_is_cut_until_it_is_asked_for(client, folder, tmp_path):
    from support.recorded import play

    from agentrl.store import TrajectoryStore
    from agentrl.trajectory import Group

    long = play(1, 0, 0, text=HOSTILE * (10**7 // len(HOSTILE)))
    TrajectoryStore(tmp_path / "trajectories").write(1, [Group(long.trajectory.sample, (long,))])
    app = create_app([tmp_path], "secret", frozenset())
    with TestClient(app) as own:
        message = get(own, "/api/runs/0/episode", id="e1-0-0")["messages"][1]
        assert len(message["content"]) == MAX_TEXT and message["length"] > 9 * 10**6
        whole = get(own, "/api/runs/0/message", id="e1-0-0", index=1)["content"]
        assert whole == long.trajectory.messages[1].content


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({**TOKEN, "origin": "https://example.com"}, 403),
        ({**TOKEN, "host": "example.com"}, 403),
        (TOKEN, 200),
    ],
)
def test_who_may_read(client, headers, status):
    paths = [route.path for route in client.app.routes if route.path.startswith("/api")]
    assert len(paths) == 9
    for path in paths:
        answer = client.get(path.replace("{r}", "0"), headers=headers)
        assert answer.status_code in ((status,) if status != 200 else (200, 422))
        assert "e1-0-0" not in answer.text or status == 200


def test_the_page_has_no_data_and_forbids_other_scripts(client):
    for path in FILES:
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy and "unsafe" not in policy
    script = (PAGE / "view.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_mistakes_are_answered(client):
    for path, text in [
        ("/api/runs/0/episodes?q=foo=1", "unknown field 'foo'"),
        ("/api/runs/7/metrics", "there is no run 7; there are 2"),
        ("/api/runs/7/episode?id=x", "there is no run 7"),
        ("/api/runs/0/episode?id=../../etc/passwd", "there is no episode '../../etc/passwd'"),
        ("/api/runs/0/message?id=v2&index=9", "has 3 messages"),
    ]:
        answer = client.get(path, headers=TOKEN)
        assert answer.status_code == 400 and text in answer.json()["message"]
    assert client.get("/..%2f..%2fetc/passwd", headers=TOKEN).status_code == 404


def test_the_server(folder, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="is not the folder of a run"):
        ViewServer([tmp_path], "127.0.0.1", 0, "t")
    with pytest.raises(UserError, match="letters, digits, - and _ only"):
        ViewServer([folder], "127.0.0.1", 0, "a token")
    monkeypatch.setenv("SSH_CONNECTION", "1")
    assert re.fullmatch(r"ssh -L 8:127\.0\.0\.1:8 \S+@\S+", describe_tunnel(8))
    monkeypatch.delenv("SSH_CONNECTION")
    assert describe_tunnel(8) == ""
    server = ViewServer([folder], "127.0.0.1", 0, "secret")
    assert server.address == f"http://127.0.0.1:{server.port}/#token=secret"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
