"""The table of machines."""

from __future__ import annotations

from pytest_gemm.machine.isa import ISAS
from pytest_gemm.machine.machines import machines


def test_each_row_is_a_whole_cpu_or_a_whole_gpu() -> None:
    for one in machines().values():
        of_cpu, of_gpu = (one.threads, one.l1d, one.l2, one.l3, one.isa), (one.multiprocessors, one.shared_memory)
        assert all(of_cpu) != all(of_gpu), one
        assert any(of_cpu) != any(of_gpu), one
        assert one.isa in {*ISAS, ""}, one
        assert one.l1d <= one.l2, one
        assert one.shared_memory <= 227, one  # KiB: no block has more, on any GPU of NVIDIA's up to sm_100
