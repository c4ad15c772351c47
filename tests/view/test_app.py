"""The server of `agentrl view`: its numbers, and who may read them."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from base64 import b64decode
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image as PIL
from support.recorded import HOSTILE, SAMPLE, play, play_with_images, write_run

from agentrl import load_run
from agentrl.errors import DataError, UserError
from agentrl.images import Image
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group
from agentrl.view.app import (
    FILES,
    MAX_TEXT,
    PAGE,
    ViewServer,
    create_app,
    describe_tunnel,
    names_of,
)
from agentrl.view.query import find_episodes, parse_query
from agentrl.view.step import describe_step

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"
TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def client(folder):
    app = create_app([folder, OLD], "secret", frozenset({"127.0.0.1"}))
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/x/run"], ["run"]),
        (["/x/a", "/x/b"], ["a", "b"]),
        (["/x/a/out", "/x/b/out"], ["a/out", "b/out"]),
        (["/1/a/out", "/2/a/out", "/x"], ["1/a/out", "2/a/out", "/x"]),
    ],
)
def test_runs_have_names_that_differ(folders, names):
    assert names_of([*map(Path, folders)]) == names


def get(client, path, **params):
    answer = client.get(path, params=params, headers=TOKEN)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """The requests of a run whose messages have three images, one of which is no PNG."""
    folder = tmp_path_factory.mktemp("pictures")
    images = [Image.of(PIL.new("RGB", (56, 28), color)) for color in ("red", "blue")]
    images.append(Image(b"<svg xmlns='http://www.w3.org/2000/svg' onload='x()'/>"))
    scored = play_with_images(*images)
    TrajectoryStore(folder / "trajectories").write(1, [Group(scored.trajectory.sample, (scored,))])
    (folder / "trajectories/images/secret").write_text("secret")
    return TestClient(create_app([folder], "secret", frozenset())), images


def test_an_image_is_a_data_url_of_a_picture(pictures):
    client, images = pictures
    messages = get(client, "/api/runs/0/episode", id="seen")["messages"]
    assert [[i["key"] for i in m["images"]] for m in messages] == [
        [images[0].key], [], [images[1].key, images[2].key],
    ]  # fmt: skip
    assert messages[0]["images"][0]["text"] == f"[image 56x28 {images[0].key[:8]}]"
    for image in images[:2]:
        url = get(client, "/api/runs/0/image", key=image.key)["url"]
        head, _, data = url.partition(",")
        assert head == "data:image/png;base64" and b64decode(data) == image.data
    answer = client.get("/api/runs/0/image", params={"key": images[0].key})
    assert answer.status_code == 401


@pytest.mark.parametrize("key", ["secret", "../train-00000001.parquet", "0" * 64, "A" * 64, ""])
def test_only_images_are_sent(pictures, key):
    answer = pictures[0].get("/api/runs/0/image", params={"key": key}, headers=TOKEN)
    assert answer.status_code == 400
    assert re.search("not the name of an image|cannot be read: No such file", answer.text)


def test_a_file_that_is_no_picture_is_not_sent(pictures):
    client, images = pictures
    answer = client.get("/api/runs/0/image", params={"key": images[2].key}, headers=TOKEN)
    assert answer.status_code == 400 and "is none of PNG, JPEG" in answer.json()["message"]


def search(client, path, **params):
    """Return the rows of all lines of a search, and its last line."""
    answer = client.get(path, params=params, headers=TOKEN)
    assert answer.status_code == 200, answer.text
    *lines, last = map(json.loads, answer.text.splitlines())
    return [row for line in lines for row in line["rows"]], last


def test_the_numbers_are_those_of_load_run(client, folder):
    run = load_run(folder)
    assert get(client, "/api/runs/0/metrics") == run.metrics.to_pydict()
    assert get(client, "/api/runs/0/findings") == run.findings.to_pylist()
    found, last = search(client, "/api/runs/0/episodes", q="step=1", after=1, limit=2)
    rows = find_episodes(run, parse_query("step=1")).rows.to_pylist()
    assert found == rows[1:3] and last == {"total": 4, "choices": {}}
    [*_, last] = search(client, "/api/runs/0/episodes", q="tool=serch")
    assert last == {"total": 0, "choices": {"tool": ["search", "calc"]}}
    table = [row for row in run.tokens.to_pylist() if row["episode_id"] == "e2-0-1"]
    tokens = get(client, "/api/runs/0/tokens", id="e2-0-1")
    names = ("logprob", "advantage", "clipped", "entropy", "version")
    assert {n: tokens[n] for n in names} == {n: [row[n] for row in table] for n in names}
    assert tokens["advantage"] == [0.0, 2.0, None]
    part = get(client, "/api/runs/0/tokens", id="e2-0-1", **{"from": 1, "to": 2})
    assert part == {name: values[1:2] for name, values in tokens.items()}
    assert get(client, "/api/runs/0/gaps", step=2)[0]["position"] == 1


def test_a_stored_run_opens(client):
    row = search(client, "/api/runs/1/episodes", q="step=2 split=train")[0][-1]
    episode = get(client, "/api/runs/1/episode", id=row["episode"], step=2)
    assert (episode["reward"], episode["group"]) == (row["reward"], 1)
    [gap, *_] = get(client, "/api/runs/1/gaps", step=2)
    assert 0 < abs(gap["gap"]) < 1e-5 and gap["text"]
    step = get(client, "/api/runs/1/step", step=2)
    assert step["time"]["rollouts"] == 4 and 0 < step["time"]["seconds"] < 60
    assert row["episode"] in [r["episode"] for r in step["rollouts"]]


def test_a_run_without_what_was_learned_opens(tmp_path):
    folder = write_run(tmp_path)
    expected = describe_step(load_run(folder), 2)
    shutil.rmtree(folder / "learned")
    with TestClient(create_app([folder], "", frozenset())) as own:
        step = get(own, "/api/runs/0/step", step=2)
        assert step == expected and step["time"]["seconds"] == 3.0
        episode = get(own, "/api/runs/0/episode", id="e2-0-1")
        assert episode["turns"][0]["advantage"] is None and episode["spans"]
        tokens = get(own, "/api/runs/0/tokens", id="e2-0-1")
        assert tokens["advantage"] == [None] * 3 and tokens["logprob"] == [-0.5, -0.25, None]
        assert tokens["text"] == [None] * 3, "the run has no tokenizer"
        assert get(own, "/api/runs/0/gaps", step=2) == []


def test_a_search_stops_when_the_client_goes_away(tmp_path, monkeypatch):
    """A real client closes its connection to a real server while the search is under way."""
    store = TrajectoryStore(tmp_path / "trajectories")
    first = store.write(1, [Group(SAMPLE, (play(1, 0, 0, text="needle"),))])
    for step in range(2, 401):
        (store.folder / f"train-{step:08d}.parquet").symlink_to(first)
    searched: list[str] = []
    read_columns = TrajectoryStore.read_columns

    def read_slowly(self, path, names):
        if names == ["messages"]:
            searched.append(path.name)
            time.sleep(0.01)
        return read_columns(self, path, names)

    monkeypatch.setattr(TrajectoryStore, "read_columns", read_slowly)
    server = ViewServer([tmp_path], "127.0.0.1", 0, "secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.port}/api/runs/0/episodes"
        with httpx.stream("GET", url, params={"q": "needle"}, headers=TOKEN) as answer:
            line = json.loads(next(answer.iter_lines()))
            assert len(line["rows"]) == 1 and line["files"] == 400 > line["searched"]
        deadline = time.monotonic() + 5
        count = -1
        while count != len(searched):  # until no file follows for a tenth of a second
            assert time.monotonic() < deadline
            count = len(searched)
            time.sleep(0.1)
        assert 0 < count < 200
        rows = httpx.get(url, params={"q": "needle"}, headers=TOKEN).text.splitlines()
        assert json.loads(rows[-1])["total"] == 400 and len(searched) == count + 400
    finally:
        server.should_exit = True
        thread.join(10)


def test_a_damaged_file_ends_a_search_with_its_name(tmp_path):
    folder = write_run(tmp_path)
    (folder / "trajectories/train-00000002.parquet").write_bytes(b"PAR1")
    with TestClient(create_app([folder], "", frozenset())) as own:
        rows, last = search(own, "/api/runs/0/episodes", q="step>0")
        assert len(rows) == 4 and "train-00000002.parquet is not a readable file" in last["message"]


def test_a_long_message_is_cut_until_it_is_asked_for(client, folder, tmp_path):
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
    assert len(paths) == 12
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
    script = "".join(file.read_text() for file in PAGE.glob("*.js"))
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
