r"""A shell and files in a scratch folder of the sandbox, one folder per episode.

    $ agentrl tools call run '{"command": "wc -w a.txt"}' --file shelf:shell \
        --create-kwargs '{"files": {"a.txt": "three short words"}}'
    3 a.txt

The section `sandbox` sets the limits of a command.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping

from agentrl import ToolError, tool
from agentrl.sandbox import Box, Completed, Sandbox
from agentrl.sandbox.report import report

MAX_COMMAND = 20_000
MAX_READ = 16_384
MAX_FILES = 200


@tool(timeout=120)
class Shell:
    """A scratch folder without network access, created by the first call.

    A row may define its files: `create_kwargs={"files": {"notes/a.txt": "text"}}`.
    """

    def __init__(self, sandbox: Sandbox, files: Mapping[str, str] | None = None) -> None:
        self.sandbox = sandbox
        self.files = {path: text.encode() for path, text in (files or {}).items()}
        self.box: Box | None = None

    async def run(self, command: str) -> str:
        """Run a bash command in the working folder and return its output.

        There is no network access. Files are kept between calls. Each command starts in the same
        folder.

        Args:
            command: the command, for example "grep -c error app.log"
        """
        if len(command) > MAX_COMMAND:
            raise ToolError(f"the command has {len(command)} characters, maximum {MAX_COMMAND}")
        return report(await self._bash(command))

    async def read_file(self, path: str) -> str:
        """Read a text file in the working folder.

        Args:
            path: the path, for example "notes/a.txt"
        """
        box = await self._open_box()
        try:
            content = await box.read(path, MAX_READ)
        except (OSError, ValueError) as e:
            raise ToolError(_describe_error(path, e)) from None
        text = content.decode("utf-8", "replace")
        if len(content) == MAX_READ:
            text += f"\n[first {MAX_READ} bytes shown; use `run` to read other parts]"
        return text or "(empty file)"

    async def write_file(self, path: str, content: str) -> str:
        """Write a text file in the working folder. An existing file is overwritten.

        Args:
            path: the path, for example "notes/a.txt"
            content: the full text of the file
        """
        box = await self._open_box()
        encoded = content.encode()
        try:
            await box.write(path, encoded)
        except (OSError, ValueError) as e:
            raise ToolError(_describe_error(path, e)) from None
        return f"Wrote {len(encoded)} bytes to {path}"

    async def list_files(self, path: str = ".") -> str:
        """List the files in a folder and its subfolders, with their sizes in bytes.

        Args:
            path: the folder to list
        """
        find = f"find {shlex.quote('./' + path)} -type f -printf '%s %p\\n'"
        completed = await self._bash(f"{find} | head -n {MAX_FILES + 1} | sort -k 2")
        sized = (line.partition(" ") for line in completed.stdout.splitlines())
        lines = [f"{size} {posixpath.normpath(file)}" for size, _, file in sized]
        if not lines:
            return report(completed) if completed.stderr else "(no files)"
        if len(lines) > MAX_FILES:
            lines[MAX_FILES:] = [f"[more than {MAX_FILES} files; list a subfolder]"]
        return "\n".join(lines)

    async def close(self) -> None:
        """End all commands and delete the folder."""
        if self.box is not None:
            await self.box.aclose()

    async def _bash(self, command: str) -> Completed:
        box = await self._open_box()
        return await box.run(command, language="bash")

    async def _open_box(self) -> Box:
        if self.box is None:
            self.box = await self.sandbox.open(files=self.files)
        return self.box


def _describe_error(path: str, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{path!r}: {reason}"
