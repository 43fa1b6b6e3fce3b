"""A run that compiles as on another machine says so, and a failure of it is run again on that."""

from __future__ import annotations

import pytest

from pytest_gemm.config import effect
from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Outcome, Status
from pytest_gemm.failures.text import Rerun
from pytest_gemm.plugin import plugin, reports, selection


def test_the_machine_is_in_ids_header_record_and_rerun_line(pytester: pytest.Pytester) -> None:
    option = "--gemm-set=run.machine=epyc-9554"
    run = plugin.run_of(pytester.parseconfigure("--gemm-backends=cpp,aten", option))
    settings, named = run.settings, "epyc-9554 (AMD EPYC 9554, server)"
    cpp, aten = settings.backends
    (case,) = selection._axes(cpp, settings, timed=False)
    assert case.who == "cpp@avx512_vnni@64t"
    assert [one.who for one in selection._axes(aten, settings, timed=False)] == ["aten"]
    made = selection.case_of(selection.Parameter(CaseId("cpp", "mm:f32:nn:8x8x8")), settings)
    assert made.request().machine == "epyc-9554"
    assert run.header().endswith(f"thread(s) a process; compiled as on {named}")
    assert reports.head(settings, ()).compiled_as == named
    again = {name: effect.rerun_options(settings, name, timed=False) for name in ("cpp", "aten")}
    assert option not in again["aten"]
    line = Rerun("test_it.py", again["cpp"]).line(Outcome(case, "rand", 0, Status.INCORRECT))
    assert option in line
    assert not {"--gemm-threads", "--gemm-isa"} & {word.partition("=")[0] for word in line.split()}
