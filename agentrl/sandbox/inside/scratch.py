"""Read and write the scratch folder of a box, inside the box. No path can leave the folder."""

import ctypes
import errno
import os
import stat
import struct
from contextlib import suppress

OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH = 0x02, 0x08
CHUNK = 65536

libc = ctypes.CDLL(None, use_errno=True)


def write_all(fd, data):
    """Write all the data. Blocks until the last byte is written."""
    data = memoryview(data)  # whose slices copy nothing
    while data:
        data = data[os.write(fd, data) :]


class Scratch:
    """The scratch folder."""

    def __init__(self, folder):
        self.folder = folder
        self.top = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def unnamed(self, data):
        """Return a descriptor of an unnamed file with this content, positioned at its start.

        If the folder is full, return the end of a pipe: a command that frees space must still run.
        """
        fd = -1
        try:
            fd = os.open(self.folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            write_all(fd, data)
            os.lseek(fd, 0, os.SEEK_SET)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            if e.errno != errno.ENOSPC or len(data) > CHUNK:
                raise
            fd, end = os.pipe()
            write_all(end, data)  # the buffer of a pipe holds CHUNK bytes
            os.close(end)
        return fd

    def read(self, path, max_bytes):
        """Return the first bytes of a file."""
        fd = self._open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _check_regular_file(fd)
            data = bytearray()
            while len(data) < max_bytes:
                read = os.read(fd, min(CHUNK, max_bytes - len(data)))
                if not read:
                    break
                data += read
            return data
        finally:
            os.close(fd)

    def write(self, path, data):
        """Write a file and create its parent folders."""
        self._make_folders(path)
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            _check_regular_file(fd)
            os.ftruncate(fd, 0)
            write_all(fd, data)
        finally:
            os.close(fd)

    def _open(self, path, flags, mode=0):
        """Open a path below the folder. Links that lead out of the folder are refused."""
        resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS
        how = struct.pack("<QQQ", flags | os.O_CLOEXEC, mode, resolve)
        fd = libc.syscall(OPENAT2, self.top, os.fsencode(path), how, len(how))
        if fd < 0:
            code = ctypes.get_errno()
            code = errno.EACCES if code in (errno.EXDEV, errno.ELOOP) else code
            raise OSError(code, os.strerror(code))
        return fd

    def _make_folders(self, path):
        parts = [part for part in path.split("/") if part not in ("", ".")][:-1]
        for depth in range(len(parts)):
            parent = self._open("/".join(parts[:depth]) or ".", os.O_PATH | os.O_DIRECTORY)
            try:
                with suppress(FileExistsError):
                    os.mkdir(parts[depth], dir_fd=parent)
            finally:
                os.close(parent)


def _check_regular_file(fd):
    """Refuse folders, pipes and devices. Reading from a pipe could block."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EACCES, "not a file")
