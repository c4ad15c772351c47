"""The tiny model: where it is kept, how it is made, and what it must be able to do."""

import shutil
from dataclasses import replace
from itertools import islice

import pytest
from transformers import AutoModelForCausalLM

from agentrl import registry
from agentrl.chat import ChatTemplate, load_tokenizer
from agentrl.cli.options import resolve_model
from agentrl.config import Config, load_config
from agentrl.demo import TINY_SETTINGS, describe_preset, recipe, tiny_config, tiny_model
from agentrl.demo.arithmetic import rows
from agentrl.demo.recipe import Recipe, conversation, share_copied
from agentrl.errors import RunStopped, UserError
from agentrl.learner.learner import Learner
from agentrl.tools import LocalToolbox

HASTY = Recipe(steps=2, copied=0.0)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A folder with a model that had two steps of training, and what was said meanwhile."""
    messages = []
    return tiny_model(tmp_path_factory.mktemp("home"), HASTY, messages.append), messages


def test_the_model_is_made_once(hasty):
    folder, messages = hasty
    assert folder.name == f"tiny-{HASTY.key()}"
    assert messages[0].startswith("training the model 'tiny'") and "copies" in messages[-1]
    before = folder.stat().st_mtime_ns
    assert tiny_model(folder.parent, HASTY, messages.append) == folder
    assert folder.stat().st_mtime_ns == before
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_model_is_made_again(tmp_path, monkeypatch, name, hasty):
    monkeypatch.setattr(
        recipe, "make", lambda r, to, say: shutil.copytree(hasty[0], to, dirs_exist_ok=True)
    )
    folder, messages = tiny_model(tmp_path, HASTY, lambda text: None), []
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    assert tiny_model(tmp_path, HASTY, messages.append) == folder
    assert (folder / name).read_bytes() == content and "is damaged" in messages[0]


def test_transformers_loads_it(hasty):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(hasty[0]), load_tokenizer(hasty[0])
    assert model.config.model_type == "qwen2"
    assert model.config.vocab_size == len(tokenizer) == 576
    assert 460_000 < sum(p.numel() for p in model.parameters()) < 480_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert ChatTemplate(tokenizer).close_id == tokenizer.eos_token_id


def test_the_same_recipe_makes_the_same_model(hasty, tmp_path):
    again = tiny_model(tmp_path, HASTY, lambda text: None)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (again / file).read_bytes() == (hasty[0] / file).read_bytes()


def test_any_change_of_the_recipe_or_its_texts_makes_another_folder(monkeypatch):
    keys = {replace(HASTY, **change).key() for change in ({}, {"lr": 1e-4}, {"seed": 9})}
    assert len(keys) == 3 and HASTY.key() in keys
    monkeypatch.setitem(recipe.CALCULATOR["function"], "description", "Another.")
    assert HASTY.key() not in keys


def test_a_model_that_cannot_copy_is_not_kept(tmp_path):
    with pytest.raises(RunStopped, match=r"copies [\d.]+% of the digits in calls right"):
        tiny_model(tmp_path, replace(HASTY, steps=1, copied=0.99), lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_end_with_one_folder(tmp_path, monkeypatch):
    made = []

    def make(some_recipe, folder, say):
        """While this one is at work, another finishes."""
        made.append(folder)
        (folder / "config.json").touch()
        if len(made) == 1:
            tiny_model(tmp_path, HASTY, say)

    monkeypatch.setattr(recipe, "make", make)
    folder = tiny_model(tmp_path, HASTY, lambda text: None)
    assert len(made) == 2
    assert list(tmp_path.iterdir()) == [folder] and (folder / "config.json").exists()


def test_where_things_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "own"))
    assert recipe.home() == tmp_path / "own"
    monkeypatch.delenv("AGENTRL_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recipe.home() == tmp_path / "agentrl"


def test_names_of_models(hasty, tmp_path, monkeypatch):
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert resolve_model(str(hasty[0])) == str(hasty[0])
    (tmp_path / "model_a").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve_model(str(tmp_path / "model_a"))
    with pytest.raises(UserError, match=r"Did you mean 'model_a'\?"):
        resolve_model(str(tmp_path / "model_b"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no model folder at \./nowhere"):
        resolve_model("./nowhere")
    (tmp_path / "model_a" / "weights.pt").touch()
    with pytest.raises(UserError, match=r"weights\.pt is a file: use its folder, model_a"):
        resolve_model("model_a/weights.pt")
    (tmp_path / "model_a" / "small.gguf").touch()
    with pytest.raises(UserError, match=r"Use model_a/small\.gguf$"):
        resolve_model("model_a")
    with pytest.raises(
        UserError, match=r"no model file at smal\.gguf .*Use .*, a GGUF file, a hub"
    ):
        resolve_model("smal.gguf")
    with pytest.raises(UserError, match=r"Did you mean 'small\.gguf'\?"):
        resolve_model("model_a/smal.gguf")


@pytest.mark.parametrize("name", ["tinny", "Tiny"])
def test_a_misspelled_preset_is_refused(name):
    with pytest.raises(UserError, match=rf"no model '{name}'\. Did you mean 'tiny'\?"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (
            "models/mime",
            "note: there is no folder 'models/mime', so it is loaded from the hub. Did you",
        ),
        ("models/other", "note: there is no folder 'models/other', so it is loaded from the hub."),
        ("modles", "Did you mean 'models'?"),
        ("Qwen/Qwen3-0.6B", ""),
        ("gpt2", ""),
    ],
)
def test_a_possibly_misspelled_folder_is_noted(tmp_path, monkeypatch, name, note):
    """A folder may have the same name as an owner on the hub."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    messages = []
    assert resolve_model(name, say=messages.append) == name
    assert note in "".join(messages) and bool(messages) == bool(note)


def test_the_tool_is_shown_as_the_shelf_s_is():
    registry.load_file("shelf:calculator")
    shelf = LocalToolbox().schemas(["calculator"])
    template = ChatTemplate(load_tokenizer_of_texts())
    for row in islice(rows(0), 3):
        loop = registry.agent_loops.get(row.sample.agent_name)
        messages, schemas = conversation(row, "gold")
        opening = messages[: -len(row.gold)]
        shown = loop.opening(row.sample, shelf if row.sample.tools else [])
        assert list(template.prompt(opening, schemas)) == list(template.prompt(*shown))


def load_tokenizer_of_texts():
    from agentrl.demo.recipe import train_tokenizer

    return train_tokenizer(["calculator"])


def test_the_settings_are_a_config():
    config = load_config(None, [], {"model.path": "tiny"}, preset=TINY_SETTINGS)
    assert config.files == ["shelf:calculator"]
    assert config.algorithm.ppo_epochs == 2


def test_a_run_names_the_keys_that_the_preset_sets():
    config = load_config(None, ["files=[mine.py]", "optim.lr=1e-3"], preset=TINY_SETTINGS)
    assert describe_preset(config) == (
        "the preset of 'tiny' sets rollout.max_turn_tokens=64 rollout.max_trajectory_tokens=384"
        " algorithm.ppo_epochs=2 optim.lr_final=0.3 trainer.total_steps=60 trainer.test_freq=10"
        ' trainer.save_freq=30 (docs/config.md, "The preset tiny")'
    )
    assert describe_preset(load_config()) == ""


def test_a_config_of_the_tiny_model(tmp_path, tiny_model):
    config = tiny_config(overrides=["rollout.n=4"], flags={"data.train": "rows.jsonl"})
    assert (config.model.path, config.trainer.total_steps) == (str(tiny_model), 60)
    assert (config.rollout.n, config.trainer.output) == (4, "runs/rows")
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {total_epochs: 1}\nmodel: {path: other}")
    by_epochs = tiny_config(str(file))
    assert (by_epochs.model.path, by_epochs.trainer.total_steps) == (str(tiny_model), 0)
    both = tiny_config(str(file), ["trainer.total_steps=7"])
    assert (both.trainer.total_steps, both.trainer.total_epochs) == (7, 1)


def test_the_cached_tiny_model_copies_numbers(tiny_model):
    template = ChatTemplate(load_tokenizer(tiny_model))
    learner = Learner(tiny_model, Config(), total_steps=1)
    assert share_copied(learner, template) >= Recipe().copied
