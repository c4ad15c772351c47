"""No variable of the environment changes what is learned: accelerate, transformers and torch let
many override an argument."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from support.processes import Processes
from support.trainer_fixtures import (
    as_sampled_by,
    config,
    random_groups,
    tiny_folder,
    tiny_model,
    weights_of,
)

from agentrl.engine.local.load import LAUNCHER_PREFIXES, without_launcher_variables
from agentrl.learner.algorithms import make_targets
from agentrl.learner.batch import collate
from agentrl.learner.dispatch import BROADCAST, dispatch
from agentrl.learner.learner import Learner
from agentrl.learner.rank import Rank
from agentrl.learner.sft import single_thread
from agentrl.learner.sharding import full_tensor

FSDP = {"ACCELERATE_USE_FSDP": "true"}
VARIABLES: list[dict[str, str]] = [
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    *({"ACCELERATE_MIXED_PRECISION": kind} for kind in ("bf16", "fp16", "fp8", "no")),
    {"ACCELERATE_DOWNCAST_BF16": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
    {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "max-autotune",
     "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true", "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"},
    FSDP,
    *({**FSDP, "FSDP_VERSION": version} for version in ("1", "2")),
    {**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true"},
    {**FSDP, "FSDP_OFFLOAD_PARAMS": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
    {**FSDP, "FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "false"},
    {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_CLIPPING": "0.001"},
    {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_GRADIENT_CLIPPING": "0.001"},
    {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
    {"ACCELERATE_TORCH_DEVICE": "meta"},
    {"ACCELERATE_USE_CPU": "true"},
    {"ACCELERATE_CPU_AFFINITY": "true", "ACCELERATE_DEBUG_MODE": "true"},
    {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL"},
    {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_FORMAT": "E4M3"},
    {"FORK_LAUNCHED": "1"},
    {"PMI_SIZE": "2", "PMI_RANK": "1"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
    {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"},
    {"XLA_USE_BF16": "1"},
    {"TORCHDYNAMO_DISABLE": "1"},
    {"_FSDP_USE_FAKE_REDUCE": "1", "_FSDP_USE_FAKE_ALL_GATHER": "1"},
]  # fmt: skip
READ_AT_IMPORT: list[dict[str, str]] = [
    {"DNNL_DEFAULT_FPMATH_MODE": "BF16", "ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1"},
    {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8"},
]
ALL = {name: value for each in reversed(VARIABLES) for name, value in each.items()}
ALL_READ_AT_IMPORT = {name: value for each in READ_AT_IMPORT for name, value in each.items()}


def one_step(folder: Path, group=None) -> tuple[Learner, torch.Tensor]:
    """A learner after one step, whose gradient was clipped, and the norm of that gradient."""
    keys = config(optim__lr=1e-2, optim__max_grad_norm=0.1, model__path=str(folder))
    learner = Learner(folder, keys, total_steps=1, group=group)
    batch = as_sampled_by(tiny_model(), collate(random_groups(3, groups=2, n=4), 31))
    metrics, _ = learner.update(batch, make_targets(batch, keys, None, None, None), 1)
    assert metrics["actor/grad_norm"] > 0.5
    return learner, torch.tensor(metrics["actor/grad_norm"])


def learned(folder: Path) -> dict[str, torch.Tensor]:
    learner, norm = one_step(folder)
    assert learner.rank is not None
    return weights_of(learner.rank.optimizers["actor"].parameters) | {"the gradient's norm": norm}


def forget_accelerate() -> None:
    """As in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def folder(tmp_path):
    forget_accelerate()
    yield tiny_folder(tmp_path / "model")
    forget_accelerate()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after one step without the variables; accelerate starts as in a new process."""
    forget_accelerate()
    return learned(tiny_folder(tmp_path_factory.mktemp("expected") / "model"))


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[n], expected[n]) for n in actual
    )


def moved(actual: dict[str, torch.Tensor]) -> bool:
    return all(not torch.equal(actual[n], p) for n, p in tiny_model().named_parameters())


@pytest.mark.parametrize(
    "variables",
    # `make test-all` finds which one.
    [
        pytest.param(ALL, id="all at once"),
        *(
            pytest.param(v, id="+".join(map("=".join, v.items())), marks=pytest.mark.slow)
            for v in VARIABLES
        ),
    ],
)
def test_a_variable_of_the_environment_changes_no_bit_of_a_step(
    folder, expected, monkeypatch, variables
):
    assert moved(expected)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert same(learned(folder), expected)
    assert dict(os.environ) == before


def test_every_variable_that_accelerate_reads_is_tried_or_hidden():
    """Those of a newer release, too."""
    package = Path(accelerate.__file__).parent
    source = "".join((package / f).read_text() for f in ("accelerator.py", "state.py"))
    read = set(re.findall(r"""(?:environ|_from_env)\S*?\(\s*\[?"([A-Z_0-9]+)\"""", source))
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" in read
    ours = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    harmless = {"OMP_NUM_THREADS", "PT_HPU_LAZY_MODE"}  # threads; another make of chip
    behind_others = {
        "FSDP_OFFLOAD_PARAMS",
        "FSDP_STATE_DICT_TYPE",
    }  # read beside ACCELERATE_USE_FSDP
    tried = {name for variables in VARIABLES for name in variables}
    left = read - ours - harmless - behind_others - tried
    assert {name for name in left if not name.startswith(LAUNCHER_PREFIXES)} == set()


def test_an_accelerator_of_the_users_own_changes_no_gradient_either(folder, expected):
    """All of a process share the number that accelerate divides a gradient by."""
    Accelerator(cpu=True, gradient_accumulation_steps=4)
    assert same(learned(folder), expected)


def test_the_variables_are_restored_after_the_block(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    before = dict(os.environ)
    with pytest.raises(KeyError), without_launcher_variables():
        assert "ACCELERATE_USE_FSDP" not in os.environ
        raise KeyError
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(ALL_READ_AT_IMPORT, id="all", marks=pytest.mark.slow),
        *(pytest.param(v, id="+".join(v), marks=pytest.mark.slow) for v in READ_AT_IMPORT),
    ],
)
def test_a_variable_that_a_library_reads_at_import_changes_no_bit_of_a_step(
    folder, tmp_path, variables
):
    script = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/..']\n"
        "import torch; from pathlib import Path; from test_environment import learned\n"
        "torch.set_num_threads(1)\n"
        "torch.save(learned(Path(sys.argv[2])), sys.argv[3])\n"
    )
    out = tmp_path / "weights.pt"
    subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(folder), str(out)],
        env=os.environ | variables,
        check=True,
        timeout=120,
    )
    with single_thread():
        assert same(torch.load(out), learned(folder))


class Weighed(Rank):
    """A rank that shows its weights."""

    def __init__(self, folder: Path):
        keys = config(optim__lr=1e-2, optim__max_grad_norm=0.1, model__path=str(folder))
        super().__init__(folder, keys)

    @dispatch(BROADCAST)
    def weights(self) -> dict[str, torch.Tensor]:
        parameters = self.optimizers["actor"].parameters
        return {name: full_tensor(p.detach()) for name, p in parameters.items()}


@pytest.mark.slow
def test_ranks_load_and_learn_the_same_under_the_variables_of_another_launcher(
    folder, expected, monkeypatch
):
    """With them transformers would load weights on the first rank alone."""
    for name, value in {
        **FSDP,
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "PMI_SIZE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }.items():
        monkeypatch.setenv(name, value)
    group = Processes(2, Weighed, folder, start="spawn")
    try:
        _, norm = one_step(folder, group)
        actual = group.weights() | {"the gradient's norm": norm}
    finally:
        group.close()
    assert actual.keys() == expected.keys() and moved(actual)
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], atol=1e-6, rtol=1e-5, msg=name)
