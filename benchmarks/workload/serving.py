"""Options and measurements that the server benchmarks share."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.engine.base import Engine
from agentrl.engine.remote.sglang import SGLangEngine
from workload.timing import print_figure

GIB = 2**30


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument(
        "--small", action="store_true", help="small sizes, to check on a CPU that it works"
    )
    made.add_argument("--python", default="", help="the Python of an environment with SGLang")
    made.add_argument(
        "--launch", default="", help="arguments of the server as one text: --launch='--a b'"
    )
    made.add_argument(
        "--memory", type=float, default=0.4, help="the server's share of the GPU memory"
    )
    made.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "agentrl-models")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options; `device` becomes a device of this machine."""
    args = made.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def engine_keys(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config keys of a run with such a server."""
    return {
        "rollout.name": "sglang",
        "rollout.python": args.python,
        "rollout.launch": shlex.split(args.launch),
        "rollout.gpu_memory_utilization": args.memory,
        "trainer.device": args.device,
    }


def only(engine: Any) -> SGLangEngine:
    """Return the engine of the only server in a run's pool."""
    [replica] = engine.replicas
    assert isinstance(replica.engine, SGLangEngine)
    return replica.engine


def adapters(engine: Engine) -> int:
    """Return the number of adapters on the server, which lists them with the model."""
    return len(only(engine).admin.ask("/v1/models")["data"]) - 1


def others_memory() -> float:
    """Return the GiB of GPU memory used by other processes than this one; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / GIB


@contextmanager
def surviving(name: str) -> Iterator[None]:
    """Report an exception as a figure, and continue."""
    try:
        yield
    except Exception as e:
        traceback.print_exc()
        print_figure(f"{name}/failed", 1, "failure", error=f"{type(e).__name__}: {e}"[-3000:])
