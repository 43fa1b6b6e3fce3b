"""The CPU, as Linux describes it.  What a system does not report is empty or zero; nothing here raises.

This module reads from procfs and sysfs what psutil does not have: instruction sets, caches, the time that threads
waited, and the load of cores by their numbers.  (py-cpuinfo takes more than a second, and lists instruction sets under
further names: hardware keys would change with it.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import re
from pathlib import Path
from typing import Final

import psutil


@dataclasses.dataclass(frozen=True)
class Cpu:
    """A CPU.

    Attributes:
        model: the name as the vendor wrote it, ``AMD EPYC 7763 64-Core Processor``; "" on Arm, which has none.
        generation: what tells two CPUs apart whose name does not: ``f25m1`` (family and model) on x86, ``41d40``
            (implementer and part, hexadecimal) on Arm; "" where unknown.
        flags: instruction sets as Linux spells them, ``avx512f``.
        logical: cores that the system schedules on.
    """

    model: str = ""
    generation: str = ""
    flags: tuple[str, ...] = ()
    logical: int = 0

    @property
    def name(self) -> str:
        """The model, or else what Python reports of the processor."""
        return self.model or platform.processor() or platform.machine()


def read_cpuinfo(text: str) -> Cpu:
    """The CPU of the text of ``/proc/cpuinfo``: a paragraph of ``field : value`` for each logical core."""
    cores: list[dict[str, str]] = []
    for paragraph in text.split("\n\n"):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "processor" in fields:
            cores.append(fields)
    if not cores:
        return Cpu()
    first = cores[0]
    generation = ""
    if "cpu family" in first:
        generation = f"f{first['cpu family']}m{first.get('model', '')}"
    elif "CPU part" in first:
        generation = (first.get("CPU implementer", "") + first["CPU part"]).replace("0x", "")
    return Cpu(
        model=first.get("model name", ""),
        generation=generation,
        flags=tuple(first.get("flags", first.get("Features", "")).split()),
        logical=len(cores),
    )


@functools.cache
def cpu() -> Cpu:
    """The CPU of this machine; an empty :class:`Cpu` where there is no ``/proc/cpuinfo``."""
    try:
        return read_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return Cpu()


def waited() -> float | None:
    """Seconds that all threads of this process were ready to run and did not, since they began.

    The kernel counts it in nanoseconds, not in ticks, and core by core.

    Returns:
        ``None`` where nothing is counted.
    """
    found = [numbers[1] for numbers in _scheduled().values()]
    return sum(found) * 1e-9 if any(found) else None


def worked() -> dict[int, int]:
    """Nanoseconds that each thread of this process and each of its children and their children has run, by number.

    PyTorch's compilers are left out: they import it while the first kernels run already.
    """
    children = [one.pid for one in psutil.Process().children(recursive=True) if not _compiles(one)]
    return {task: spent for pid in (os.getpid(), *children) for task, spent in ran(pid).items()}


def _compiles(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("_inductor/compile_worker" in word for word in process.cmdline())
    return False


def ran(pid: int) -> dict[int, int]:
    """Nanoseconds that each thread of a process has run, as the kernel counts them, by number."""
    return {task: numbers[0] for task, numbers in _scheduled(pid).items()}


def is_own(task: int) -> bool:
    """Whether the number is that of a thread of this process."""
    return Path(f"/proc/self/task/{task}").exists()


def is_runnable(task: int) -> bool:
    """Whether a thread or process runs or waits for a core."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{task}/stat").read_text(encoding="utf-8").rpartition(") ")[2].startswith("R")
    return False


def task_name(task: int) -> str:
    """The name of a thread or process; its number where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{task}/comm").read_text(encoding="utf-8").strip()
    return str(task)


def _scheduled(pid: int | str = "self") -> dict[int, list[int]]:
    """Nanoseconds that each thread of a process has run, and waited for a core, by the thread's number."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
            found[int(path.parent.name)] = list(map(int, path.read_text(encoding="utf-8").split()))
    return found


TICKS: Final = os.sysconf("SC_CLK_TCK")


def busy_seconds(cores: set[int], proc: Path = Path("/proc")) -> dict[str, float]:
    """CPU seconds since the start of the system that ``cores`` were ``busy``, and those of them that were ``stolen``.

    psutil numbers the cores that are online from 0 on, which are other ones where some are offline.

    Args:
        cores: by number.
        proc: where procfs is mounted; see proc(5) for the columns of its ``stat``.

    Returns:
        Nothing where nothing is counted, as in some sandboxes.
    """
    busy = stolen = 0
    with contextlib.suppress(OSError):
        for line in (proc / "stat").read_text(encoding="utf-8").splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
                ticks = [int(field) for field in fields]
                # user nice system (idle iowait) irq softirq steal; guest time is counted under user.
                busy += sum(ticks[:3]) + sum(ticks[5:8])
                stolen += sum(ticks[7:8])
    return {"busy": busy / TICKS, "stolen": stolen / TICKS} if busy else {}


# How threads of OpenMP wait for one another, as its libraries are told.
_POLICY: Final = "OMP_WAIT_POLICY"
_WAITING: Final = (_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_set_here: dict[str, str] = {}


def wait_passively() -> None:
    """Have OpenMP's threads give up their core while they wait, unless the environment says how.

    Before torch is loaded, which reads it.
    A thread that spins keeps the thread that it waits for from the core that other processes leave.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ[_POLICY] = _set_here[_POLICY] = "passive"


def waiting() -> str:
    """How the environment has OpenMP's threads wait, as a part of a contract: ``-passive``; "" for as they are."""
    return "".join(f"-{os.environ[name].strip().lower()}" for name in _WAITING if name in os.environ)


def environment_as_found() -> dict[str, str]:
    """The environment of this process without what :func:`wait_passively` has set: that of a process that times."""
    return {name: value for name, value in os.environ.items() if _set_here.get(name) != value}


def cores() -> set[int]:
    """The cores that the threads of this process together may run on; OpenMP binds each of its own to one."""
    found = set(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= os.sched_getaffinity(int(task.name))
    return found


def outer_caches(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes that the caches beyond the first level can hold together; 0 where the system does not report them.

    Those of all cores that the threads of this process may run on are added: a CPU of several core complexes has a
    last-level cache for each, and one that is not inclusive holds other bytes than the second level.
    """
    found: dict[tuple[int, str], int] = {}
    for core in cores():
        for index in (root / f"cpu{core}" / "cache").glob("index[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                size = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
                if size:
                    amount = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
                    shared = (index / "shared_cpu_list").read_text().strip()
                    if (level := int((index / "level").read_text())) > 1:
                        found[level, shared] = amount
    return sum(found.values())


def slug(text: str) -> str:
    """``text`` in the characters of a folder: lower-case letters, digits, and single dashes between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
