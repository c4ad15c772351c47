"""The GPUs, options and senders of the servers of a run; no server is started."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from agentrl.config import load_config
from agentrl.engine.remote import open
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.open import make_openers
from agentrl.engine.remote.senders import FROM_FILES
from agentrl.errors import ConfigError, EngineDead, EngineError

NOTHING = AdminClient("http://127.0.0.1:1")


@pytest.fixture
def starts(monkeypatch):
    """The servers that a run would have started, with their options: what they are, then how."""
    launches = []

    class Engine:
        def __init__(self, url, **options):
            launches[-1] |= options

    def start(launch, *, host):
        assert host == "127.0.0.1"
        launches.append({"launch": launch, "flags": launch.flags()})
        return SimpleNamespace(url=NOTHING.url, token="", admin_token="")

    monkeypatch.setattr(SGLangLaunch, "start", start)
    monkeypatch.setattr(open, "SGLangEngine", Engine)
    return launches


def open_all(model, *overrides, gpus=0, monkeypatch=None):
    """Open a run's servers where there are so many GPUs."""
    if monkeypatch is not None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = load_config(None, ["rollout.name=sglang", *overrides])
    for opener in make_openers(config, str(model), cpu=not gpus):
        opener()


def after(flags, name):
    return flags[flags.index(name) + 1]


def test_each_server_has_gpus_of_its_own(starts, random_model, monkeypatch):
    two = ["rollout.engines=2"]
    for gpus, overrides, expected in (
        (4, [], [[3]]),
        (4, two, [[2], [3]]),
        (5, [*two, "rollout.tensor_parallel_size=2"], [[1, 2], [3, 4]]),
        (1, [], [[0]]),
    ):
        starts.clear()
        open_all(random_model, *overrides, gpus=gpus, monkeypatch=monkeypatch)
        assert [s["launch"].gpus for s in starts] == expected
        for s in starts:
            assert after(s["flags"], "--tp-size") == str(len(expected[0]))
            shared = s["launch"].gpus[0] == 0
            assert s["delivery"].source == "memory"
            assert s["delivery"].ranks == ((0,) * len(expected[0]) if shared else ())
            assert s["delivery"].processes == len(expected[0])
    starts.clear()
    open_all(random_model, *two)
    assert [s["launch"].gpus for s in starts] == [[], []]
    assert all(s["delivery"] == FROM_FILES for s in starts)


@pytest.mark.parametrize(
    "gpus, overrides, message",
    [
        (1, ["rollout.engines=2"], "are 2 GPUs, but torch finds 1"),
        (2, ["trainer.placement=separate", "rollout.engines=2"], "use all 2 GPUs"),
        (
            4,
            ["rollout.engines=2", "rollout.tensor_parallel_size=2"],
            "use all 4 GPUs, so the first server would share GPU 0 .* Set rollout.engines=1, or"
            " rollout.tensor_parallel_size=1, .*trainer.n_gpus_per_node=4",
        ),
        (
            2,
            ["rollout.tensor_parallel_size=2"],
            "unbalanced`\\). Set rollout.tensor_parallel_size=1",
        ),
        (2, ["rollout.sleep=all"], "no server shares the trainer's GPU"),
        (1, ["rollout.sync=nccl"], "GPU 0, which is the trainer's"),
        (2, ["rollout.sync=ipc"], "GPU 1, which is not the trainer's"),
        (0, ["rollout.sync=ipc"], "a server is on a CPU"),
        (0, ["rollout.sleep=kv_cache"], "shares no GPU"),
        (0, ["rollout.tensor_parallel_size=2"], "needs GPUs"),
        (0, ["rollout.deterministic=true"], "deterministic inference needs GPUs"),
    ],
)
def test_impossible_placements(starts, random_model, monkeypatch, gpus, overrides, message):
    with pytest.raises(ConfigError, match=message):
        open_all(random_model, *overrides, gpus=gpus, monkeypatch=monkeypatch)
    assert not starts


def test_memory_and_arguments(starts, random_model, monkeypatch):
    more = ["rollout.gpu_memory_utilization=0.25", "rollout.launch=[--attention-backend, triton]"]
    open_all(random_model, *more, gpus=1, monkeypatch=monkeypatch)
    [server] = starts
    assert after(server["flags"], "--mem-fraction-static") == "0.25"
    assert list(server["launch"].arguments) == ["--attention-backend", "triton"]


@pytest.mark.parametrize("lora", ["auto", "adapter", "merge"])
def test_how_lora_weights_are_sent(starts, random_model, monkeypatch, lora):
    overrides = ["model.lora_rank=8", f"rollout.lora={lora}"]
    for gpus, adapter in ((1, lora != "merge"), (0, False)):
        starts.clear()
        if lora == "adapter" and not gpus:
            with pytest.raises(ConfigError, match="no adapters on a CPU"):
                open_all(random_model, *overrides)
            continue
        open_all(random_model, *overrides, gpus=gpus, monkeypatch=monkeypatch)
        [server] = starts
        assert (server["delivery"].source == "adapter") == adapter
        assert ("--enable-lora" in server["flags"]) == adapter
        if adapter:
            assert after(server["flags"], "--max-lora-rank") == "8"
            assert after(server["flags"], "--max-loaded-loras") == "2"


@pytest.mark.parametrize("gpus", [1, 2])
def test_rollouts_in_the_background_need_a_gpu_of_their_own(
    starts, random_model, monkeypatch, gpus
):
    keys = ["trainer.max_staleness=1", "model.lora_rank=8"]
    if gpus == 1:
        with pytest.raises(ConfigError, match=r"share a GPU(?s:.)*trainer\.placement=separate"):
            open_all(random_model, *keys, gpus=gpus, monkeypatch=monkeypatch)
        assert not starts
        return
    open_all(random_model, *keys, gpus=gpus, monkeypatch=monkeypatch)
    [server] = starts
    assert after(server["flags"], "--max-loaded-loras") == "3"
    assert after(server["flags"], "--max-loras-per-batch") == "3"
    assert server["delivery"].adapters == 3


SAVER, BACKUP = "--enable-memory-saver", "--enable-weights-cpu-backup"


@pytest.mark.parametrize(
    "sleep, lora, expected",
    [
        ("none", "", set()),
        ("kv_cache", "merge", {SAVER}),
        ("all", "", {SAVER}),  # every update brings all weights back
        ("all", "merge", {SAVER, BACKUP}),  # and these only what is adapted
        ("all", "adapter", {SAVER, BACKUP}),
    ],
)
def test_weights_that_no_update_sends_are_kept_during_sleep(
    starts, random_model, monkeypatch, sleep, lora, expected
):
    overrides = [f"rollout.sleep={sleep}"]
    overrides += ["model.lora_rank=8", f"rollout.lora={lora}"] if lora else []
    open_all(random_model, *overrides, gpus=1, monkeypatch=monkeypatch)
    [server] = starts
    assert {SAVER, BACKUP} & set(server["flags"]) == expected
    assert server["sleep"] == sleep


def test_deterministic(starts, random_model, monkeypatch):
    open_all(random_model, "rollout.deterministic=true", gpus=1, monkeypatch=monkeypatch)
    [server] = starts
    assert "--enable-deterministic-inference" in server["flags"]
    assert after(server["flags"], "--rl-on-policy-target") == "fsdp"
    assert server["dtype"] is None, "what the trainer has in float32 is sent so"


def test_a_model_without_on_policy_kernels_starts_without_them(
    starts, random_model, monkeypatch, caplog
):
    start = SGLangLaunch.start

    def refusing(launch, *, host):
        if launch.on_policy:
            raise EngineDead("it ended\n  | ValueError: not this model")
        return start(launch, host=host)

    monkeypatch.setattr(SGLangLaunch, "start", refusing)
    open_all(random_model, "rollout.deterministic=true", gpus=1, monkeypatch=monkeypatch)
    [server] = starts
    assert "--enable-deterministic-inference" in server["flags"]
    assert "--rl-on-policy-target" not in server["flags"]
    assert server["dtype"] == torch.bfloat16
    assert "ValueError: not this model" in caplog.text


@pytest.mark.parametrize("name, dtype", [("float32", "bfloat16"), ("float16", "float16")])
def test_the_precision_is_the_models_on_a_gpu_and_float32_elsewhere(
    starts, random_model, monkeypatch, tmp_path, name, dtype
):
    config = AutoConfig.from_pretrained(random_model)
    config.dtype = getattr(torch, name)
    config.save_pretrained(tmp_path)
    open_all(tmp_path, gpus=1, monkeypatch=monkeypatch)
    open_all(tmp_path)
    assert [after(s["flags"], "--dtype") for s in starts] == [dtype, "float32"]


@pytest.mark.parametrize(
    "argument, by",
    [
        ("--hos", r"\(--host\) is set by agentrl"),
        ("--mem-fraction-stat=0.9", "is set by rollout.gpu_memory_utilization"),
        ("--tensor_parallel_size=2", "is set by rollout.tensor_parallel_size"),
        ("--tp", "is set by rollout.tensor_parallel_size"),
    ],
)
def test_arguments_that_agentrl_sets_are_refused_in_any_spelling(argument, by):
    with pytest.raises(ConfigError, match=by):
        load_config(None, ["rollout.name=sglang", f"rollout.launch=[{argument}]"])


def test_other_arguments_are_passed_on():
    more = ["--max-running-requests", "8", "--dp", "tp", "-x", "--model-loader-extra-config={}"]
    config = load_config(None, ["rollout.name=sglang", f"rollout.launch={json.dumps(more)}"])
    assert config.rollout.launch == more


def test_a_url_that_is_named_twice_is_refused():
    with pytest.raises(ConfigError, match="it contains a URL twice"):
        load_config(None, ["rollout.name=sglang", "rollout.urls=[http://a:1, http://a:1/]"])


def test_a_server_that_refuses_the_key_is_an_error_with_advice(random_model, monkeypatch):
    monkeypatch.setenv("AGENTRL_ENGINE_TOKEN", "key")
    config = load_config(None, ["rollout.name=sglang", f"rollout.urls=[{NOTHING.url}]"])
    [opener] = make_openers(config, str(random_model), cpu=True)
    with pytest.raises(EngineError, match=r"Connection refused(.|\n)*rollout\.urls") as raised:
        opener()
    error = str(raised.value)
    assert "AGENTRL_ENGINE_TOKEN (set)" in error
    assert "AGENTRL_ENGINE_ADMIN_TOKEN (not set)" in error
