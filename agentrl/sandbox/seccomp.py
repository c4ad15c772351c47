"""A seccomp filter: the system calls that no program in a sandbox may make.

The filter is a list of denied calls and not of allowed ones, because a model may write any program.
It denies calls that reach other namespaces or processes, calls into large parts of the kernel that
such programs do not need, calls for memory that no limit counts, and calls that create objects that
outlive their processes. A denied call returns EPERM. Namespaces and rlimits bound all other calls.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`: the number of the call, the architecture, and the low half of
the first argument. Each argument takes 8 bytes."""

_FAMILIES = (1, 2, 10)
"""The allowed socket families (unix, inet, inet6). The network namespace has only a loopback.
Netlink, packet and vsock sockets reach the kernel or the host in other ways.
"""
_NAMESPACES = 0x7E020080
"""CLONE_NEW*, in the flags of clone(2)."""

# From 424 on, the numbers are the same on all machines.
_NEWER = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
_DENIED: dict[str, dict[str, int]] = {
    "x86_64": {
        "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "uselib": 134,
        "personality": 135, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156,
        "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
        "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
        "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "ioprio_set": 251, "migrate_pages": 256, "unshare": 272, "move_pages": 279,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "lookup_dcookie": 18, "ioprio_set": 30, "umount2": 39, "mount": 40, "pivot_root": 41,
        "nfsservctl": 42, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89,
        "personality": 92, "unshare": 97,
        "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
        "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "mq_open": 180, "msgget": 186, "semget": 190,
        "shmget": 194, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238,
        "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_MACHINES = {
    # AUDIT_ARCH, and the numbers of clone and socket.
    "x86_64": (0xC000003E, 56, 41),
    "aarch64": (0xC00000B7, 220, 198),
}
_CLONE3 = 435
# For each call, its number and how many of its first arguments must be 0, so that the call concerns
# the calling process. Otherwise a program could limit the files or the CPU time of process 1, which
# runs as the same user.
_SELF_ONLY = {
    "x86_64": {
        "setpriority": (141, 2), "sched_setparam": (142, 1), "sched_setscheduler": (144, 1),
        "sched_setaffinity": (203, 1), "prlimit64": (302, 1), "sched_setattr": (314, 1),
    },
    "aarch64": {
        "sched_setparam": (118, 1), "sched_setscheduler": (119, 1), "sched_setaffinity": (122, 1),
        "setpriority": (140, 2), "prlimit64": (261, 1), "sched_setattr": (274, 1),
    },
}  # fmt: skip
_X32 = 0x40000000
"""The x32 ABI has other numbers for the same calls, from this one on."""


@cache
def seccomp_filter(machine: str = "") -> bytes:
    """Return the filter in the format of `bwrap --seccomp`: an array of `struct sock_filter`.

    Args:
        machine: the machine as in `uname -m`; by default this one.

    Raises:
        KeyError: the numbers of this machine's system calls are not known.
    """
    machine = machine or platform.machine()
    arch, clone, socket = _MACHINES[machine]
    denied = {**_DENIED[machine], **_NEWER}
    code: list[tuple[int, int, int, int]] = []

    def deny(error: int) -> tuple[int, int, int, int]:
        return (_RETURN, 0, 0, _ERRNO | error)

    code += [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), deny(errno.EPERM)]
    code += [(_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), deny(errno.ENOSYS)]
    for number in sorted(denied.values()):
        code += [(_EQUAL, 0, 1, number), deny(errno.EPERM)]
    # A filter cannot read the flags of clone3 in memory. Without clone3, libraries use clone.
    code += [(_EQUAL, 0, 1, _CLONE3), deny(errno.ENOSYS)]
    code += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, _ARGUMENT), (_ANY_BIT, 0, 1, _NAMESPACES)]
    code += [deny(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    for number, count in _SELF_ONLY[machine].values():
        code += [(_EQUAL, 0, 3 * count + 1, number)]
        for i in range(count):
            code += [(_LOAD, 0, 0, _ARGUMENT + 8 * i), (_EQUAL, 1, 0, 0), deny(errno.EPERM)]
        code += [(_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 2 + len(_FAMILIES), socket), (_LOAD, 0, 0, _ARGUMENT)]
    code += [(_EQUAL, len(_FAMILIES) - i, 0, f) for i, f in enumerate(_FAMILIES)]
    code += [deny(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
