"""Operations and bytes of a problem, and what the measured peaks make of them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from pytest_gemm.core.case_id import CaseId
from pytest_gemm.core.outcome import Status
from pytest_gemm.machine.gpus import Gpu
from pytest_gemm.machine.processor import Cpu
from pytest_gemm.operands import dtypes, tensors
from pytest_gemm.operands.distributions import distributions_for
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.speed import roofline
from pytest_gemm.speed.data import Peaks, Sample
from pytest_gemm.speed.roofline import Work
from pytest_gemm.speed.timing import cuda

# 1 TFLOP/s in f32, 2 in bf16; 100 GB/s.
PEAKS = Peaks({"f32": 1e12, "bf16": 2e12, "f64": 5e11, "i8": 3e12}, 1e11)


@pytest.mark.parametrize(
    "line",
    [
        "mm:f32:nn:17x33x65",
        "mm:f16:tt:17x33x65:relu+add:a.padded+offset:b.padded",
        "mm:bf16:nt:33x33x65:b.alias_t",
        "mm:f32:nn:17x33x33:mul+add:r0.alias",
        "mm:f32-f32-bf16:nn:17x33x65:bias",
        "addmm:f32:nn:17x33x65:bias-m1+beta-2",
        "bmm:bf16:nn:3x17x33x65:a.broadcast",
        "bmm:bf16:nn:3x17x33x65:cast-f32+add+cast-bf16+sub:b.broadcast",
        "baddbmm:f32:nn:3x17x33x65:bias-mn",
        "linear:f32:nt:3x17x33x65:bias+gelu",
        "linear:bf16:nt:17x33x65:bias+cast-f32+relu:program.multi_output",
        "int_mm:i8-i8-i32:nt:32x32x64:cast-f32+relu",
        "woq_int8:bf16-i8-bf16:nt:17x33x65",
        "scaled_mm:f8e4m3fn-f8e4m3fn-bf16:nt:16x32x64:bias:quant.rowwise",
        "scaled_mm:f8e4m3fn-f8e5m2-f32:nt:16x32x64:quant.tensorwise",
        "grouped_mm:bf16:nn:3x16x32x64",
    ],
)
def test_bytes_are_those_of_the_operands_and_the_result(line: str) -> None:
    problem = Problem.parse(line)
    given = tensors.make(problem, distributions_for(problem)[0], 0)
    out = torch.float32 if problem.op.name == "scaled_mm" else dtypes.torch_dtype(problem.dtypes.out)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of any types; ATen's own are not all to be trusted with such shapes."""
        return torch.matmul(a.double(), b.double()).to(out)

    result = program.build(problem, product)(**program.args(problem, given))
    results = result if isinstance(result, tuple) else (result,)
    # The views into the storages: what is expanded is there once, padding and guards are not.
    moved = sum(guarded.view.nbytes for guarded in given.buffers) + sum(one.nbytes for one in results)
    assert roofline.work(problem).bytes == moved


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("mm:f32:nn:2x3x4", Work(48, 4 * (8 + 12 + 6))),
        ("bmm:f16:nn:5x2x3x4:relu", Work(240, 5 * 2 * (8 + 12 + 6))),
        ("mm:f32:nn:2x3x0", Work(0, 24)),
        ("addmm:f32:nn:2x3x4:bias-mn+beta-0", Work(48, 104)),  # such a bias is not read
        # Two values in a byte; for each of 3 columns and 2 groups of 128 a scale and a zero point.
        ("woq_int4:bf16-i4-bf16:nt:2x3x256:quant.group", Work(3072, 2 * 512 + 384 + 24 + 12)),
    ],
)
def test_work_by_hand(line: str, work: Work) -> None:
    assert roofline.work(Problem.parse(line)) == work


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("mm:f32:nn:8x8x8", "f32"),
        ("mm:f32:nn:8x8x8:math.tf32", "tf32"),
        ("mm:f32-f32-bf16:nn:8x8x8", "bf16"),
        ("mixed_mm:i8-f16-f16:nt:8x8x8", "f16"),
        ("int_mm:i8-i8-i32:nt:8x8x8", "i8"),
    ],
)
def test_the_rate_is_that_of_what_is_multiplied(line: str, name: str) -> None:
    assert roofline.dtype_name(Problem.parse(line)) == name


@pytest.mark.parametrize(
    ("work", "name", "seconds", "bound"),
    [
        (Work(1e12, 1e9), "f32", 1.0, "compute"),
        (Work(1e12, 1e9), "bf16", 0.5, "compute"),
        (Work(1e9, 1e11), "bf16", 1.0, "memory"),
        (Work(3e12, 1e9), "u8", 1.0, "compute"),  # the units of i8
        (Work(1e12, 1e9), "tf32", 1.0, "compute"),  # what f32 reaches, it reaches too
        (Work(1e12, 1e9), "f16", None, None),
    ],
)
def test_the_later_of_both_peaks_is_what_can_be_attained(
    work: Work, name: str, seconds: float | None, bound: str | None
) -> None:
    assert roofline.limit(work, name, PEAKS) == (None if seconds is None else (seconds, bound))
    assert roofline.limit(work, name, Peaks(PEAKS.flops)) is None


@pytest.mark.parametrize(
    ("line", "peaks", "rate"),
    [
        ("mm:f32:nn:64x64x64", {"f32": 1e12}, 1e12),
        ("mm:f64:nn:64x64x64", {"f32": 1e12, "f64": 5e11}, 5e11),
        ("mm:f16:nn:64x64x64", {"f32": 1e12, "f16": 1e10}, 2e12),  # PyTorch may be bad at a type, and a kernel not
        ("mm:f16:nn:64x64x64", {"f32": 1e12}, None),
        # The rates of an H200: PyTorch's int8 product was measured at 952 T/s, and CUTLASS reached 1266.
        ("int_mm:i8-i8-i32:nn:64x64x64", {"f32": 50.9e12, "f16": 713e12, "i8": 952e12}, 1426e12),
        ("mm:f32:nn:64x64x64", {"f32": 1e12, "bf16": 2.4e13}, 8e12),  # three products of half the width each
        ("woq_int8:f32-i8-f32:nt:64x64x64", {"f32": 1e12, "bf16": 2.4e13}, 12e12),  # two: the weight is narrow
        ("da8w4:f32-i4-f32:nt:64x64x128:quant.group", {"f32": 1e12, "i8": 4e12}, 4e12),  # it multiplies 8 bits
        ("mm:f32:nt:64x64x64:b.alias_t", {"f32": 1e12}, 2e12),
        ("addmm:f32:nn:64x64x64:bias+alpha-0", {"f32": 1e12}, None),
    ],
)
def test_operations_take_what_the_best_measured_rate_allows(
    line: str, peaks: dict[str, float], rate: float | None
) -> None:
    problem = Problem.parse(line)
    expected = 0.0 if rate is None else problem.shape.flops / (1.3 * rate)
    assert roofline.floor(problem, Peaks(peaks), "cpu").computing == pytest.approx(expected)


@pytest.mark.parametrize(
    ("device", "cache", "sets", "crossing"),
    [
        ("cpu", 16, 1, 1.0),  # of 17 MiB
        ("cpu", 32, 1, 0.0),
        ("cpu", 0, 1, 0.0),  # its size is not known
        ("cuda", 50, 6, 17 - 50 / 6),  # six sets cross the bus but for what the cache keeps of them
        ("cuda", 16, 2, 9.0),
    ],
)
def test_bytes_that_no_cache_holds_take_what_the_memory_allows(
    device: str, cache: int, sets: int, crossing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "cache_bytes", lambda _: cache << 20)
    monkeypatch.setattr("pytest_gemm.speed.timing.cuda.l2_cache_bytes", lambda: cache << 20)
    problem = Problem.parse("mm:f32:nn:64x2048x2048")
    assert roofline.work(problem).bytes == 17 << 20
    assert cuda.rotation(17 << 20, "cuda") == sets or device == "cpu"
    found = roofline.floor(problem, PEAKS, device).reading
    assert found == pytest.approx(crossing * (1 << 20) / (1.3 * 1e11))
    assert roofline.floor(Problem.parse("grouped_mm:f32:nn:4x64x2048x2048"), PEAKS, device).reading == 0.0


def planted(monkeypatch: pytest.MonkeyPatch, flags: str, cores: int = 1, gpu: Gpu | None = None) -> None:
    """The machine has such a CPU, and such a GPU of ten multiprocessors."""
    monkeypatch.setattr("pytest_gemm.machine.processor.cpu", lambda: Cpu(flags=tuple(flags.split())))
    monkeypatch.setattr("pytest_gemm.machine.processor.cores", lambda: range(cores))
    monkeypatch.setattr(roofline, "_gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=10))


@pytest.mark.parametrize(
    ("line", "flags", "products"),
    [
        ("mm:f32:nn:64x64x64", "avx2", 16),  # two units of eight
        ("mm:f32:nn:64x64x64", "avx2 avx512f", 32),
        ("mm:f64:nn:64x64x64", "avx2 avx512f", 16),
        ("mm:bf16:nn:64x64x64", "avx2 avx512f", 64),
        ("mm:bf16:nn:64x64x64", "avx2 avx512f amx_tile", 512),
        ("int_mm:i8-i8-i32:nt:64x64x64", "avx2 avx512f amx_tile", 1024),
        ("mm:f32:nn:64x64x64", "avx2 avx512f amx_tile", 512 / 3),  # of two pieces each
        ("mm:f32:nn:64x64x64:math.tf32", "avx2 avx512f amx_tile", 512),
    ],
)
def test_the_least_time_is_that_of_the_units_at_the_highest_clock(
    line: str, flags: str, products: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, flags, cores=3)
    units = roofline.units("cpu")
    assert units is not None
    seconds = 64**3 / (products * 3 * 6.2e9)
    assert roofline.least_seconds(Problem.parse(line), units) == pytest.approx(seconds / 1.3)


@pytest.mark.parametrize(("capability", "clock", "flops"), [("9.0", 1.98e9, 81.1e12), ("9.0", 0.0, 0), ("6.0", 1e9, 0)])
def test_a_machine_that_is_not_known_has_no_least_time(
    capability: str, clock: float, flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, "neon", gpu=Gpu(0, "GPU-1", "planted", "1", capability, highest_clock=clock))
    assert roofline.units("cpu") is None
    units = roofline.units("cuda")
    assert (units is not None) == bool(flops)
    if units is not None:  # ten of an H100's 132 multiprocessors, of which the data sheet says 989 TFLOP/s at 1.83 GHz
        problem = Problem.parse("mm:f16:nn:1024x1024x1024")
        assert roofline.work(problem).flops / roofline.least_seconds(problem, units) == pytest.approx(
            1.3 * flops, rel=0.01
        )


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("mm:f32:nt:64x64x64:b.alias_t", 1 / 2),  # a symmetric result
        ("bmm:f32:nn:4x64x64x64:a.broadcast:b.broadcast", 1 / 4),
        ("mm:f32:nn:64x64x64:a.tril", 0),
        ("addmm:f32:nn:64x64x64:bias+alpha-0", 0),
        ("bmm:f32:nn:4x64x64x64:b.broadcast", 1),
    ],
)
def test_what_a_kernel_may_leave_out_does_not_count(line: str, share: float) -> None:
    problem, units = Problem.parse(line), roofline.Units(1e12, 0.0)
    assert roofline.least_seconds(problem, units) == pytest.approx(share * problem.shape.flops / (1.3 * 2e12 / 32))


@pytest.mark.parametrize("line", ["mm:f32:nn:{0}", "mm:bf16:nn:{0}", "mm:f16:nn:{0}", "int_mm:i8-i8-i32:nn:{0}"])
def test_pytorch_s_own_products_take_longer_than_the_least_time(line: str) -> None:
    problem = Problem.parse(line.format("768x768x768"))
    units = roofline.units("cpu")
    if units is None:
        pytest.skip("this CPU is not known")
    rate = roofline._rate_of_product(problem, "cpu", 0.2)
    assert problem.shape.flops / rate.value > roofline.least_seconds(problem, units)


@pytest.mark.parametrize(
    ("sessions", "says"),
    [
        ([[1.0, 2.0, 1.0, 2.0]], "every window of 1 session is faster than this machine can multiply: 1.50 s a call"),
        ([[1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 1.0, 1.0]], "every window of 2 sessions"),
        ([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0]], None),  # one window of one session
        ([], None),
    ],
)
def test_a_time_is_impossible_in_every_window_or_not_at_all(sessions: list[list[float]], says: str | None) -> None:
    case = CaseId("cpp", "mm:f32:nn:8x8x8")
    samples = [
        Sample(case, "cpu", Status.PASSED, subject=tuple(readings), windows=(2, 2), least=2.75) for readings in sessions
    ]
    reason = roofline.impossible(samples)
    assert (reason is None) == (says is None)
    if reason is not None and says is not None:
        assert says in reason.text
        assert roofline.impossible([*samples, replace(samples[0], least=None)]) is None


@pytest.mark.parametrize(
    ("floors", "says"),
    [
        ({"computing": 2.0}, "1.00 s a call in one, its operations take at least 2.00 s at the rate"),
        (
            {"computing": 1.5, "reading": 2.0},
            "2.00 s from memory: the kernel reads fewer bytes than its operands have",
        ),
        ({"computing": 2.0, "least": 0.5}, "its operations take at least 2.00 s"),
        ({"computing": 0.9, "least": 0.5}, None),
    ],
)
def test_every_window_above_the_measured_roofline_is_impossible_and_one_reading_is_disturbed(
    floors: dict[str, float], says: str | None
) -> None:
    case = CaseId("cpp", "mm:f32:nn:8x8x8")
    above = Sample(case, "cpu", Status.PASSED, subject=(1.0,) * 4, windows=(2, 2), **floors)  # type: ignore[arg-type]  # of two types
    reason = roofline.impossible([above, above])
    assert (reason is None) == (says is None) == (roofline.excess(above) is None)
    if reason is not None and says is not None:
        assert reason.code == "above-roofline"
        assert says in reason.text
        slow = replace(above, subject=(1.0, 1.0, 3.0, 3.0))  # one window is possible
        assert roofline.impossible([above, slow]) is None
        assert roofline.excess(slow) is not None


def test_of_peaks_that_were_measured_twice_the_larger_count() -> None:
    beside_a_load = Peaks({"f32": 1.0, "f16": 3.0}, 5.0, "the rate of i8 could not be measured")
    again = Peaks({"f32": 2.0, "i8": 4.0}, 4.0)
    assert beside_a_load.or_higher(again) == Peaks({"f32": 2.0, "f16": 3.0, "i8": 4.0}, 5.0)


def quick_to_measure(monkeypatch: pytest.MonkeyPatch, *sizes: int, cache: int) -> None:
    """Peaks come from products of these sizes and from arrays beyond a cache of so many bytes."""
    monkeypatch.setattr(roofline, "_SIZES", {"cpu": sizes})
    # A processor without matrix units, and nothing that the environment takes from it.
    flags = ("sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c")
    monkeypatch.setattr("pytest_gemm.machine.processor.cpu", lambda: Cpu(flags=flags))
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(roofline, "_BUDGET", {"cpu": 0.01})
    monkeypatch.setattr(roofline, "_LEAST_ARRAY", 4 * cache)
    monkeypatch.setattr("pytest_gemm.machine.processor.outer_caches", lambda: cache)
    monkeypatch.setattr("pytest_gemm.machine.processor.waited", lambda: None)  # whatever else runs beside the tests


@pytest.mark.slow
def test_peaks_are_measured_and_pytorch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_to_measure(monkeypatch, 64, 128, cache=1 << 14)
    # Where oneDNN is capped on a processor with AMX, PyTorch's own raises (aten-scaled-mm-no-kernel).
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: a.float() @ b.float())
    precision = torch.get_float32_matmul_precision()
    found = roofline.measure("cpu", ["f64", "f16", "i8", "f8e4m3fn", "i32", "tf32", "i8"])
    assert list(found.flops) == ["f32", "f64", "f16", "i8", "f8e4m3fn", "tf32"]  # PyTorch has no fast product of i32
    assert all(math.isfinite(rate) and rate > 0 for rate in (*found.flops.values(), found.bandwidth))
    # What f64 can do, every narrower type can; what f32 can, TF32 can.
    assert min(found.flops.values()) == found.flops["f64"]
    assert found.flops["tf32"] >= found.flops["f32"]
    assert torch.get_float32_matmul_precision() == precision


def test_a_capped_library_is_no_measure_of_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_to_measure(monkeypatch, 64, cache=1 << 10)
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    found = roofline.measure("cpu", ["f32", "bf16"])
    assert found.flops == {}
    assert found.bandwidth > 0


@pytest.mark.parametrize(("near", "found"), [(1.9, 1.0), (2.1, 2.1)])
def test_a_cache_that_is_larger_than_reported_is_no_memory(
    near: float, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gemm.machine.processor.outer_caches", lambda: 1 << 20)
    sizes: list[float] = []

    def rate_of(_call: object, amount: float, *_: object) -> roofline._Rate:
        sizes.append(amount)
        return roofline._Rate(True, near if amount < max(sizes) else 1.0)

    monkeypatch.setattr(roofline, "_rate_of", rate_of)
    assert roofline._bandwidth("cpu").value == found


def test_a_dtype_that_the_device_cannot_multiply_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError('"addmm_impl_cpu_" not implemented')

    quick_to_measure(monkeypatch, 64, cache=1 << 10)
    monkeypatch.setattr(torch, "_int_mm", refuse)
    assert list(roofline.measure("cpu", ["i8"]).flops) == ["f32"]


@pytest.mark.parametrize("idle_from", [0, 8, math.inf])
def test_a_peak_is_of_a_call_that_nothing_disturbed_or_is_missing(
    idle_from: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loaded machine the bandwidth came out a hundredth of what it is, and the report said ``roof 11451%``."""
    quick_to_measure(monkeypatch, 64, cache=1 << 10)
    calls, clock, waits = 0, 0.0, 0.0

    def waited() -> float:
        return waits

    def passes() -> float:  # asked before and after a call; 100 ms pass in between, and 1 ms when the load has ended
        nonlocal calls, clock, waits
        calls += 1
        undisturbed = calls >= idle_from
        clock += 0.001 if undisturbed else 0.1
        waits += 0.0 if undisturbed else 0.05
        return clock

    monkeypatch.setattr("pytest_gemm.machine.processor.waited", waited)
    monkeypatch.setattr("pytest_gemm.machine.processor.cores", lambda: range(64))
    monkeypatch.setattr("time.perf_counter", passes)
    found = roofline.measure("cpu", [])
    if idle_from < math.inf:
        assert found.disturbed == ""
        assert found.flops["f32"] == pytest.approx(2 * 64**3 / 0.001)
        assert found.bandwidth == pytest.approx(8 * (1 << 10) / 0.001)
    else:
        assert (found.flops, found.bandwidth) == ({}, 0.0)
        assert "the rate of f32 and the bandwidth could not be measured: others kept the cores busy" in found.disturbed
