"""The report: its numbers, and texts of models that are dangerous in HTML."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.cli import main
from agentrl.cli.evaluate import aligned
from agentrl.errors import DataError
from agentrl.report import Finding, diagnose
from agentrl.report.page import make_report, to_html, to_markdown
from agentrl.report.run import diagnoses, load_run

from .test_diagnoses import N, learning, make_run, ramp

OLD = Path(__file__).parent.parent / "fixtures/old_run/run"
ATTACK = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e\x00 `*|#"


class Page(HTMLParser):
    """Tags, attributes and the text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def attacked():
    """A run whose prompt, answer, row and finding contain the attack."""
    rows = [
        {"step": 1, "episode_id": ATTACK, "prompt": ATTACK, "answer": ATTACK, "sample_id": ATTACK}
    ]
    run = make_run(learning(), rows)
    finding = Finding(1, ATTACK, {ATTACK: 1.0}, [ATTACK], [ATTACK], [ATTACK], ATTACK, "error")
    return make_report(run, [finding])


def test_texts_of_models_cannot_become_html():
    text = to_html(attacked())
    page = Page(text)
    assert not {"script", "img", "iframe", "link", "a"} & {*page.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.open == []
    assert page.text.count("<script>alert(1)</script>") >= 6  # shown as text
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert "default-src 'none'" in text and "http" not in text.replace("http-equiv", "")


def test_texts_of_models_have_no_meaning_in_markdown():
    text = to_markdown(attacked())
    assert all(c.isprintable() or c == "\n" for c in text)
    for line in text.splitlines():
        assert line.startswith("    ") or "<script>" not in line.replace("\\<", "")


def test_the_summary_and_the_validation():
    first: list = [None] * N
    source, errors = list(first), list(first)
    source[0], source[-1], errors[0] = 0.25, 0.75, 0.05
    metrics = learning(
        **{
            "critic/score/mean": list(ramp(0.0, 0.78)),
            "val-core/a/b/reward/mean@4": source,
            "val-core/a/b/reward/se@4": errors,
            "timing_s/step": [90.0] * N,
            "timing_s/gen": [60.0] * N,
            "timing_s/testing": [*first[:-1], 61.0],
        }
    )
    run = make_run(metrics)
    report = make_report(run, diagnose(run))
    summary = dict(report.summary)
    # The steps 1 to 10 have 0.00, 0.02, ..., 0.18.
    assert summary["reward"].startswith("0.09 ± 0.019 in the first 10 steps -> 0.69 ± 0.019")
    assert summary["steps"] == "40"
    assert summary["time"] == "1 h 0 min of training, 90 s a step; 1 min 1 s of validation"
    assert summary["findings"] == "no errors or warnings"
    assert list(report.validation)[1:] == [
        ("a/b, 4 rollouts a row", "0.25 ± 0.05 (step 1)", "0.75 (step 40)")
    ]
    assert list(report.time)[1:] == [
        ("step (mean of the last 10)", "90", "100%"),
        ("gen", "60", "67%"),
    ]
    page = Page(to_html(report))
    assert page.tags.count("polyline") == len(report.curves) > 5 and page.open == []


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_a_run_that_has_just_begun(steps):
    run = make_run({name: values[:steps] for name, values in learning().items()})
    report = make_report(run, diagnose(run))
    assert dict(report.summary)["steps"] == (
        str(steps) if steps else "no training step is recorded yet"
    )
    assert Page(to_html(report)).open == []


def test_the_command_writes_a_page_of_an_old_run_with_a_diagnosis_of_the_user(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrl.report import Finding, diagnosis\n"
        "@diagnosis('mine')\n"
        "def mine(run):\n"
        "    yield Finding(1, 'seen <b>', episodes=run.episodes.column('episode_id').to_pylist())\n"
    )
    page = tmp_path / "page.html"
    with diagnoses.isolated():
        with pytest.raises(SystemExit) as exit_:
            main(["report", str(OLD), "-f", str(file), "--output", str(page)])
        assert exit_.value.code in (0, None)
        out = capsys.readouterr().out
        assert "warning: seen <b> [mine]" in out and str(page) in out
        assert f"agentrl show {OLD} --episode " in out
        text = page.read_text()
        assert "seen &lt;b&gt;" in text and "<svg" in text and "<?xml" not in text
        with pytest.raises(SystemExit):
            main(["report", str(OLD), "-f", str(file), "--md"])
        assert "### mine, from step 1" in capsys.readouterr().out
    assert not (OLD / "report.html").exists()


def test_the_command_refuses_other_folders(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path)])
    assert exit_.value.code == 1
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_damaged_file_is_one_error(tmp_path, capsys):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "train-00000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path)])
    assert exit_.value.code == 1
    assert "train-00000001.parquet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "[1, 2"),
        ("config.yaml", "[1, 2]"),
        ("changes.jsonl", "no JSON"),
        ("metrics.jsonl", '{"step": 1, "data": {"critic/score/mean": "text"}}\n'),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path, name, content):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / name).write_text(content)
    run = load_run(tmp_path)
    with pytest.raises(DataError, match=name):
        _ = run.config, run.changes, run.metrics


def test_a_foreign_table_among_the_trajectories_is_named(tmp_path, capsys):
    (tmp_path / "trajectories").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "trajectories" / "train-00000001.parquet")
    for command in ("report", "show"):
        with pytest.raises(SystemExit) as exit_:
            main([command, str(tmp_path)])
        assert exit_.value.code == 1
        assert "train-00000001.parquet" in capsys.readouterr().err


def test_a_foreign_table_among_what_was_learned_is_named(tmp_path):
    run = shutil.copytree(OLD, tmp_path / "run")
    (run / "learned").mkdir(exist_ok=True)
    pq.write_table(pa.table({"a": [1]}), run / "learned" / "learned-00000001.parquet")
    with pytest.raises(DataError, match=r"learned-00000001\.parquet .* no column 'episode_id'"):
        load_run(run).store.read_learned(1)


def test_the_terminal_gets_no_control_characters(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / ATTACK[-20:].replace("\x00", ""))])
    texts = [capsys.readouterr().err, *aligned([["row", "reward"], [ATTACK + "\n", "1"]], 1)]
    assert all("\\x1b[31m\\u202e" in text for text in (texts[0], texts[2]))
    assert all(c.isprintable() or c == "\n" for text in texts for c in text)
    assert "\n" not in texts[2]


def test_a_loop_with_a_dangerous_name_in_the_curve(tmp_path, capsys):
    name = "<script>alert(1)<"
    lines = [
        {"step": s, "data": {f"val/{n}/reward/mean@1": 0.5, "critic/score/mean": 0.1 * s}}
        for s in range(1, 4)
        for n in (name,)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    assert "script" not in Page((tmp_path / "report.html").read_text()).tags
