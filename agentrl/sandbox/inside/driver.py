"""The driver of a box: it runs programs inside the box and kills programs that take too long.

The driver is process 1 of a PID namespace, or the subreaper of its programs (`unsafe-subprocess`).
Requests and answers are JSON after four bytes of length, on descriptors that programs do not
inherit. The driver is not dumpable, so programs cannot read its memory. As process 1, it cannot be
killed by programs. Between requests, all programs are stopped, so that they use no CPU time.
"""

import base64
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from descendants import adopt_orphans, descendants, end_all
from scratch import Scratch, write_all

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
CHUNK = 65536
SCRIPT = "/proc/self/fd/3"

libc = ctypes.CDLL(None)


def to_base64(data):
    """Encode bytes for JSON."""
    return base64.b64encode(data).decode("ascii")


class Driver:
    """Serves the requests of the process that opened the box."""

    def __init__(self, settings):
        self.settings = settings
        self.folder = settings["folder"]
        self.interpreter = 0
        self.pipes = []
        self.children, self.statuses = set(), {}
        self.requests, self.answers = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        adopt_orphans()
        self.wakeups, waker = os.pipe()
        os.set_blocking(self.wakeups, False)
        os.set_blocking(waker, False)
        # Process 1 receives only signals that it handles, and Python handles SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.scratch = Scratch(self.folder)
        if settings.get("filter"):
            _install_filter(base64.b64decode(settings["filter"]))

    # Requests

    def serve(self):
        """Serve requests until the request "close" or the end of the input."""
        while True:
            request = self._read_request()
            if request["do"] == "stop":  # the program that it should stop has already ended
                continue
            try:
                self._signal_all(signal.SIGCONT)
                answer = getattr(self, "do_" + request.pop("do"))(**request)
            except OSError as e:
                answer = {"errno": e.errno, "error": e.strerror}
            self._freeze()
            text = json.dumps(answer).encode("ascii")
            write_all(self.answers, struct.pack("<I", len(text)) + text)

    def _read_request(self):
        (length,) = struct.unpack("<I", self._read_exactly(4))
        request = json.loads(self._read_exactly(length))
        if request["do"] == "close":
            end_all(0, self._reap)
            os._exit(0)
        return request

    def _read_exactly(self, count):
        data = bytearray()
        while len(data) < count:
            read = os.read(self.requests, min(CHUNK, count - len(data)))
            if not read:  # the process that opened the box was killed, so delete its folder
                end_all(0, self._reap)
                if self.settings["remove"]:
                    os.execvp("rm", ["rm", "-rf", "--", self.settings["remove"]])
                os._exit(0)
            data += read
        return data

    def do_hello(self, **settings):
        """Change settings, and answer that the driver runs."""
        self.settings.update(settings)
        return {}

    def do_cell(self, code, stdin, seconds):
        """Run Python code in the interpreter that keeps its variables."""
        if not self.interpreter:
            self._start_interpreter()
        to_cells, done, out, err = self.pipes
        _drain(done)
        mark = os.urandom(16)
        text = json.dumps({"code": code, "stdin": stdin, "mark": mark.hex()}).encode("ascii")
        frame = struct.pack("<I", len(text)) + text
        pid = self.interpreter
        answer = self._watch(pid, seconds, out, err, send=(to_cells, frame), done=(done, mark))
        if answer["ended_by"] or pid in self.statuses:
            end_all(0, self._reap)
            answer["lost"] = True
            self._forget_interpreter()
        return answer

    def do_script(self, argv, code, stdin, seconds, path=""):
        """Run a program, which reads its code from `path`, or from SCRIPT."""
        fds = []
        if path:
            with open(path, "wb") as file:
                file.write(code.encode("utf-8", "surrogatepass"))
        else:
            fds = [self.scratch.unnamed(code.encode("utf-8", "surrogatepass"))]
        stdin_fd = self.scratch.unnamed(stdin.encode("utf-8", "surrogatepass")) if stdin else None
        pid, out, err = self._start(argv, stdin_fd, fds, cpu=self.settings["cpu_seconds"])
        for fd in fds + ([] if stdin_fd is None else [stdin_fd]):
            os.close(fd)
        answer = self._watch(pid, seconds, out, err)
        if answer["ended_by"]:
            end_all(self.interpreter, self._reap)
        self._forget(pid)
        os.close(out)
        os.close(err)
        return answer

    def do_read(self, path, max_bytes):
        """Read a file."""
        return {"data": to_base64(self.scratch.read(path, max_bytes))}

    def do_write(self, path, data):
        """Write a file."""
        self.scratch.write(path, base64.b64decode(data))
        return {}

    # Programs

    def _start_interpreter(self):
        code_in, code_out = os.pipe()
        done_in, done_out = os.pipe()
        argv = [self.settings["python"], "-s", self.settings["cells"]]
        pid, out, err = self._start(argv, None, [code_in, done_out], cpu=None)
        os.close(code_in)
        os.close(done_out)
        os.set_blocking(code_out, False)
        os.set_blocking(done_in, False)
        self.interpreter, self.pipes = pid, [code_out, done_in, out, err]

    def _forget_interpreter(self):
        for fd in self.pipes:
            os.close(fd)
        self._forget(self.interpreter)
        self.interpreter, self.pipes = 0, []

    def _forget(self, pid):
        self.children.discard(pid)
        self.statuses.pop(pid, None)

    def _start(self, argv, stdin, fds, cpu):
        """Start a program with `fds` as descriptors 3 and up; return its pid, stdout, stderr."""
        out_in, out_out = os.pipe()
        err_in, err_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(argv, stdin, [out_out, err_out, *fds], cpu)
            except BaseException as e:
                os.write(2, (f"{argv[0]}: {e}\n").encode())
            os._exit(127)
        self.children.add(pid)
        os.close(out_out)
        os.close(err_out)
        os.set_blocking(out_in, False)
        os.set_blocking(err_in, False)
        return pid, out_in, err_in

    def _become(self, argv, stdin, fds, cpu):
        # Without a namespace that ends with the driver, stopped programs would outlive it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # Copy them to high numbers first, so that they do not overwrite each other.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100) for fd in fds]
        if stdin is not None:
            os.dup2(stdin, 0)
        for number, fd in enumerate(high, start=1):
            os.dup2(fd, number)
        os.closerange(len(high) + 1, 1024)
        os.chdir(self.folder)
        s = self.settings
        limits = {
            resource.RLIMIT_AS: s["memory_mb"] << 20,
            resource.RLIMIT_FSIZE: s["disk_mb"] << 20,
            resource.RLIMIT_NOFILE: s["open_files"],
            resource.RLIMIT_CORE: 0,
        }
        if s["processes"]:
            limits[resource.RLIMIT_NPROC] = s["processes"] + 1
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if cpu:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
        # In a container, the PATH is that of its image.
        os.execvpe(argv[0], argv, {"PATH": os.environ.get("PATH", ""), **s["environment"]})

    def _watch(self, pid, seconds, out, err, send=(-1, b""), done=(-1, b"")):
        """Wait until a program ends or reports that it is done, and read its output."""
        start = time.monotonic()
        output = {out: bytearray(), err: bytearray()}
        waiting, to_send = {out, err}, send[1]
        ended_by, code, report = "", None, bytearray()
        while code is None and not ended_by:
            remaining = start + seconds - time.monotonic()
            if remaining <= 0:
                ended_by = "time"
                break
            reads = [*waiting, self.wakeups, self.requests] + ([done[0]] if done[0] >= 0 else [])
            ready, writable, _ = select.select(reads, [send[0]] if to_send else [], [], remaining)
            for fd in ready:
                if fd in output:
                    if not _read_into(fd, output[fd]):
                        waiting.discard(fd)
                    if len(output[fd]) > self.settings["output_bytes"]:
                        ended_by = "output"
                elif fd == self.requests:
                    self._read_request()  # "stop", or the end of the input
                    ended_by = "time"
                elif fd == done[0]:
                    _read_into(fd, report)
                    # A program may write to this pipe too, but it does not know the mark.
                    _, mark, after = report.rpartition(done[1])
                    if mark and len(after) >= 4:
                        code = struct.unpack("<i", after[:4])[0]
                    del report[: -2 * len(done[1])]
            if writable:
                with suppress(BlockingIOError, BrokenPipeError):
                    to_send = to_send[os.write(send[0], to_send) :]
            self._reap()
            if code is None and pid in self.statuses:
                code = self.statuses[pid]
        seconds_run = time.monotonic() - start
        if not ended_by:
            for fd in waiting:
                while len(output[fd]) <= self.settings["output_bytes"] and _read_into(
                    fd, output[fd]
                ):
                    pass
        return {
            "stdout": to_base64(bytes(output[out])),
            "stderr": to_base64(bytes(output[err]).replace(SCRIPT.encode() + b": ", b"bash: ")),
            "exit_code": -signal.SIGKILL if ended_by else code,
            "ended_by": ended_by,
            "seconds": seconds_run,
            "lost": False,
        }

    # Processes

    def _reap(self):
        _drain(self.wakeups)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
            if pid in self.children:
                self.statuses[pid] = code

    def _signal_all(self, number):
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _freeze(self):
        for _ in range(20):
            running = [pid for pid, state in descendants().items() if state not in (b"T", b"Z")]
            if not running:
                return
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(0.0005)


def _install_filter(code):
    """Apply a filter of system calls to this process and its programs."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0
    ):
        sys.exit("the filter of system calls cannot be installed")


def _read_into(fd, buffer):
    """Read once, and return whether there was data."""
    try:
        read = os.read(fd, CHUNK)
    except BlockingIOError:
        return False
    buffer += read
    return bool(read)


def _drain(fd):
    # One read empties a pipe. A loop could be kept busy by a program that writes without end.
    _read_into(fd, bytearray())


if __name__ == "__main__":
    Driver(json.loads(sys.argv[1])).serve()
