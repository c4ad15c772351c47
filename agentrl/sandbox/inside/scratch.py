"""The scratch folder of a box, read and written from within; no way leads out of it."""

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
    """Write all of it, however long that takes."""
    while data:
        data = data[os.write(fd, data) :]


class Scratch:
    """The folder."""

    def __init__(self, folder):
        self.folder = folder
        self.top = os.open(folder, os.O_PATH | os.O_DIRECTORY)

    def unnamed(self, data):
        """A descriptor of a file that is in no folder, at its beginning.

        Where the folder is full, of a pipe: a command that makes room must still run.
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
            write_all(end, data)  # a pipe holds as much
            os.close(end)
        return fd

    def read(self, path, most):
        """The first so many bytes of a file."""
        fd = self._open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            _refuse_odd(fd)
            data = b""
            while len(data) < most:
                read = os.read(fd, min(CHUNK, most - len(data)))
                if not read:
                    break
                data += read
            return data
        finally:
            os.close(fd)

    def write(self, path, data):
        """Write a file, making the folders on the way."""
        self._make_folders(path)
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            _refuse_odd(fd)
            os.ftruncate(fd, 0)
            write_all(fd, data)
        finally:
            os.close(fd)

    def _open(self, path, flags, mode=0):
        """Open what is below; a link may lead anywhere there, and nowhere else."""
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
            above = self._open("/".join(parts[:depth]) or ".", os.O_PATH | os.O_DIRECTORY)
            try:
                with suppress(FileExistsError):
                    os.mkdir(parts[depth], dir_fd=above)
            finally:
                os.close(above)


def _refuse_odd(fd):
    """Pipes and the like would keep us waiting."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EACCES, "not a file")
