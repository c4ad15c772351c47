"""Weights to real SGLang servers on GPUs: CUDA's handles on one, NCCL between several.

`AGENTRL_SGLANG_PYTHON` names the Python that has SGLang; without it, it is this one.
"""

import os
import signal
import time
from array import array
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from threading import Timer

import pytest
import torch
from support.gaps import small_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.launch import SGLangLaunch
from agentrl.engine.remote.senders import Delivery, Route, Target, WeightsSender
from agentrl.engine.remote.sglang import SGLangEngine

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="no GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="one GPU")
three_gpus = pytest.mark.skipif(GPUS < 3, reason="fewer than three GPUs")

# As servers run, and read by NCCL once: before anything else in this process uses it.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
os.environ.setdefault("FLASHINFER_DISABLE_VERSION_CHECK", "1")

ROW = array("i", range(3, 200))
BF16 = torch.bfloat16


def tiny_qwen(seed, vocabulary):
    """Weights so large that two models say quite different things."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model that no test sends."""
    made = tmp_path_factory.mktemp("qwen") / "model"
    tokenizer = small_tokenizer()
    tiny_qwen(0, max(256, len(tokenizer))).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def policies(folder):
    """Two others, as float32 masters."""
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    return [tiny_qwen(seed, vocabulary) for seed in (1, 2)]


def weights(policy, gpu):
    return [(name, p.detach().to(f"cuda:{gpu}", BF16)) for name, p in policy.named_parameters()]


@torch.inference_mode()
def scores(policy, gpu=0):
    """By transformers in the server's precision."""
    model = tiny_qwen(0, policy.config.vocab_size)
    model.load_state_dict(policy.state_dict())
    model.to(f"cuda:{gpu}", BF16)
    ids = torch.tensor([list(ROW)], device=model.device)
    log_p = model(ids).logits[0, :-1].float().log_softmax(-1)
    return log_p.gather(-1, ids[0, 1:, None])[:, 0].cpu()


@contextmanager
def server_on(folder, *gpus):
    server = SGLangLaunch(
        str(folder),
        python=os.environ.get("AGENTRL_SGLANG_PYTHON", ""),
        dtype="bfloat16",
        gpus=gpus,
        memory=0.1,
        arguments=(
            *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
            "--disable-cuda-graph",
        ),
    ).start()
    try:
        yield server
    finally:
        server.stop()


class OneServer:
    """Keeps a server between tests, and stops it before another one starts.

    SGLang does not start on two GPUs if another server uses one of them.
    """

    def __init__(self, folder):
        self.folder, self.gpus, self.server = folder, (), None
        self.stack = ExitStack()

    def on(self, *gpus):
        if self.gpus != gpus:
            self.stop()
            self.server = self.stack.enter_context(server_on(self.folder, *gpus))
            self.gpus = gpus
        return self.server

    def stop(self):
        self.stack.close()
        self.gpus, self.server = (), None


@pytest.fixture(scope="module")
def one_server(folder):
    server = OneServer(folder)
    yield server
    server.stop()


@pytest.fixture
def on_first(one_server):
    return one_server.on(0)


@pytest.fixture
def on_second(one_server):
    return one_server.on(1)


def keys(server):
    return {"key": server.token, "admin_key": server.admin_token}


async def check(server, policies, gpu, **target):
    """Two policies in turn, in one bucket and in many: the server's scores are transformers'."""
    scored_rows = []
    ways = [(2**30, 0), (2**30, 1), (1, 0), (1, 1), (100_000, 0), (100_000, 1)]
    engine = SGLangEngine(
        server.url,
        vocabulary=policies[0].config.vocab_size,
        process=server,
        delivery=Delivery("memory", **target),
        **keys(server),
    )
    with closing(WeightsSender()) as sender:
        for version, (size, policy) in enumerate(ways, 1):
            route = Route(version, (engine.target,), bucket_bytes=size)
            engine.begin_update()
            sent = sender.send(weights(policies[policy], gpu), route)
            assert not sent.errors
            assert sent.size == sum(2 * p.numel() for p in policies[policy].parameters())
            engine.finish_update(route, sent)
            scored_rows.append(torch.tensor(await engine.score(ROW))[1:])
    first, other = scores(policies[0], gpu), scores(policies[1], gpu)
    assert (scored_rows[0] - first).abs().mean() < 0.05
    assert (scored_rows[1] - other).abs().mean() < 0.05
    assert (scored_rows[0] - other).abs().mean() > 0.5, "a control: the policies differ"
    for again, as_before in ((2, 0), (3, 1), (4, 0), (5, 1)):
        assert torch.equal(scored_rows[again], scored_rows[as_before])


def target_of(server, **target):
    return Target(server.url, server.token, server.admin_token, **target)


async def test_ipc(on_first, policies):
    await check(on_first, policies, 0, ranks=(0,))


def test_ipc_takes_no_memory_for_good(on_first, policies):
    admin = AdminClient(on_first.url, process=on_first, **keys(on_first))
    tensors = weights(policies[0], 0)
    sender, target = WeightsSender(), target_of(on_first, ranks=(0,))

    def send(version):
        assert not sender.send(tensors, Route(version, (target,), bucket_bytes=100_000)).errors

    for version in (1, 2):
        send(version)
    torch.cuda.synchronize()
    ours, (free, _) = torch.cuda.memory_allocated(0), torch.cuda.mem_get_info(0)
    for version in range(3, 23):
        send(version)
    assert torch.cuda.memory_allocated(0) == ours
    assert free - torch.cuda.mem_get_info(0)[0] < 2**26
    assert admin.ask("/model_info")["weight_version"] == "22"


@two_gpus
async def test_ipc_with_another_numbering_of_gpus(on_second, policies):
    await check(on_second, policies, 1, ranks=(0,))


@two_gpus
async def test_nccl(on_second, policies):
    await check(on_second, policies, 0)


@two_gpus
def test_a_default_group_is_neither_used_nor_disturbed(on_second, policies):
    admin = AdminClient(on_second.url, process=on_second, **keys(on_second))
    sender, target = WeightsSender(), target_of(on_second)
    device = torch.device("cuda:0")
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1, device_id=device
    )
    try:
        with closing(sender):
            for version, policy in ((50, policies[0]), (51, policies[1])):
                assert not sender.send(weights(policy, 0), Route(version, (target,))).errors
        ones = torch.ones(3, device=device)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
    finally:
        torch.distributed.destroy_process_group()
    assert admin.ask("/model_info")["weight_version"] == "51"


@two_gpus
async def test_ipc_to_a_model_on_two_gpus(one_server, policies):
    await check(one_server.on(0, 1), policies, 0, processes=2, ranks=(0, 0))


@three_gpus
async def test_nccl_to_a_model_on_two_gpus(one_server, policies):
    await check(one_server.on(1, 2), policies, 0, processes=2)


def send_to_the_dying(target, pid, folder, after):
    """In a process of its own, which torch and NCCL may want to end: it must end well."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    sender = WeightsSender()
    if after:
        assert not sender.send(weights(policy, 0), Route(1, (target,), bucket_bytes=1)).errors

    def halted():
        for i, named in enumerate(weights(policy, 0)):
            if i == after:
                # Stopped, it neither answers nor takes part; the kernel here waits for it.
                os.killpg(pid, signal.SIGSTOP)
                Timer(3, os.killpg, (pid, signal.SIGKILL)).start()
            yield named

    start = time.monotonic()
    sent = sender.send(halted(), Route(2, (target,), bucket_bytes=1))
    assert sent.errors, "sent to a server that is dead"
    print(f"after {time.monotonic() - start:.1f} s: {sent.errors}", flush=True)
    sender.close()
    assert time.monotonic() - start < 60
    # The GPU is free of what waited.
    if after:
        assert torch.ones(4, device="cuda:0").sum().item() == 4


@two_gpus
@pytest.mark.parametrize("after", [0, 3], ids=["before NCCL connects", "within a broadcast"])
def test_a_server_that_dies_is_an_error_in_bounded_time(folder, one_server, after):
    one_server.stop()
    with server_on(folder, 1) as server:
        arguments = (target_of(server), server.pid, folder, after)
        child = get_context("spawn").Process(target=send_to_the_dying, args=arguments)
        child.start()
        child.join(180)
        ended = child.exitcode
        child.kill()
        assert ended == 0
        assert not server.running
