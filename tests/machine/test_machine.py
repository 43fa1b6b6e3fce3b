"""The machine as Linux and NVML describe it, and its hardware key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import fake_nvml
import pytest
import torch

from pytest_gemm.machine import gpus, processor, software
from pytest_gemm.machine import key as key_module
from pytest_gemm.machine.gpus import Gpu
from pytest_gemm.machine.processor import Cpu

XEON = "\n\n".join(
    f"processor\t: {i}\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
    f"model name\t: Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz\ncpu MHz\t\t: {2000 + i}.500\n"
    f"physical id\t: 0\ncore id\t\t: {i % 2}\nflags\t\t: fpu avx2 avx512f avx512_vnni amx_bf16 amx_tile\n"
    for i in range(4)
)
VIRTUAL = (
    "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2\n\n"
    "processor\t: 1\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2\n"
)
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\nHardware\t: board\n"


def test_the_cores_that_linux_lists_are_counted() -> None:
    assert [processor.read_cpuinfo(text).logical for text in (XEON, VIRTUAL, ARM, "")] == [4, 2, 1, 0]


@pytest.mark.parametrize(
    ("hardware", "key"),
    [
        (processor.read_cpuinfo(XEON), "intel-xeon-platinum-8480c-amx-4c"),
        # The name says nothing about the generation, so the key does.
        (processor.read_cpuinfo(VIRTUAL), "amd-epyc-f25m1-avx2-4c"),
        (processor.read_cpuinfo(ARM), "{arch}-41d40-sve-4c"),
        (Cpu("AMD EPYC 7763 64-Core Processor", "f25m1", ("avx2",)), "amd-epyc-7763-avx2-4c"),
        (Cpu("Intel Xeon 8380", "", ("avx2", "avx512f", "avx512_vnni")), "intel-xeon-8380-avx512-vnni-4c"),
        (Cpu("AMD Ryzen 7 7840U w/ Radeon  780M", "", ("avx512f", "avx512_bf16")), "amd-ryzen-7-7840u-avx512-bf16-4c"),
        (Cpu("13th Gen Intel(R) Core(TM) i7-1360P", "", ("avx2",)), "13th-gen-intel-core-i7-1360p-avx2-4c"),
        (processor.read_cpuinfo(""), "{arch}-{arch}-4c"),
        (Gpu(0, "", "NVIDIA H200", "580.95", "9.0", 700.0), "nvidia-h200-sm90-700w"),
        (
            Gpu(0, "", "NVIDIA A100-SXM4-40GB", "580", "8.0", 400.0, "3g.20gb"),
            "nvidia-a100-sxm4-40gb-sm80-400w-mig-3g-20gb",
        ),
        (Gpu(0, "", "NVIDIA Thor", "580", "[N/A]"), "nvidia-thor"),
    ],
)
def test_a_hardware_key_is_a_folder_s_name_and_tells_machines_apart(hardware: Cpu | Gpu, key: str) -> None:
    found = key_module.hardware_key("cuda" if isinstance(hardware, Gpu) else "cpu", 4, on=hardware)
    assert found == key.format(arch=os.uname().machine.replace("_", "-"))
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found)


# -- NVML ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, and an A100 in two parts."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml.module())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("nvml")
def test_all_gpus_with_what_cannot_be_read_left_out() -> None:
    assert gpus.gpus() == [
        Gpu(0, "GPU-aaa", "NVIDIA H200", "580.95.05", "9.0", 700.0, highest_clock=1.98e9),
        Gpu(1, "GPU-bbb", "NVIDIA A100-SXM4-40GB", "580.95.05", "8.0", None),
    ]


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("visible", "key"),
    [
        (None, "nvidia-h200-sm90-700w"),
        ("0,1", "nvidia-h200-sm90-700w"),
        ("1", "nvidia-a100-sxm4-40gb-sm80-mig-3g-20gb"),  # CUDA takes the first part
        ("GPU-aaa", "nvidia-h200-sm90-700w"),
        ("GPU-b", "nvidia-a100-sxm4-40gb-sm80-mig-3g-20gb"),
        ("MIG-222", "nvidia-a100-sxm4-40gb-sm80-mig-1g-5gb"),
        ("MIG-333", "cuda-unknown"),
        ("-1", "cuda-unknown"),
    ],
)
def test_the_key_is_that_of_the_gpu_that_cuda_sees_first(
    visible: str | None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert key_module.hardware_key("cuda", 4) == key


@pytest.mark.compiler
@pytest.mark.usefixtures("nvml")
def test_software_of_a_gpu_has_the_driver_and_that_of_a_cpu_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.software("cuda")["driver"] == "580.95.05"
    monkeypatch.setenv("CXX", "g++")
    versions = software.software("cpu")
    assert versions["torch"] == metadata.version("torch")
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions["g++"])
    assert "driver" not in versions


@pytest.mark.parametrize("library", [fake_nvml.without_a_driver(), fake_nvml.module(0)], ids=["no-driver", "none"])
def test_without_a_gpu_there_is_none_and_nothing_raises(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert gpus.gpus() == []
    assert gpus.visible_gpu() is None
    assert "driver" not in software.software("cuda")
    assert "python" in software.software("cpu")


def test_nothing_here_imports_torch_and_torch_s_cuda_is_known_all_the_same() -> None:
    code = (
        "import json, sys; from pytest_gemm.machine import key, software; v = software.software('cuda'); "
        "key.hardware_key('cpu', 1); key.hardware_key('cuda', 1); print(json.dumps([v, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions, imported = json.loads(done.stdout)
    assert not imported
    assert versions.get("cuda") == torch.version.cuda


def test_torch_s_cuda_is_read_from_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    text = "__version__ = '2.13.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip = None\n"
    (folder / "version.py").write_text(text, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert software.software("cuda")["cuda"] == "13.0"


def test_the_onednn_in_torch_is_known_from_its_header() -> None:
    assert f"MKL-DNN v{software.onednn()} " in torch.__config__.show()


# -- sysfs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], None]:
    return lambda cores: monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: cores)


def test_caches_of_the_cores_in_use_are_added(tmp_path: Path, on_cores: Callable[[set[int]], None]) -> None:
    for core in range(4):
        complexes = "0-1" if core < 2 else "2-3"
        for index, (level, size, shared) in enumerate([(1, "32K", core), (2, "64M", core), (3, "32M", complexes)]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            facts = {"level": level, "size": size, "shared_cpu_list": shared}
            for name, value in facts.items():
                (folder / name).write_text(f"{value}\n", encoding="utf-8")
    on_cores({0, 1, 2})
    assert processor.outer_caches(tmp_path) == (2 * 32 + 3 * 64) << 20
    on_cores({3})
    assert processor.outer_caches(tmp_path) == (32 + 64) << 20
    assert processor.outer_caches(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("environment", "found"), [({}, ""), ({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}, "-passive-0")]
)
def test_how_threads_wait_is_a_part_of_the_contract(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: str
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processor.waiting() == found
