"""SIGTERM ends a run as Ctrl-C does; that this leaves nothing behind is tried in ``test_workers.py``."""

from __future__ import annotations

import os
import signal
import time

from pytest_gemm.plugin import termination


def test_the_handler_is_installed_where_there_is_none_and_taken_away() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        one = termination.Termination()
        handler = signal.getsignal(signal.SIGTERM)
        assert handler is not signal.SIG_DFL
        termination.Termination().close()
        assert signal.getsignal(signal.SIGTERM) is handler, "the first one keeps the signal"
        one.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_process_ends_at_once() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    one = termination.Termination()
    try:
        child = os.fork()
        if child == 0:
            try:
                time.sleep(60)
            finally:
                os._exit(7)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        one.close()
        signal.signal(signal.SIGTERM, before)
