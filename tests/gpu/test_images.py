"""Images on a GPU: engines, learner and a run agree about rows with images.

`AGENTRL_SGLANG_PYTHON` names the Python that has SGLang; without it, it is this one.
"""

import asyncio
import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.image_rows import Reference, picture, row_of
from support.vision import vision_model, write_vision_model

from agentrl.config import load_config
from agentrl.data import write_rows
from agentrl.engine.base import Sampling
from agentrl.engine.local.load import with_published_names
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import Delivery, Route, WeightsSender
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.images import ImageRule
from agentrl.record import METRICS, read_metrics
from agentrl.registry import load_file
from agentrl.trainer import Trainer
from gpu.test_sglang_sync import keys

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no GPU")]

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
FLAGS = [
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--mm-attention-backend", "triton_attn", "--disable-cuda-graph"),
]
ENV = Path(__file__).parents[2] / "examples/shapes/env.py"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_server_reads_images_and_takes_a_vision_tower(family, tmp_path):
    """Turns and scores in bfloat16 are close to the float64 model's; another image is not."""
    folder = write_vision_model(tmp_path / "model", family)
    rule, model = ImageRule.load(folder), vision_model(family, 1)
    assert rule is not None
    reference = Reference(model, folder)
    a, b, other = picture(rule, 3, 2, 1), picture(rule, 2, 4, 2), picture(rule, 3, 2, 3)
    row = row_of("<|im_start|>user\nlook ", a, " and ", b, "<|im_end|>\n<|im_start|>assistant\n")
    launch = SGLangLaunch(
        str(folder), python=PYTHON, dtype="bfloat16", gpus=[0], memory=0.1,
        arguments=FLAGS, reads_images=True,
    )  # fmt: skip
    server = launch.start()
    try:
        engine = SGLangEngine(
            server.url,
            vocabulary=model.config.text_config.vocab_size,
            dtype=torch.bfloat16,
            process=server,
            delivery=Delivery("memory", ranks=(0,)),
            **keys(server),
        )
        weights = [
            (name, p.detach().to("cuda:0", torch.bfloat16))
            for name, p in with_published_names(model, model.named_parameters())
        ]
        with closing(WeightsSender()) as sender:
            route = Route(1, (engine.target,), dtype=torch.bfloat16)
            engine.begin_update()
            sent = sender.send(weights, route)
            assert not sent.errors
            engine.finish_update(route, sent)

        async def play():
            turn = await engine.generate(
                row, Sampling(max_tokens=40), episode_id="e", seed=1,
                deadline=time.monotonic() + 100, images=[a, b],
            )  # fmt: skip
            scored = await engine.score(row, [a, b]), await engine.score(row, [other, b])
            return turn, *scored

        turn, mine, changed = asyncio.run(play())
    finally:
        server.stop()
    sampled = reference.logprobs(row + turn.token_ids, [a, b])[len(row) :]
    gaps = [
        np.abs(turn.logprobs - sampled).mean(),
        np.abs(mine - reference.logprobs(row, [a, b])).mean(),
        np.abs(changed - reference.logprobs(row, [other, b])).mean(),
    ]
    control = np.abs(np.subtract(mine, changed)).mean()
    print(family, "nats:", [round(float(gap), 4) for gap in gaps], "another image:", control)
    assert max(gaps) < 0.1
    assert control > 3 * max(gaps)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A file with a reward that differs within a group, though the model knows nothing."""
    file = tmp_path_factory.mktemp("reward") / "short.py"
    file.write_text(
        "from agentrl.rewards import reward\n\n\n@reward('short')\n"
        "def short(trajectory):\n    return float(len(trajectory.messages[-1].content) % 7)\n"
    )
    return file


@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_a_run_learns_from_rows_with_images(engine, short, tmp_path):
    """Three steps of examples/shapes: engine and learner agree about each sampled token."""
    write_rows(tmp_path / "rows.parquet", load_file(str(ENV)).rows(16, 0, 1))
    words = [
        f"files=[{ENV},{short}]",
        f"data.train={tmp_path / 'rows.parquet'}",
        "data.batch_size=4",
        "data.agent_name=tool_agent",
        f"model.path={write_vision_model(tmp_path / 'model')}",
        f"rollout.name={engine}",
        "rollout.n=4",
        "rollout.max_turn_tokens=32",
        "rollout.max_trajectory_tokens=2048",
        "reward.functions={shapes: 1, short: 1}",
        "trainer.device=cuda",
        "trainer.total_steps=3",
        "trainer.save_freq=never",
        "trainer.val_before_train=false",
        f"trainer.output={tmp_path / 'run'}",
    ]
    if engine == "sglang":
        words += [f"rollout.launch=[{','.join(FLAGS)}]", "rollout.gpu_memory_utilization=0.1"]
        words += [f"rollout.python={PYTHON}"] if PYTHON else []
    Trainer(load_config(None, words)).run()
    history = [metrics for _, metrics in read_metrics(tmp_path / "run" / METRICS)]
    gaps = [metrics["rollout_corr/logprob_diff_mean"] for metrics in history]
    print(engine, "nats:", gaps)
    assert len(history) == 3
    assert max(gaps) < 0.1
    assert all(metrics["actor/grad_norm"] > 0 for metrics in history)
