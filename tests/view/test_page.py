"""The page in a browser: what it shows, and that hostile texts stay texts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image as PIL
from support.browser import Browser
from support.needs import needs_browser
from support.recorded import play, play_with_images, write_run

from agentrl import load_run
from agentrl.cli import main
from agentrl.images import Image
from agentrl.report import Finding, diagnosis
from agentrl.report.run import diagnoses
from agentrl.store import TrajectoryStore
from agentrl.trajectory import Group, Message, Scored, Segment, float_array, token_array
from agentrl.view.app import ViewServer

pytestmark = [pytest.mark.browser, needs_browser]
OLD = Path(__file__).parent.parent / "fixtures/old_run/run"


def late_search(run):
    """Cite the first turn of an episode, and another one as a whole."""
    if "first" in run.folder.name:
        yield Finding(2, "a search is late", {}, ("e1-0-0", "e1-0-1"), turns=(0, None))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = [write_run(tmp_path_factory.mktemp(name)) for name in ("first", "second")]
    return [*made, write_sub_agent(tmp_path_factory.mktemp("third")), OLD,
            write_pictures(tmp_path_factory.mktemp("pictures"))]  # fmt: skip


def write_pictures(folder: Path) -> Path:
    """Write a run of an episode with a wide picture and a file that begins as a PNG and is none."""
    wide, other = Image.of(PIL.new("RGB", (2800, 28))), Image(b"\x89PNG\r\n\x1a\n no more")
    scored = play_with_images(wide, wide, other)
    TrajectoryStore(folder / "trajectories").write(2, [Group(scored.trajectory.sample, (scored,))])
    return folder


def write_sub_agent(folder: Path) -> Path:
    """Write a run of one episode, whose turn 1 is that of a sub-agent in a segment of its own."""
    played = play(1, 0, 0).trajectory
    [turn], [segment] = played.turns, played.segments
    question, answer, _ = played.messages
    own = Segment(
        segment.prompt_ids,
        token_array([1, 2, 3, 4, 5]),
        token_array([1, 1, 0, 1, 1]),
        float_array([-0.5, -0.25, 0.0, -1.0, -2.0]),
        token_array([0, 0, -1, 0, 1]),
    )
    turns = (turn, replace(turn, segment=1, thread=1, message_index=3),
             replace(turn, start=3, end=5, message_index=4))  # fmt: skip
    messages = (question, answer, Message("user", "a part"), answer, answer)
    trajectory = replace(played, segments=(own, segment), turns=turns, messages=messages)
    scored = Scored(trajectory, {"outcome": 1.0}, 1.0)
    store = TrajectoryStore(folder / "trajectories")
    store.write(1, [Group(trajectory.sample, (scored,))])
    return folder


@pytest.fixture(scope="module")
def page(folders, tmp_path_factory):
    server = ViewServer(folders, "127.0.0.1", 0, "secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    with diagnoses.isolated(keep=[]):
        diagnosis("late_search")(late_search)
        thread.start()
        browser = Browser(tmp_path_factory.mktemp("profile"))
        browser.send("Page.navigate", url=server.address)
        browser.wait("document.body && document.body.dataset.ready === 'yes'")
        yield browser
        browser.close()
        server.should_exit = True
        thread.join(10)


def visit(page: Browser, address: str) -> str:
    """Open a page by its address and return its text."""
    page.run(
        f"document.body.dataset.ready = ''; location.hash === {address!r}"
        f" ? draw() : location.hash = {address!r}; 0"
    )
    page.wait("document.body.dataset.ready === 'yes'")
    return page.run("document.getElementById('main').innerText")


def use_colors(page: Browser, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.send("Emulation.setEmulatedMedia", features=[feature])


def press(page: Browser, key: str) -> None:
    """Press a key as a user does: the browser moves the focus, scrolls and follows links."""
    codes = {"Tab": 9, "Enter": 13, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39}
    event = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
    text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
    page.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
    page.send("Input.dispatchKeyEvent", type="keyUp", **event)


PAGES = (
    "#/?",
    "#/?by=tool",
    "#/run/0?q=calls%3E0",
    "#/run/0/step/2",
    "#/run/0/episode?id=e2-0-1",
    "#/run/0/episode?id=e2-0-1&layout=table",
    "#/run/0/episode?id=..%2F..%2Fx",
    "#/run/2/episode?id=e1-0-0",
    "#/run/3/step/1",
    "#/run/4/episode?id=seen",
)


def test_turns_segments_and_sub_agents_have_borders(page):
    visit(page, "#/run/2/episode?id=e1-0-0&color=version")
    turns = "[...document.querySelectorAll('#tokens .turn')].map(t => t.innerText)"
    assert page.run(turns) == ["turn 0", "not sampled", "turn 2"]
    segments = page.run("document.querySelector('.segments').innerText")
    assert segments.splitlines() == [
        "segment 0: turns 0 to 2, 5 tokens",
        "segment 1: turn 1, 3 tokens, sub-agent (conversation 1)",
    ]
    visit(page, "#/run/2/episode?id=e1-0-0&segment=1")
    assert page.run(turns) == ["turn 1, conversation 1", "not sampled"]
    others = "[...document.querySelectorAll('article.other h3')].map(h => h.innerText)"
    [other] = page.run(others)
    assert "turn 1" in other and "sub-agent, conversation 1" in other


def test_the_run_page_shows_curves_and_findings(page, folders):
    text = visit(page, "#/?")
    assert "5 runs" in text and "critic/score/mean" in text
    assert "0.75 ± 0.25, n = 2 last steps" in text
    # The only alarm marks the step at which it begins in each chart.
    assert "a search is late" in text and "e1-0-0, turn 0" in text
    assert page.run("document.querySelectorAll('.mark title')[0].textContent").startswith("step 2:")
    # Of step 2, two rollouts of one row: their mean, and n. One row has no standard error.
    rollouts = load_run(folders[0]).behaviour.to_pylist()
    rewards = [r["reward"] for r in rollouts if (r["step"], r["split"]) == (2, "train")]
    assert rewards == [1.0, 1.0]
    assert f"{folders[0].name}: step 2: 1, n = 2 of 1 row" in text
    by_tool = visit(page, "#/?by=tool")
    assert "calc: step 2: 0.5, n = 2 of 1 row" in by_tool and "seconds of a call" in by_tool
    assert f"{folders[0].name} · tool_agent: step 2" in visit(page, "#/?by=agent")


def test_questions_are_answered(page):
    # Which rollout of group 1 called no tool, and which one timed out?
    assert "2 episodes" in visit(page, "#/run/0?q=step%3D1 group%3D1 calls%3D0")
    timed_out = visit(page, "#/run/0?q=tool%3Dsearch error%3Dtimeout")
    assert "e1-0-0" in timed_out and "e1-0-1" not in timed_out
    assert "tool is one of: search, calc" in visit(page, "#/run/0?q=tool%3Dserch")
    step = visit(page, "#/run/0/step/2")
    # Which token had the largest gap? Which call was slowest? What was dropped, and why?
    assert "-1 nats: token 1 of e2-0-1" in step
    assert "500 ms: calc, turn 0 of e2-0-1" in step
    assert "1 rollout dropped after an error: EngineError: http://engine is down" in step
    assert "Findings that begin here" in step and "a search is late" in step
    # What waited for what? Rollout 1 starts a second after rollout 0 and ends a second after it.
    assert "The rollouts took 3 s. The last 1 rollout of 2 (5 %) kept the step waiting" in step
    assert "waiting for 1 s after all others had ended" in step
    assert "group 0, rollout 1 ended at 3 s, meanwhile: generate 500 ms, tools 500 ms" in step
    widths = page.run(
        "[...document.querySelectorAll('.bar')].map(b => [...b.children]"
        ".map(s => [s.className, s.style.left, s.style.width]))"
    )
    assert widths[0][0] == ["span-queue", "33.3333%", "16.6667%"]
    assert widths[1][1] == ["span-generate", "16.6667%", "33.3333%"]
    calls = visit(page, "#/run/0/episode?id=e1-0-0")
    assert "timeout, 500 ms" in calls and "advantage ?" in calls


LOADED = "[...document.querySelectorAll('article img')].slice(0, 2).every(i => i.naturalWidth)"


def check_pictures(page: Browser) -> None:
    """The wide picture is at its places, at a width that fits; the other one is its description."""
    page.wait(LOADED)
    text = page.run("document.getElementById('main').innerText")
    assert "How many in" in text and "cut:" in text and "\ufffc" not in text
    images = page.run(
        "[...document.querySelectorAll('article img')].map(i => [i.alt, i.naturalWidth])"
    )
    assert [width for _, width in images] == [2800, 2800, 0]
    assert images[0][0].startswith("[image 2800x28 ") and images[2][0].startswith("[image ")
    assert page.run(
        "[...document.querySelectorAll('article img')].every(i =>"
        " i.clientWidth <= i.parentElement.clientWidth && i.src.startsWith('data:image/png;'))"
    )


def test_messages_show_their_images(page):
    visit(page, "#/run/4/episode?id=seen")
    check_pictures(page)
    places = (
        "[...document.querySelectorAll('article pre')]"
        ".map(p => [...p.childNodes].map(n => n.nodeName))"
    )
    assert page.run(places) == [
        ["#text", "IMG", "#text"],
        ["#text"],
        ["#text", "IMG", "#text", "IMG", "#text"],
    ]
    assert not page.errors


def test_a_finding_is_at_the_turn_that_it_cites(page):
    visit(page, "#/run/0/episode?id=e1-0-0")
    where = "document.querySelector('article.assistant article.finding').innerText"
    assert "a search is late" in page.run(where)
    visit(page, "#/run/0/episode?id=e1-0-1")
    assert page.run("document.querySelector('article.assistant article.finding')") is None
    assert "a search is late" in page.run("document.querySelector('main > section').innerText")


def test_the_numbers_on_the_screen_are_those_of_load_run(page, folders):
    run = load_run(folders[0])
    visit(page, "#/run/0?q=step%3D1")
    rows = page.run(
        "[...document.querySelectorAll('tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    shown = [(r[0], float(r[5]), float(r[11])) for r in rows]
    episodes = [row for row in run.episodes.to_pylist() if row["step"] == 1]
    assert shown == [(r["episode_id"], r["reward"], r["seconds"]) for r in episodes]
    visit(page, "#/run/0/episode?id=e2-0-1&layout=table")
    rows = page.run("[...document.querySelectorAll('#tokens .row')].map(r => r.innerText)")
    table = [row for row in run.tokens.to_pylist() if row["episode_id"] == "e2-0-1"]
    names = ("position", "token_id", "logprob", "old_logprob", "advantage", "clipped", "version")
    at = (2, 4, 5, 6, 8, 9, 11)  # the words of a row: "turn", "0", position, text, ...
    for row, expected in zip(rows[:2], table[:2], strict=True):
        assert [float(row.split()[i]) for i in at] == [expected[name] for name in names]
    assert rows[2].split() == ["not", "sampled", "2", "?", "3", *"???????"]
    metric = visit(page, "#/?metrics=critic/score/mean")
    scores = run.metrics["critic/score/mean"].to_pylist()
    assert f"{sum(scores) / len(scores):g} ± 0.25, n = {len(scores)} last steps" in metric


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(-8.01e-5, 1, [0, 0.5, 1]), (0.3, 0.31, [0.3, 0.305, 0.31]), (-3, 5, [-2, 0, 2, 4])],
)
def test_an_axis_is_labelled_at_round_numbers(page, low, high, labels):
    assert page.run(f"roundValues({low}, {high})") == pytest.approx(labels)


def test_the_colour_of_an_unknown_number_is_not_that_of_0(page):
    visit(page, "#/run/0/episode?id=e2-0-1&color=advantage")
    style = (
        "(() => { const s = getComputedStyle(document.querySelector('[data-token=\"%d\"]'));"
        " return [s.backgroundColor, s.backgroundImage.slice(0, 9)] })()"
    )
    zero, most, observed = (page.run(style % i) for i in range(3))
    assert zero == ["rgba(240, 130, 20, 0)", "none"]
    assert observed == ["rgba(0, 0, 0, 0)", "none"]
    assert most == ["rgba(240, 130, 20, 0.6)", "none"]
    visit(page, "#/run/0/episode?id=e2-0-1&color=entropy")
    assert page.run(style % 0) == ["rgba(0, 0, 0, 0)", "repeating"]
    assert page.run("document.querySelectorAll('#tokens .observed').length") == 1
    legend = page.run("[...document.querySelectorAll('.tokenlegend span')].map(s => s.innerText)")
    assert legend == ["unknown", "not sampled"]
    text = page.run("document.getElementById('tokens').innerText")
    assert text.split() == ["turn", "0", "1", "2", "not", "sampled", "3"]


def test_nothing_of_a_hostile_run_executes(page):
    text = visit(page, "#/run/0/episode?id=..%2F..%2Fx")
    assert "<script>window.ran=1</script>" in text and "\\x1b[31mred" in text
    assert "\\u202eevil" in text and "\\x00" in text and "\x1b" not in text
    assert page.run(
        "window.ran === undefined && document.querySelectorAll('main img').length === 0"
    )
    assert page.run("[...document.scripts].every(s => s.src.startsWith(location.origin))")
    assert not page.errors


@pytest.mark.parametrize("width", [400, 1000, 1600])
def test_no_page_is_wider_than_the_window(page, width):
    page.resize(width)
    for address in PAGES:
        visit(page, address)
        assert page.run("document.documentElement.scrollWidth") <= width, address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_scheme_and_axe_finds_nothing_serious(page, scheme):
    use_colors(page, scheme)
    page.resize(1000)
    for address in PAGES:
        visit(page, address)
        back = page.run("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[scheme]
        assert page.grave_violations() == [], address


def test_the_keyboard_reaches_everything(page):
    """Tab reaches each link, button, field and scrolled box in turn, and Enter opens a link."""
    focusable = "main a, main button, main input, main select, main [tabindex='0']"
    for address in ("#/?", "#/run/0?q=step%3D1", "#/run/0/step/2", "#/run/0/episode?id=e2-0-1"):
        visit(page, address)
        count = page.run(f"document.querySelectorAll({focusable!r}).length")
        page.run("window.reached = new Set(); document.getElementById('main').focus(); 0")
        for _ in range(count):
            press(page, "Tab")
            page.run("window.reached.add(document.activeElement); 0")
        missed = (
            f"[...document.querySelectorAll({focusable!r})].filter(e => !window.reached.has(e))"
            ".map(e => e.outerHTML)"
        )
        assert count > 3 and page.run(missed) == [], address
    visit(page, "#/run/0?q=step%3D1")
    press(page, "/")
    assert page.run("document.activeElement.id") == "query"
    page.run("document.activeElement.blur(); 0")
    press(page, "j")
    assert page.run("document.activeElement.getAttribute('href')") == "#/run/0?q=reward%3C0.5"
    assert page.run("document.getElementById('query').value") == "step=1"
    press(page, "Enter")
    page.wait("document.title.startsWith('Episodes: reward<0.5')")
    page.wait("document.body.dataset.ready === 'yes'")


def test_the_keys_choose_a_token_and_a_step(page):
    visit(page, "#/run/0/episode?id=e2-0-1")
    page.run("document.getElementById('tokens').focus(); 0")
    for _ in range(2):
        press(page, "ArrowRight")
    page.wait("document.querySelector('.readout').textContent.startsWith('token 1')")
    assert "gap -1 · advantage 2" in page.run("document.querySelector('.readout').textContent")
    assert page.run("document.querySelector('#tokens .chosen').dataset.token") == "1"
    assert "token=1" in page.run("location.hash")
    visit(page, "#/?metrics=critic/score/mean")
    page.run("[...document.querySelectorAll('.plot')].at(-1).focus(); 0")
    press(page, "Home")
    readout = page.run("[...document.querySelectorAll('figure output')].at(-1).textContent")
    assert "step 1: 0.5" in readout
    press(page, "Enter")
    page.wait("document.body.dataset.ready === 'yes' && document.title.startsWith('Step 1')")


def test_a_new_search_cancels_the_one_before(page):
    visit(page, "#/run/0")
    page.run("location.hash = '#/run/0?q=evil'; 0")
    assert "needle" not in visit(page, "#/run/0?q=quoted")
    assert page.run("document.querySelector('h1').textContent") == "Episodes: quoted"
    assert page.run("document.querySelectorAll('tbody tr').length") == 1
    # In the list, typing alone searches; what was typed stays in the field.
    press(page, "/")
    page.run("document.getElementById('query').select(); 0")
    page.send("Input.insertText", text="reward<0.5 step=1")
    page.wait("document.querySelectorAll('tbody tr').length === 2")
    page.wait("document.body.dataset.ready === 'yes'")
    assert page.run("document.activeElement.value") == "reward<0.5 step=1"
    page.run("document.activeElement.blur(); 0")


def test_an_exported_file_opens_without_a_server(folders, tmp_path):
    file = tmp_path / "run.html"
    with pytest.raises(SystemExit) as end:
        main(
            [
                "view",
                *map(str, [*folders[:2], folders[4]]),
                "--export",
                str(file),
                "--query",
                "step=2",
            ]
        )
    assert end.value.code == 0
    browser = Browser(tmp_path / "profile")
    browser.send("Network.enable")
    browser.send("Page.navigate", url=file.as_uri())
    browser.wait("document.body && document.body.dataset.ready === 'yes'")
    assert "0.75 ± 0.25" in browser.run("document.getElementById('main').innerText")
    assert "3 episodes" in visit(browser, "#/run/0")
    step = visit(browser, "#/run/0/step/2")
    assert "-1 nats: token 1 of e2-0-1" in step and "EngineError" in step
    episode = visit(browser, "#/run/0/episode?id=..%2F..%2Fx&step=2")
    assert "<script>window.ran=1</script>" in episode and "\\x1b[31mred" in episode
    visit(browser, "#/run/2/episode?id=seen")
    check_pictures(browser)
    visit(browser, "#/run/1/episode?id=e2-0-1&layout=table")
    assert "-0.25" in browser.run("document.getElementById('tokens').innerText")
    assert "does not contain that" in visit(browser, "#/run/0/episode?id=e1-0-0")
    assert browser.run("window.ran === undefined && document.getElementById('search').hidden")
    assert not browser.errors
    # The policy of the file lets no other script run and sends nothing.
    browser.run("document.body.append(Object.assign(document.createElement('script'),"
                " {textContent: 'window.ran = 2'})); 0")  # fmt: skip
    assert browser.run("window.ran") is None
    assert any("Content Security Policy" in error for error in browser.errors)
    browser.close()
