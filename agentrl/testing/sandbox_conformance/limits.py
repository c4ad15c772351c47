"""What programs may use, and what becomes of those that use more."""

from __future__ import annotations

from agentrl.sandbox import Limits, Sandbox
from agentrl.testing.sandbox_conformance.check import check, said


@check(limits=True)
async def _a_crash_has_its_signal(s: Sandbox) -> None:
    done = await s.run("import os; os.kill(os.getpid(), 11)")
    assert (done.exit_code, done.ended_by) == (-11, "signal"), done
    done = await s.run("import os; os.abort()")
    assert (done.exit_code, done.ended_by) == (-6, "signal"), done


@check(limits=True)
async def _memory_is_bounded(s: Sandbox) -> None:
    done = await s.run("x = bytearray(1 << 30); print('had it')", limits=Limits(memory_mb=256))
    assert not done.ok and "had it" not in done.stdout and "MemoryError" in done.stderr, done


@check(limits=True)
async def _processor_time_is_bounded(s: Sandbox) -> None:
    done = await s.run("while True: pass", limits=Limits(cpu_seconds=1, seconds=60))
    assert done.ended_by == "cpu" and done.exit_code < 0, done


@check(limits=True)
async def _a_flood_is_ended_and_cut(s: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        code = f"import sys\nprint('first', file=sys.{stream})\n"
        code += f"while True: print('x' * 999, file=sys.{stream})"
        done = await s.run(code, limits=Limits(output_bytes=10_000, seconds=30))
        assert done.ended_by == "output", done
        text = getattr(done, stream)
        assert text.startswith("first") and "left out" in text and len(text) < 11_000, len(text)


@check(limits=True)
async def _output_below_the_cap_is_whole(s: Sandbox) -> None:
    text = await said(s, "print('x' * 60_000)")
    assert text == "x" * 60_000 + "\n"


@check(limits=True)
async def _files_are_bounded(s: Sandbox) -> None:
    code = """
try:
    with open("big", "wb") as f:
        for _ in range(64): f.write(bytes(1 << 20))
    print("wrote it")
except OSError as e: print(type(e).__name__)
"""
    assert await said(s, code, limits=Limits(disk_mb=8)) == "OSError\n"


@check(limits=True)
async def _open_files_are_bounded(s: Sandbox) -> None:
    code = """
held = []
try:
    while len(held) < 5000: held.append(open("/dev/null"))
    print("all")
except OSError as e: print(e.strerror)
"""
    assert await said(s, code, limits=Limits(open_files=64)) == "Too many open files\n"
