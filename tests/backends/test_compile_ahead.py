"""Compiled kernels: found again by content, compiled once, ahead of the tests and without a GPU.

The compiler is a script: it knows the version that it is told, refuses what it is told to refuse, notes every call,
and makes an object whose entry returns the length of the text.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest
import whole_libraries  # noqa: F401  # before an inner run loads it

from pytest_gemm.api.settings import configure
from pytest_gemm.backends.cutlass import backend as cutlass
from pytest_gemm.backends.cutlass import compat
from pytest_gemm.backends.cutlass.backend import CutlassBackend
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.backends.inductor.compilation import CompileSpec
from pytest_gemm.core.outcome import Reason
from pytest_gemm.problem.problem import Problem
from pytest_gemm.run import precompile
from pytest_gemm.run import progress as progress_module
from pytest_gemm.storage import kernel_store
from pytest_gemm.storage.kernel_store import (
    CompileError,
    CompilePool,
    CompilerError,
    Job,
    Store,
    Toolchain,
)
from pytest_gemm.worker.keeper import Keeper
from pytest_gemm.worker.process import Process

needs_cutlass = pytest.mark.skipif(
    importlib.util.find_spec("cutlass_library") is None, reason="the wheel nvidia-cutlass is not installed"
)

# What Inductor writes, shortened: a macro, the configuration's types, one exported function, a comment.
KERNEL = """
#include "cutlass/cutlass.h"
#define PT_EXPORT __attribute__((__visibility__("default")))
#define CHECK(status) \\
  { use(status); }

using config_f16_128x128x64_base = cutlass::Gemm<half_t>;
extern "C" {
PT_EXPORT int NAME(const __half* X, const __half* W, __half* Y, const int M, size_t* workspace_size) {
  static int hw_info;

  return 0;
}
}

// configuration name: config_f16_128x128x64
"""

NVCC = r"""#!/bin/sh
here=$(dirname "$0")
case " $* " in *" --version "*) echo "Cuda compilation tools, release 13.0, V$(cat "$here/version")"; exit;; esac
made= text= shared=
while [ $# -gt 0 ]; do
  case "$1" in
    -o) made=$2; shift;;
    -shared) shared=yes;;
    -*) ;;
    *) text=$1;;
  esac
  shift
done
[ -z "$shared" ] || exec cc -shared -o "$made" "$text"
echo "$$ $made" >> "$here/calls"
[ -f "$here/slow" ] && sleep "$(cat "$here/slow")" >/dev/null 2>&1
[ -f "$here/dies" ] && { cat "$here/dies"; exit 1; }
if [ -f "$here/refuses" ] && grep -q -f "$here/refuses" "$text"; then
  echo "kernel.cu(7): error: static assertion failed: too many stages"; exit 2
fi
printf 'extern "C" int pytest_gemm_entry() { return %d; }\n' "$(wc -c < "$text")" |
  cc -x c++ -fPIC -c -o "$made" -
"""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The script, in a folder laid out like a CUDA toolkit."""

    folder: Path

    @property
    def path(self) -> str:
        return str(self.folder / "bin" / "nvcc")

    def set(self, what: str, text: str) -> None:
        (self.folder / "bin" / what).write_text(text, encoding="utf-8")

    @property
    def calls(self) -> int:
        """How often it compiled."""
        return len(self.processes)

    @property
    def processes(self) -> list[int]:
        """Ids of the processes that were called."""
        log = self.folder / "bin" / "calls"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        return [int(line.split()[0]) for line in lines]


def ended(process: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def nvcc(tmp_path: Path) -> Compiler:
    script = tmp_path / "toolkit" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    script.write_text(NVCC, encoding="utf-8")
    script.chmod(0o755)
    header = tmp_path / "toolkit" / "include" / "curand_kernel.h"
    header.parent.mkdir()
    header.touch()
    found = Compiler(tmp_path / "toolkit")
    found.set("version", "13.0.88")
    return found


def kernel(name: str = "cutlass_fused_mm_1a2b3c4d", text: str = KERNEL) -> str:
    return text.replace("NAME", name)


def job(nvcc: Compiler, text: str = KERNEL, **changes: Any) -> Job:
    flags, includes = ("-O1", "-gencode=arch=compute_90a"), ("/here/include",)
    made = Toolchain(nvcc.path, "13.0.88", "wheel 4.2", architecture="90a", flags=flags, includes=includes)
    return Job.of(kernel(text=text), dataclasses.replace(made, **changes))


def text_of(text: str) -> Job:
    return Job.of(text, Toolchain("nvcc", "13.0.88", "wheel 4.2"))


# -- what a kernel is ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(kernel("cutlass_6d7f2e4c"), id="another-name"),
        pytest.param(kernel("Placeholder.KERNEL_NAME"), id="while-it-is-rendered"),
        pytest.param(kernel().replace(";\n", ";   \n\n\n"), id="blanks-and-blank-lines"),
        pytest.param(kernel() + "\n// CUDA Compilation cmd\n// nvcc -O1 -o x.o x.cu\n", id="command"),
    ],
)
def test_the_same_kernel_has_one_key_whatever_it_is_called(nvcc: Compiler, again: str) -> None:
    assert job(nvcc, again).key == job(nvcc).key
    assert re.fullmatch(r"[0-9a-f]{64}", job(nvcc).key)


# As Inductor of torch 2.15 names the types of a kernel.
TYPED = (
    KERNEL
    + """
struct gemm_128x128x64_NAME : public gemm_base { };
using gemm_128x128x64_NAME_device_type = Adapter<gemm_128x128x64_NAME>;
"""
)


def test_a_type_that_is_called_after_its_kernel_has_one_name_for_one_text() -> None:
    names = ("cutlass_6d7f2e4c", "cutlass_fused_mm_1a2b3c4d", "Placeholder.KERNEL_NAME")
    made = [text_of(kernel(name, TYPED)) for name in names]
    assert len({one.key for one in made}) == 1
    assert not any(name in made[0].text for name in names)
    (type_,) = set(re.findall(r"struct (\w+) :", made[0].text))
    assert f"using {type_}_device_type = Adapter<{type_}>;" in made[0].text
    other = text_of(kernel(text=TYPED.replace("use(status)", "use(status, bias)"))).text
    assert type_ not in other, "two libraries would define one type in two ways"


def test_every_fact_that_may_change_the_machine_code_changes_the_key_and_no_path_does(nvcc: Compiler) -> None:
    jobs = [
        job(nvcc),
        job(nvcc, KERNEL.replace("128x128x64", "256x128x64")),
        job(nvcc, version="13.1.5"),
        job(nvcc, architecture="100a"),
        job(nvcc, flags=("-O3", "-gencode=arch=compute_90a")),
        job(nvcc, headers="wheel 4.3"),
    ]
    assert len({one.key for one in jobs}) == len(jobs)
    elsewhere = job(nvcc, compiler="/opt/cuda/bin/nvcc", includes=("/there/include",), spare="/curand")
    assert elsewhere.key == jobs[0].key


def test_a_macro_stays_a_macro() -> None:
    text = text_of(kernel(text=KERNEL.replace("{ use(status); }", "{ use(status); } \\\n\n"))).text
    assert "{ use(status); } \\\n\n" in text, "a line that ends with a backslash takes in the next one"


def test_the_entry_is_found_and_the_configuration_read() -> None:
    assert kernel_store.entry_of(kernel("cutlass_fused_relu_01234567")) == "cutlass_fused_relu_01234567"
    assert text_of(kernel()).configuration == "config_f16_128x128x64"
    assert text_of(kernel(text=KERNEL.replace("// configuration", "//"))).configuration == ""
    for broken in ("int main() {}", kernel("one") + kernel("two")):
        with pytest.raises(ValueError, match="exports one function"):
            text_of(broken)


def test_headers_are_told_apart_by_wheel_or_by_version_file(tmp_path: Path) -> None:
    for tree, text in (("a", "#define CUTLASS_MINOR 2"), ("b", "#define CUTLASS_MINOR 3")):
        (tmp_path / tree / "include" / "cutlass").mkdir(parents=True)
        (tmp_path / tree / "include" / "cutlass" / "version.h").write_text(text, encoding="utf-8")
    assert kernel_store.headers_version(tmp_path / "a") != kernel_store.headers_version(tmp_path / "b")
    assert kernel_store.headers_version(tmp_path / "a", wheel="4.2.0.0") == "nvidia-cutlass 4.2.0.0"


# -- the store -----------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_a_kernel_is_compiled_once_and_a_copy_of_the_folder_has_it(nvcc: Compiler, tmp_path: Path) -> None:
    first = Store(tmp_path / "store")
    made = first.obtain(job(nvcc))
    assert first.obtain(job(nvcc, kernel("another"))) == made
    assert nvcc.calls == 1

    shutil.copytree(tmp_path / "store", tmp_path / "elsewhere", ignore=shutil.ignore_patterns("locks", "making"))
    copied = Store(tmp_path / "elsewhere")
    for _ in range(3):
        assert copied.obtain(job(nvcc)).read_bytes() == made.read_bytes()
    assert nvcc.calls == 1
    files = {path.suffix for path in (tmp_path / "store").iterdir() if path.is_file()}
    assert files == {".o", ".sha256"}, "nothing but kernels is left"
    assert not list((tmp_path / "store" / "making").iterdir())


@pytest.mark.compiler
@pytest.mark.parametrize("damage", [b"", b"another object"])
def test_a_damaged_kernel_is_compiled_again(nvcc: Compiler, tmp_path: Path, damage: bytes) -> None:
    made = Store(tmp_path).obtain(job(nvcc))
    good = made.read_bytes()
    made.write_bytes(damage)
    store = Store(tmp_path)
    assert store.object_of(job(nvcc).key) is None
    assert store.obtain(job(nvcc)).read_bytes() == good
    assert nvcc.calls == 2


@pytest.mark.compiler
def test_a_refused_kernel_is_tried_once(nvcc: Compiler, tmp_path: Path) -> None:
    nvcc.set("refuses", "128x128x64")
    for store in (Store(tmp_path), Store(tmp_path)):
        with pytest.raises(CompileError, match="too many stages"):
            store.obtain(job(nvcc))
    assert nvcc.calls == 1
    assert "too many stages" in Store(tmp_path).error_of(job(nvcc).key)
    Store(tmp_path).obtain(job(nvcc, KERNEL.replace("128x128x64", "64x64x64")))  # another kernel is not refused


@pytest.mark.compiler
@pytest.mark.parametrize(
    "said", ["nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "fatal error: No space left on device", ""]
)
def test_what_befalls_the_compiler_is_not_held_against_the_kernel(nvcc: Compiler, tmp_path: Path, said: str) -> None:
    nvcc.set("dies", said)
    with pytest.raises(CompilerError, match=re.escape(said) or "no message"):
        Store(tmp_path).obtain(job(nvcc))
    with pytest.raises(CompilerError, match="no-such-nvcc"):
        Store(tmp_path).obtain(job(nvcc, compiler="/no-such-nvcc"))
    assert Store(tmp_path).error_of(job(nvcc).key) == ""
    (Path(nvcc.path).parent / "dies").unlink()
    assert Store(tmp_path).obtain(job(nvcc)).is_file()


@pytest.mark.slow
def test_a_compile_that_takes_too_long_is_ended_with_all_its_processes(nvcc: Compiler, tmp_path: Path) -> None:
    nvcc.set("slow", "30")
    started = time.monotonic()
    with pytest.raises(CompilerError, match=r"not finished after 0\.5 s"):
        Store(tmp_path, timeout=0.5).obtain(job(nvcc))
    assert time.monotonic() - started < 10
    assert not os.listdir(tmp_path / "making")


@pytest.mark.compiler
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_no_compiler_outlives_the_process_that_wanted_it(nvcc: Compiler, tmp_path: Path, how: signal.Signals) -> None:
    nvcc.set("slow", "60")
    wanted = (
        "from pathlib import Path; from pytest_gemm.storage.kernel_store import *; "
        f"Store(Path({str(tmp_path / 'store')!r})).obtain(Job.of({kernel()!r}, "
        f"Toolchain({nvcc.path!r}, '13.0.88', 'wheel 4.2', architecture='90a')))"
    )
    process = subprocess.Popen([sys.executable, "-c", wanted])
    wait_until(lambda: nvcc.calls == 1)
    (compiler,) = nvcc.processes
    process.send_signal(how)
    process.wait()
    wait_until(lambda: ended(compiler))


@pytest.mark.compiler
def test_two_that_want_one_kernel_compile_it_once(nvcc: Compiler, tmp_path: Path) -> None:
    nvcc.set("slow", "0.3")
    stores = [Store(tmp_path / "store") for _ in range(4)]  # as four processes have them
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda store: store.obtain(job(nvcc)), stores))
    assert (len(made), nvcc.calls) == (1, 1)


# -- many at once --------------------------------------------------------------------------------------


def numbered(nvcc: Compiler, count: int) -> list[Job]:
    return [job(nvcc, KERNEL.replace("128x128x64", f"128x128x{number}")) for number in range(count)]


@pytest.mark.slow
def test_a_pool_compiles_every_kernel_once_and_says_how_far_it_is(nvcc: Compiler, tmp_path: Path) -> None:
    jobs = numbered(nvcc, 6)
    Store(tmp_path / "store").obtain(jobs[0])
    nvcc.set("refuses", "128x128x5")
    nvcc.set("slow", "0.2")
    told: list[kernel_store.Progress] = []
    with CompilePool(Store(tmp_path / "store"), workers=2) as plant:
        plant.submit(jobs[:4])
        plant.submit(jobs)
        plant.finish(told.append, interval=0.05)
    assert nvcc.calls == 6
    assert [plant.jobs[key] for key in plant.rejected] == [jobs[5]]
    assert plant.undone == {}
    assert max(progress.running for progress in told) == 2, "as many compilers as it may have"
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
    assert all(0 <= progress.done <= progress.total for progress in told)
    assert re.fullmatch(r"6/6 kernels, 0 at work, 0:0\d, 1 failed", str(told[-1]))


@pytest.mark.compiler
def test_an_interrupt_ends_the_compilers(nvcc: Compiler, tmp_path: Path) -> None:
    nvcc.set("slow", "60")

    def interrupted(progress: kernel_store.Progress) -> None:
        if progress.running == 2 and nvcc.calls == 2:
            raise KeyboardInterrupt

    def work(jobs: list[Job]) -> None:
        with CompilePool(Store(tmp_path), workers=2) as plant:
            plant.submit(jobs)
            plant.finish(interrupted, interval=0.05)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work(numbered(nvcc, 5))
    assert time.monotonic() - started < 20
    assert nvcc.calls == 2, "those that were waiting are not begun"
    wait_until(lambda: all(map(ended, nvcc.processes)))
    assert [thread for thread in threading.enumerate() if thread.name.startswith("nvcc")] == []


# -- Inductor takes its kernels from the store -----------------------------------------------------------


@pytest.mark.parametrize("first", ["inductor", "nvidia", ""])
def test_the_cuda_package_of_inductor_hides_no_bindings(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Inductor has it, a package; as NVIDIA has it, a namespace.
    (tmp_path / "inductor" / "cuda").mkdir(parents=True)
    (tmp_path / "inductor" / "cuda" / "__init__.py").write_text("__version__ = '13.0'\n")
    (tmp_path / "nvidia" / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "nvidia" / "cuda" / "bindings" / "__init__.py").write_text("where = 'nvidia'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "nvidia")
    if first == "nvidia":
        importlib.import_module("cuda")
    monkeypatch.syspath_prepend(tmp_path / "inductor")
    if first == "inductor":
        importlib.import_module("cuda")
    compat.share_cuda_package()  # where nobody has imported it, whoever does next gets both
    assert hasattr(importlib.import_module("cuda"), "__version__")
    assert importlib.import_module("cuda.bindings").where == "nvidia"
    for name in ("cuda", "cuda.bindings"):
        sys.modules.pop(name)


@pytest.mark.compiler
@needs_cutlass
def test_inductor_links_the_stored_kernel_under_its_own_name(
    nvcc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import exc
    from torch._inductor.codecache import CUDACodeCache
    from torch._inductor.codegen.cuda import compile_utils

    monkeypatch.setenv("CUDACXX", nvcc.path)
    monkeypatch.setattr(compile_utils, "_cuda_lib_options", lambda: [])  # the CPU build of torch knows no libcudart
    backend = CutlassBackend()
    options = {**backend.options(Problem.parse("mm:f16:nt:64x64x64")), "cuda.arch": "90"}
    setup = kernel_store.Toolchain(nvcc.path, "13.0.88", "wheel 4.2")
    store = Store(tmp_path / "store")

    def linked(name: str, text: str = KERNEL) -> ctypes.CDLL:
        path, *_ = CUDACodeCache.compile(kernel(name, text), "so")
        return ctypes.CDLL(path)

    spec = CompileSpec("CUTLASS", options, str(tmp_path / "inductor"), threads=1)
    with torch_compat.session(spec), compat.stored(store, setup):
        length = linked("cutlass_candidate").cutlass_candidate()
        assert linked("cutlass_fused_mm_0").cutlass_fused_mm_0() == length == len(text_of(kernel()).text)
        assert nvcc.calls == 1

        for left in [*(tmp_path / "inductor").rglob("*.so"), *(tmp_path / "inductor").rglob("*.o")]:
            data = left.read_bytes()
            left.unlink()  # the file that this process has loaded stays as it is
            left.write_bytes(data[:-9])
        CUDACodeCache.cache_clear()  # as another process finds them
        assert linked("cutlass_fused_mm_0").cutlass_fused_mm_0() == length

        nvcc.set("refuses", "64x64x64")
        with pytest.raises(exc.CUDACompileError, match="too many stages"):
            linked("cutlass_refused", KERNEL.replace("128x128x64", "64x64x64"))

        # A library that cannot be linked is not remembered as a kernel's failure.
        with monkeypatch.context() as patched:
            patched.setattr(compat, "renamed", lambda _made, _name, place: place.write_text("no object"))
            with pytest.raises(exc.CUDACompileError):
                linked("cutlass_unlinked")
        for left in (tmp_path / "inductor").rglob("*.o"):
            if left.read_bytes() == b"no object":
                left.unlink()
        assert linked("cutlass_unlinked").cutlass_unlinked() == length


# -- which kernels a problem needs, without a GPU --------------------------------------------------------


_Test = TypeVar("_Test", bound=Callable[..., None])


def asks(test: _Test) -> _Test:
    """A test that asks Inductor.  All share a process, so this file has one worker of xdist."""
    for mark in (needs_cutlass, pytest.mark.usefixtures("one_asks")):
        test = mark(test)
    return test


# A plain product, another size of it, an addend, a fused epilogue, a batch, int8, any M.
LINES = (
    "mm:f16:nt:64x96x128",
    "mm:f16:nt:128x96x64",
    "addmm:f16:nn:64x96x128:bias",
    "linear:f16:nt:64x96x128:relu",
    "bmm:bf16:nn:4x64x96x128",
    "int_mm:i8-i8-i32:nt:64x96x128",
    "mm:f16:nt:250x96x128:m.dynamic",
)


@pytest.fixture
def backend(nvcc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CutlassBackend:
    monkeypatch.setenv("CUDACXX", nvcc.path)
    found = CutlassBackend()
    found.kernel_cache = tmp_path / "store"
    # Every problem takes the first candidate, and stream-K, which there is for static sizes only, is not offered: which
    # problems share a kernel is then plain.
    found.variety = 1
    found.allowlist = r"align(8|16)_warpspecialized.*epi_tma"
    return found


def under(inline: object, environment: Mapping[str, str], *asked: Any) -> Any:
    """Ask with this environment instead of the one that the worker was started with."""
    os.environ.clear()
    os.environ.update(environment)
    # What was found out for somebody else: which compiler there is, and which candidates.
    cutlass._setup.cache_clear()
    if "torch._inductor.utils" in sys.modules:
        sys.modules["torch._inductor.utils"].clear_caches()
    return precompile._ask(inline, *asked)


@pytest.fixture(scope="module")
def warm() -> Iterator[Process]:
    """A worker that asks Inductor; the first question loads Inductor and CUTLASS."""
    keeper = Keeper({}, 1, ("torch",), {"ask": under})
    with contextlib.closing(keeper), contextlib.closing(Process(keeper, (0.0, 0.0))) as worker:
        yield worker


@pytest.fixture
def one_asks(warm: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process asks for all runs in this one."""

    @contextlib.contextmanager
    def asking(backend: Any, terms: tuple[str, str], _: int) -> Iterator[Callable[..., Future[Any]]]:
        asked = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, backend
        with ThreadPoolExecutor(1) as threads:
            yield lambda lines: threads.submit(
                lambda: warm.call(list[precompile._Answer], "ask", *asked, lines, *terms)
            )

    monkeypatch.setattr(precompile, "_asking", asking)


def harvest(backend: CutlassBackend, *lines: str, wanted: str = "") -> precompile.Harvest:
    settings: Any = SimpleNamespace(jobs=2, limits=(60.0, 60.0), wanted_candidates=wanted, compile_only=True)
    return precompile.compile_for(settings, backend, lines, "90a", progress_module.Display(None))


@pytest.mark.slow
@asks
def test_a_program_that_inductor_cannot_generate_wants_its_candidate_all_the_same(backend: CutlassBackend) -> None:
    """Its visitor tree knows no int32; the candidate is compiled before that shows, in a real compile as well."""
    found = harvest(backend, "int_mm:i8-i8-i32:nt:32x64x128:cast-f32")
    assert len(found.kernels) == 1
    assert not found.unknown


@pytest.mark.slow
@asks
def test_problems_are_compiled_without_a_gpu_and_share_kernels(backend: CutlassBackend, nvcc: Compiler) -> None:
    found = harvest(backend, *LINES)
    assert found.complete
    assert found.unknown == {}
    of = {line: [found.kernels[key] for key in keys] for line, keys in found.needs.items()}
    assert len(of[LINES[0]]) == 1, "benchmarked and final kernel are one"
    assert of[LINES[1]] == of[LINES[0]], "M, N and K are arguments: another size is the same kernel"
    assert found.needs[LINES[6]] <= set().union(*(found.needs[line] for line in LINES[:6])), "and so is any M"
    (addend,) = of[LINES[2]]
    assert "Bias" in addend.text
    assert any("EVT" in job.text for job in of[LINES[3]]), "an epilogue is fused"
    assert "bfloat16_t" in of[LINES[4]][0].text
    assert "s8_s8_s32" in of[LINES[5]][0].configuration
    assert all(job.toolchain.architecture == "90a" for job in found.kernels.values())
    assert len(found.kernels) == found.compiled == nvcc.calls
    # The programs around the kernels lie in Inductor's folder, with the texts that they would have compiled.
    wrappers = [path.read_text(encoding="utf-8") for path in (nvcc.folder.parent / "cache").rglob("*.py")]
    texts = [
        text
        for wrapper in wrappers
        for text in re.findall(r"async_compile\.cuda\(r\'\'\'(.*?)\'\'\'", wrapper, re.DOTALL)
    ]
    assert len(texts) >= len(LINES) - 1
    assert {text_of(text).text for text in texts} <= {job.text for job in found.kernels.values()}


@pytest.mark.slow
@asks
@pytest.mark.study
def test_a_refused_candidate_gives_way_to_the_next_one(backend: CutlassBackend, nvcc: Compiler) -> None:
    backend.allowlist = "f16_128x128x64_1x2x1_0_tnn_align8_warpspecialized_(cooperative|pingpong)_epi_tma"
    nvcc.set("refuses", "configuration name: .*_cooperative_")
    found = harvest(backend, LINES[0])
    assert sorted("pingpong" in job.configuration for job in found.kernels.values()) == [False, True]
    assert [found.kernels[key].configuration.rpartition("_epi")[0][-11:] for key in found.refused] == ["cooperative"]
    assert found.complete, "a pruned candidate is no failure of the pool"
    assert found.compiled == 1, "the candidate that takes its place"
    text = "\n".join(precompile.complaints(found))
    assert "refused by nvcc: " in text
    assert "static assertion failed: too many stages" in text


@pytest.mark.slow
@asks
@pytest.mark.parametrize(
    ("wanted", "schedules"),
    [("one", {"cooperative"}), ("winner", {"cooperative", "pingpong"}), ("*pingpong*", {"pingpong"})],
)
def test_the_candidates_that_are_asked_for_are_compiled(
    backend: CutlassBackend, wanted: str, schedules: set[str]
) -> None:
    backend.allowlist = "f16_128x128x64_1x2x1_0_tnn_align8_warpspecialized_(cooperative|pingpong)_epi_tma"
    names = {job.configuration for job in harvest(backend, LINES[0], wanted=wanted).kernels.values()}
    assert {word for name in names for word in re.findall("cooperative|pingpong", name)} == schedules


@pytest.mark.slow
@asks
@pytest.mark.study
def test_what_was_asked_of_the_same_operands_before_does_not_matter(backend: CutlassBackend) -> None:
    fp8 = "scaled_mm:f8e4m3fn-f8e4m3fn-{}:nt:64x64x256:quant.tensorwise"
    fast, precise, half = fp8.format("bf16") + ":math.fast_accumulate", fp8.format("bf16"), fp8.format("f16")
    scaled = [f"addmm:f16:nt:64x64x256:bias{factors}" for factors in ("+alpha-0.5", "+alpha-2", "+beta-3")]
    found = harvest(backend, fast, precise, half, *scaled)
    of = {line: [found.kernels[key].configuration for key in keys] for line, keys in found.needs.items()}
    assert all("fp8_fastaccum" in name for name in of[fast])
    assert not any("fp8_fastaccum" in name for name in of[precise])
    assert not any("bf16" in name for name in of[half])
    assert len(found.kernels) == sum(map(len, of.values())), "no two problems have a kernel in common"
    assert [len(found.needs[line]) for line in scaled] == [1, 1, 1], "what is timed has the factors of what is run"


def test_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CutlassBackend()
    configure(backend, {"allow": "pingpong", "cache": "/kept"})
    options = backend.options(Problem.parse(LINES[0]))
    assert (
        options[torch_compat.option("cutlass.cutlass_op_allowlist_regex", "cuda.cutlass_op_allowlist_regex")]
        == "pingpong"
    )
    assert backend.store.folder == Path("/kept")
    configure(backend, {})
    assert backend.allowlist == CutlassBackend.allowlist
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cutlass.kernel_cache_dir() == Path("/cache/pytest-gemm/cutlass-kernels")


@pytest.mark.slow
def test_a_toolkit_without_curand_is_helped_by_the_wheel_or_named(
    nvcc: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", nvcc.path)
    monkeypatch.delenv("CPATH", raising=False)
    assert cutlass.curand_headers(nvcc.path) == ""
    (nvcc.folder / "include" / "curand_kernel.h").unlink()
    header = tmp_path / "site" / "nvidia" / "include" / "curand_kernel.h"
    file = SimpleNamespace(name="curand_kernel.h", locate=lambda: header)
    monkeypatch.setattr(importlib.metadata, "files", lambda _name: [file])
    assert cutlass.curand_headers(nvcc.path) == str(header.parent)
    monkeypatch.setenv("CPATH", "/mine")
    assert job(nvcc, spare="/curand").toolchain.environment["CPATH"] == os.pathsep.join(["/mine", "/curand"])
    monkeypatch.setattr(importlib.metadata, "files", lambda _name: [])
    reason = CutlassBackend().compiles_ahead().reason
    assert isinstance(reason, Reason)
    assert (reason.code, "curand_kernel.h" in reason.text) == ("no-curand", True)


def test_stream_k_widens_the_bound_by_its_slices() -> None:
    backend = CutlassBackend()
    problem = Problem.parse("int_mm:i8-i8-i32:nt:64x96x1000")  # its contract needs no device
    plain: Any = SimpleNamespace(chosen=("cutlass3x_warpspecialized_pingpong,swizzle=1",), fused=True)
    stream: Any = SimpleNamespace(chosen=("cutlass3x_stream_k_warpspecialized,swizzle=1",), fused=True)
    assert backend.contract(problem, plain).slices == 1
    assert backend.contract(problem, stream).slices == 16, "1000 / 64, rounded up"
    assert backend.contract(problem, None).slices == 16, "not compiled yet: it may be stream-K"


# -- as pytest's users meet it -----------------------------------------------------------------------------


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(
        test_mine="""
        import pytest

        @pytest.mark.gemm(problems=["mm:f16:nt:64x96x128"], any_problem=True)
        def test_product(gemm_case, gemm_check):
            raise AssertionError("nothing runs")
        """
    )
    return pytester


@pytest.mark.compiler
@asks
def test_compile_only_compiles_and_runs_nothing(
    project: pytest.Pytester, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", nvcc.path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(nvcc.folder.parent / "cache"))  # not where pytest collects
    problems = f"--gemm-problem={','.join(LINES[2:4])}"
    options = ("--gemm-set=cutlass.arch=90a", "--gemm-set=cutlass.cache=kernels", "--gemm-set=cutlass.allow=pingpong")
    wanted = ("--gemm-compile-only", *options, problems)
    nvcc.set("refuses", "configuration name: .*_cooperative_")  # which are not among those that are allowed
    result = project.runpytest_inprocess("--gemm-backends=aten,cutlass", *wanted, "--gemm-output=.")
    assert result.ret == 0
    stored = len(list((project.path / "kernels").glob("*.o")))
    assert stored == nvcc.calls == 2
    result.stdout.fnmatch_lines(
        [
            "*aten compiles nothing ahead: its kernels are made when they are run",
            f"cutlass: {nvcc.calls} kernels, 0 from the cache, {nvcc.calls} compiled in *",
        ]
    )
    for word in ("AssertionError", "refused by nvcc"):
        assert word not in result.stdout.str()
    totals = json.loads((project.path / "run.jsonl").read_text(encoding="utf-8").splitlines()[-1])["totals"]
    assert totals["notes"][0].startswith(f"cutlass: {nvcc.calls} kernels")

    again = project.runpytest_inprocess("--gemm-backends=cutlass", *wanted)
    again.stdout.fnmatch_lines([f"cutlass: {stored} kernels, {stored} from the cache, 0 compiled in *"])
    assert nvcc.calls == stored
    assert again.ret == 0


@pytest.mark.slow
@asks
def test_a_compiler_that_does_not_work_turns_compile_only_red(
    project: pytest.Pytester, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDACXX", nvcc.path)
    nvcc.set("dies", "nvcc fatal   : Cannot find the host compiler")
    result = project.runpytest_inprocess(
        "--gemm-backends=cutlass",
        "--gemm-compile-only",
        "--gemm-set=cutlass.arch=90a",
        "--gemm-set=cutlass.cache=kernels",
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(["not compiled: cutlass3x_*, for mm:f16:nt:64x96x128: *Cannot find the host compiler"])


PLANTED = '''
    import os
    from pathlib import Path

    import torch

    from pytest_gemm.api.callable import CallableBackend
    from pytest_gemm.api.protocols import Availability
    from pytest_gemm.storage.kernel_store import Job, Store, Toolchain

    KERNEL = """
    extern "C" {
    PT_EXPORT int NAME(const int N) { return %d; }
    }
    """

    class Planted(CallableBackend):
        """Has one kernel for each N, and fails where it is not there when it is prepared."""

        devices = ("cpu",)
        store = Store(Path("kernels"))
        architecture = "90a"

        def __init__(self):
            super().__init__("planted", torch.matmul)

        def compiles_ahead(self):
            return Availability()

        def jobs(self, problem, request, architecture, select=None):
            tools = Toolchain(os.environ["CUDACXX"], "13.0.88", "wheel 4.2", architecture=architecture)
            return [Job.of(KERNEL % problem.shape.n, tools)]

        def prepare(self, problem, operands, request=None):
            (job,) = self.jobs(problem, request, "90a")
            assert self.store.object_of(job.key) or "MUST_BE_THERE" not in os.environ, "compiled ahead of the tests"
            self.store.obtain(job)
            return super().prepare(problem, operands)
'''

TEST = """
    import pytest

    @pytest.mark.gemm(problems=["mm:f32:nn:8x8x8", "mm:f32:nn:9x8x8", "mm:f32:nn:8x9x8", "mm:f32:nn:8x7x8"])
    def test_mine(gemm_case, gemm_check):
        gemm_check(gemm_case)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_kernels_are_compiled_before_the_tests_with_and_without_workers(
    pytester: pytest.Pytester, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("CUDACXX", nvcc.path)
    monkeypatch.setenv("MUST_BE_THERE", "yes")
    pytester.makeini("[pytest]\npythonpath = .")
    pytester.makeconftest("""
        from plant import Planted

        def pytest_gemm_register_backends(registry):
            registry.add(Planted())
    """)
    pytester.makepyfile(plant=PLANTED, test_it=TEST)
    arguments = (workers, "-p", "no:cacheprovider", "--gemm-backends=planted")
    result = pytester.runpytest_inprocess(*arguments)
    result.assert_outcomes(passed=4)
    assert nvcc.calls == 3, "two problems have one kernel"
    result.stdout.fnmatch_lines(["planted: 3 kernels, 0 from the cache, 3 compiled in *", "planted: 3 kernels, 0*"])
    if workers != "-n0":
        return  # what follows is of the controller and of the store, to which workers make no difference

    again = pytester.runpytest_inprocess(*arguments, "--collect-only")
    assert "planted: " not in again.stdout.str(), "nothing is compiled for a list of tests"
    # For two problems a process that asks is not worth while; the tests themselves find the kernels.
    few = pytester.runpytest_inprocess(*arguments, "--gemm-problem=mm:f32:nn:8x8x8,mm:f32:nn:8x9x8")
    few.assert_outcomes(passed=2)
    assert nvcc.calls == 3
