"""Take rights from a process and its children: they write to one folder and reach no other process.

Landlock (Linux 5.13) for files and for tracing other processes, from Linux 6.12 on for signals too; seccomp for
sockets, what belongs to a user (priorities, limits, System V's memory, queues, keys), and for signals where Landlock
has none of them.  Both hold for the calling thread and all that it starts.  See landlock(7), seccomp(2) and bpf's
classic instructions in linux/filter.h.
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
from collections.abc import Iterator, Sequence
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _SCOPES = 1, 1, 1 << 0 | 1 << 1  # names of sockets that are no files, and signals
# Of Landlock's rights to files those that change something: to write, to remove, to make, and from the second and the
# third version on to link elsewhere and to truncate.
_WRITE_FILE: Final = 1 << 1
_WRITES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
_LATER: Final = {2: 1 << 13, 3: 1 << 14}
_WITH_SIGNALS: Final = 6
_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVILEGES = 22, 2, 38
# The architectures that are known, with the token of each.
_TOKENS: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls with their numbers on these: what is refused, and what is where signals are the filter's matter.
_NEVER: Final = (
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, io_uring_setup 425 425, connect 42 203, "
    "shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, "
    "msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, "
    "add_key 248 217, request_key 249 218, keyctl 250 219"
)
_SIGNALS: Final = "tkill 200 130, pidfd_send_signal 424 424"
# What has an effect with 0 for the thread alone, the caller's: OpenMP binds others by it and would end with an error.
_IGNORED: Final = "sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274"
_ALL: Final = 0xFFFFFFFF
# Arguments that system calls have to have: place, bits, value.  A socket without connections would reach any other one.
_SOCKET: Final = ((0, _ALL, int(socket.AF_UNIX)), (1, 0xB, int(socket.SOCK_STREAM)))
_ONLY: Final = {
    "socket 41 198, socketpair 53 199": _SOCKET,
    "prlimit64 302 261": ((0, _ALL, 0),),
    "setpriority 141 140": ((0, _ALL, os.PRIO_PROCESS), (1, _ALL, 0)),
    "ioprio_set 251 30": ((0, _ALL, 1), (1, _ALL, 0)),
}
_KILLS: Final = "kill 62 129, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240"
# Requests that have the system signal another process: F_SETOWN and F_SETOWN_EX, FIOSETOWN and SIOCSPGRP.
_OWNERS: Final = {"fcntl 72 25": (8, 15), "ioctl 16 29": (0x8901, 0x8902)}
# What a library writes to although it keeps nothing there; CUDA's driver names its threads in /proc/self.
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty", "nvidia*", "dri/*")
# Where compilers and libraries keep files.
_FOLDERS: Final = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def lacks() -> str:
    """What this system lacks for it; "" for nothing."""
    if platform.machine() not in _TOKENS:
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
    scopes = _SCOPES if version >= _WITH_SIGNALS else 0
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
    load, equal, above, both, leave = 0x20, 0x15, 0x35, 0x54, 0x06
    column = 1 + list(_TOKENS).index(platform.machine())

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    def numbers(calls: str) -> list[int]:
        return [int(one.split()[column]) for one in calls.split(", ")]

    def unless(calls: str, arguments: Sequence[tuple[int, int, int]], otherwise: bytes) -> Iterator[bytes]:
        for call in numbers(calls):
            yield step(equal, call, 0, 4 * len(arguments) + 1)
            for place, bits, value in arguments:
                yield step(load, 16 + 8 * place) + step(both, bits) + step(equal, value, 1) + otherwise
            yield number

    denied, ignored, allowed = step(leave, 0x00050001), step(leave, 0x00050000), step(leave, 0x7FFF0000)
    number = step(load, 0)
    yield step(load, 4) + step(equal, _TOKENS[platform.machine()], 1) + denied  # another architecture has other numbers
    yield number + step(above, 0x40000000, 0, 1) + denied  # of x32
    for call in numbers(f"{_NEVER}, {_SIGNALS}" if kills else _NEVER):
        yield step(equal, call, 0, 1) + denied
    yield from unless(_IGNORED, ((0, _ALL, 0),), ignored)
    for calls, arguments in _ONLY.items():
        yield from unless(calls, arguments, denied)
    if kills:
        yield from unless(_KILLS, ((0, _ALL, os.getpid()),), denied)
        for calls, requests in _OWNERS.items():
            yield step(equal, numbers(calls)[0], 0, 2 * len(requests) + 2) + step(load, 24)
            yield b"".join(step(equal, one, 0, 1) + denied for one in requests) + number
    yield allowed
