"""Sessions that do as they are asked and make the times up: what a run concludes from them takes no more.

Most tests have them answered in their own process (:class:`Process` in place of ``subprocess.Popen``).  Where the run
itself is another process, the hook of this module ends a session before it imports torch.
"""

from __future__ import annotations

import datetime
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pytest_gemm.config.config import SPEED_WORKER
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Status
from pytest_gemm.machine.key import hardware_key
from pytest_gemm.speed.data import Peaks, Sample, Session, session_text
from pytest_gemm.speed.request import SESSION, Request

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from made_up_sessions import pytest_cmdline_main
"""


def answer(folder: Path, request: Request) -> None:
    """Milliseconds of the environment's variables, give or take what differs between processes."""
    noise = random.Random(f"{request.group} {request.index}")

    def readings(name: str) -> tuple[float, ...]:
        return tuple(float(os.environ.get(name, "1")) * 1e-3 * noise.gauss(1.0, 0.003) for _ in range(6))

    def sample(case: CaseId) -> Sample:
        subject, other = readings("SUBJECT_MS"), readings("OTHER_MS")
        disturbed = os.environ.get("DISTURBED", "")
        floors = {name: float(os.environ.get(f"{name.upper()}_MS", "0")) * 1e-3 for name in ("least", "reading")}
        how: dict[str, Any] = {"disturbed": disturbed, **floors}
        return Sample(case, "cpu", Status.PASSED, None, subject, other, "aten", **how)

    session = Session(
        hardware_key("cpu", int(request.project.options.get("gemm_threads", 2))),
        {},
        "made-up",
        request.group,
        request.index,
        datetime.datetime.now(datetime.timezone.utc).isoformat(),
        request.commit,
        Peaks({"f32": 1e15}, 1e15),
        tuple(sample(one.case) for one in request.cases if request.timed),
        seconds=1.0,
    )
    (folder / SESSION).write_text(session_text(session), encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer, in the process of a session."""
    worker: Any = config.pluginmanager.get_plugin(SPEED_WORKER)
    if worker is None:
        return None
    answer(worker.folder, worker.request)
    return 0


class Process(subprocess.Popen):  # type: ignore[type-arg]  # of bytes
    """The process of a session, which has ended; any other process is a real one."""

    def __init__(self, args: Any, **how: Any) -> None:
        self._is_session = isinstance(args, list) and "pytest_gemm.speed.worker" in args
        if self._is_session:
            answer(Path(args[-1]).parent, Request.read(Path(args[-1])))
            self._child_created, self.returncode = False, 0
        else:
            super().__init__(args, **how)

    def poll(self) -> int | None:
        return 0 if self._is_session else super().poll()
