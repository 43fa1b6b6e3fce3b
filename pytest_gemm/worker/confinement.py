"""Take rights from a process and its children: they write to one folder, have no network, and signal no other process.

Landlock (Linux 5.13) for files and for tracing other processes, from Linux 6.12 on for signals too; seccomp for
sockets, and for signals where Landlock has none of them.  Both hold for the calling thread and all that it starts.  See
landlock(7), seccomp(2) and bpf's classic instructions in linux/filter.h.
"""

from __future__ import annotations

import ctypes
import glob
import itertools
import os
import platform
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _SCOPE_SIGNAL = 1, 1, 1 << 1
# Of Landlock's rights to files those that change something: to write, to remove, to make, and from the second and the
# third version on to link elsewhere and to truncate.
_WRITE_FILE: Final = 1 << 1
_WRITES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_LATER: Final = {2: 1 << 13, 3: 1 << 14}
_WITH_SIGNALS: Final = 6
_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVILEGES = 22, 2, 38
# By architecture: its token, and the numbers of system calls.
_CALLS: Final = {
    "x86_64": (0xC000003E, {"socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
                            "io_uring_setup": 425, "kill": 62, "tgkill": 234, "tkill": 200, "pidfd_send_signal": 424,
                            "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297}),
    "aarch64": (0xC00000B7, {"socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
                             "io_uring_setup": 425, "kill": 129, "tgkill": 131, "tkill": 130, "pidfd_send_signal": 424,
                             "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240}),
}  # fmt: skip
# What a library writes to although it keeps nothing there; CUDA's driver names its threads in /proc/self.
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "nvidia*", "dri/*")
# Where compilers and libraries keep files.
_FOLDERS: Final = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def lacks() -> str:
    """What this system lacks for it; "" for nothing."""
    if platform.machine() not in _CALLS:
        return f"the numbers of system calls on {platform.machine()} are not known"
    if _version() < 1:
        return "this kernel has no Landlock (Linux 5.13, and landlock among /sys/kernel/security/lsm)"
    return ""


def confine(folder: str) -> None:
    """Confine this process and its later threads and children to a folder.

    Raises:
        OSError: where the system refuses it; the process keeps its rights then.
    """
    for name in _FOLDERS:
        os.environ[name] = folder
    tempfile.tempdir = None  # read again
    if inductor := sys.modules.get("torch._inductor.codecache"):  # which has read the variables when it was imported
        vars(inductor).update(_HEADER_DIR=f"{folder}/headers", _HEADER_LOCK_DIR=f"{folder}/headers/locks")
    _called(_LIBC.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    version = _version()
    writes = _WRITES | sum(right for since, right in _LATER.items() if version >= since)
    scopes = _SCOPE_SIGNAL if version >= _WITH_SIGNALS else 0
    attributes = struct.pack("<QQQ", writes, 0, scopes)
    rules = _called(_LIBC.syscall(_CREATE_RULESET, attributes, len(attributes) if scopes else 8, 0))
    _allow(rules, folder, writes)
    for path in ["/proc/self", *itertools.chain.from_iterable(glob.glob(f"/dev/{one}") for one in _DEVICES)]:
        _allow(rules, path, writes & (_WRITE_FILE | _LATER[3]))
    _called(_LIBC.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)
    code = b"".join(_filter(kills=not scopes))
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
    _called(_LIBC.prctl(_SET_SECCOMP, _FILTER, program, 0, 0))


def _version() -> int:
    return int(_LIBC.syscall(_CREATE_RULESET, None, 0, _VERSION))


def _called(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _allow(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    _called(_LIBC.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("<Qi", rights, opened), 0))
    os.close(opened)


def _filter(*, kills: bool) -> Iterator[bytes]:
    """The filter of system calls; ``kills``: signals are its matter."""
    token, numbers = _CALLS[platform.machine()]
    load, equal, above, leave = 0x20, 0x15, 0x35, 0x06
    denied, allowed = struct.pack("<HBBI", leave, 0, 0, 0x00050001), struct.pack("<HBBI", leave, 0, 0, 0x7FFF0000)
    number = struct.pack("<HBBI", load, 0, 0, 0)
    yield struct.pack("<HBBI", load, 0, 0, 4)
    yield struct.pack("<HBBI", equal, 1, 0, token)
    yield denied  # a call of another architecture has other numbers
    yield number
    yield struct.pack("<HBBI", above, 0, 1, 0x40000000)  # of x32
    yield denied
    never = ["ptrace", "process_vm_readv", "process_vm_writev", "io_uring_setup"]
    only = {"socket": int(socket.AF_UNIX)}
    if kills:
        never += ["tkill", "pidfd_send_signal"]
        only |= dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), os.getpid())
    for name in never:
        yield struct.pack("<HBBI", equal, 0, 1, numbers[name])
        yield denied
    for name, first in only.items():  # the first argument has to be this
        yield struct.pack("<HBBI", equal, 0, 4, numbers[name])
        yield struct.pack("<HBBI", load, 0, 0, 16)
        yield struct.pack("<HBBI", equal, 1, 0, first)
        yield denied
        yield number
    yield allowed
