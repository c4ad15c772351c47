"""`agentrl show --sft` and `agentrl sft`: the tokens of good episodes, exactly as recorded."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.recorded import SAMPLE, play, play_with_images

from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.cli import main
from agentrl.errors import DataError, UserError
from agentrl.images import Image
from agentrl.record import TOKENIZER
from agentrl.report import load_run
from agentrl.store import TrajectoryStore
from agentrl.testing import byte_tokenizer
from agentrl.trainer.sft import has_tokens, load_token_examples
from agentrl.trajectory import Group
from agentrl.view.query import parse_query
from agentrl.view.rejection import write_tokens


@pytest.fixture
def run(tmp_path):
    """A run of two steps and a validation: rollouts with the rewards 1, 0; 1, 1; and 1."""
    folder = tmp_path / "run"
    store = TrajectoryStore(folder / "trajectories")
    for step, split, rewards in ((1, "train", (1, 0)), (2, "train", (1, 1)), (2, "val", (1,))):
        played = tuple(play(step, 0, i, reward=float(r)) for i, r in enumerate(rewards))
        store.write(step, [Group(SAMPLE, played)], split=split)
    (folder / "config.yaml").write_text("model: {path: x}\n")
    byte_tokenizer().save_pretrained(folder / TOKENIZER)
    return load_run(folder)


def segments(run, wanted):
    return [
        (list(s.prompt_ids) + list(s.response_ids), [0] * len(s.prompt_ids) + list(s.response_mask))
        for _, step, split in run.store.files()
        for rollout in run.store.read(step, split)
        if wanted(step, split, rollout.scored.reward)
        for s in rollout.scored.trajectory.segments
    ]


def test_episodes_with_images_are_refused(run, tmp_path):
    seen = play_with_images(Image(b"x"))
    run.store.write(3, [Group(SAMPLE, (seen,))])
    with pytest.raises(UserError, match=r"train-00000003\.parquet has episodes with images"):
        write_tokens(run, parse_query(""), tmp_path / "o.parquet")
    assert write_tokens(run, parse_query("step<3"), tmp_path / "o.parquet").episodes == 4


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("reward>=1", lambda step, split, reward: split == "train" and reward == 1),
        ("", lambda step, split, reward: split == "train"),
        ("step=2", lambda step, split, reward: split == "train" and step == 2),
        ("split=val", lambda step, split, reward: split == "val"),
    ],
)
def test_rows_are_the_recorded_tokens(run, tmp_path, query, wanted):
    output = tmp_path / "best.parquet"
    written = write_tokens(run, parse_query(query), output)
    expected = segments(run, wanted)
    template = ChatTemplate(load_tokenizer(run.folder / TOKENIZER))
    assert has_tokens(str(output))
    examples = load_token_examples(str(output), template, 10_000)
    assert [(list(e.ids), list(e.mask)) for e in examples] == expected
    assert written == (
        len(expected), len(expected), sum(len(ids) for ids, _ in expected),
        sum(sum(mask) for _, mask in expected),
    )  # fmt: skip


def test_mistakes_are_named(run, tmp_path):
    output = tmp_path / "best.parquet"
    with pytest.raises(UserError, match="finds no episode"):
        write_tokens(run, parse_query("reward>5"), output)
    with pytest.raises(UserError, match=r"must be a new \.parquet file"):
        write_tokens(run, parse_query(""), tmp_path / "best.jsonl")
    write_tokens(run, parse_query(""), output)
    with pytest.raises(UserError, match=r"must be a new \.parquet file"):
        write_tokens(run, parse_query(""), output)
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match="is 4 tokens long, more than the model's 3"):
        load_token_examples(str(output), ChatTemplate(tokenizer), 3)
    tokenizer.add_tokens(["<other>"])
    with pytest.raises(DataError, match="another tokenizer"):
        load_token_examples(str(output), ChatTemplate(tokenizer), 10_000)
    (run.folder / TOKENIZER / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer/tokenizer\.json"):
        write_tokens(run, parse_query(""), tmp_path / "other.parquet")


def test_other_files_have_no_tokens(tmp_path):
    pq.write_table(pa.table({"messages": ["[]"]}), tmp_path / "chats.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for name in ("chats.parquet", "broken.parquet", "missing.parquet", "chats.jsonl"):
        assert not has_tokens(str(tmp_path / name))


@pytest.mark.slow
def test_a_model_learns_from_the_best_episodes(tiny_model, tmp_path, capsys):
    """Two commands after a run: the model of the run imitates the episodes with a reward."""
    run = str(tmp_path / "run")
    words = ["data.batch_size=4", "rollout.n=4", "trainer.total_steps=1", "trainer.device=cpu"]
    data = ["--dataset", "datasets/arithmetic_train.parquet", "--model", str(tiny_model)]
    with pytest.raises(SystemExit):
        main(["train", *data, "--file", "shelf:calculator", "--output", run, *words])
    best, output = tmp_path / "best.parquet", tmp_path / "best"
    learn = f"sft --dataset {best} --model {run}/model --output {output} --steps 30 --lr 1e-3"
    for command in (
        ["show", run, "reward>=0", "--sft", str(best)],
        [*learn.split(), "--batch-size", "8"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code, capsys.readouterr()
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()
              if line.startswith("  step ")]  # fmt: skip
    assert losses[-1] < 1.0 and (output / "config.json").is_file()
