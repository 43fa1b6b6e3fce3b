"""Compiling for an instruction set of the CPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pytest_gemm.backends.inductor import stored
from pytest_gemm.backends.inductor.compilation import Session
from pytest_gemm.backends.inductor.hooks import hooked, patched
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.machine.isa import ISAS
from pytest_gemm.storage import files
from pytest_gemm.storage.datafile import document

# -- another instruction set of the CPU ------------------------------------------------------------------

_LEVELS: Mapping[str, Any] = {one["name"]: one for one in document(Path(__file__).with_name("pytorch.toml"))["level"]}
# The least level at which oneDNN computes a half type: an AMX machine has AVX512_FP16, which it does f16 with.
ONEDNN_FROM: Mapping[str, str] = {"bf16": "avx512", "f16": "amx"}
_ONEDNN: Mapping[str, str] = {
    "is_mkldnn_bf16_supported": ONEDNN_FROM["bf16"],
    "is_mkldnn_fp16_supported": ONEDNN_FROM["f16"],
}


def lacks_isa(isa: str) -> str:
    """Why Inductor generates no code for an instruction set here, "" where it does.

    CPU, compiler and release are asked: it compiles a few lines, once for each level, and keeps them on disk.

    Args:
        isa: one of ``machine.isa.ISAS``, that the CPU executes.
    """
    from torch._inductor import cpu_vec_isa

    name = _LEVELS[isa]["class"]
    # By name, as Inductor keeps one object of each class, with what it has found out.
    found = next((one for one in cpu_vec_isa.supported_vec_isa_list if type(one).__name__ == name), None)
    if found is None:
        return f"torch {torch.__version__} generates no code for {isa}"
    fp16: Any = getattr(found, "is_amx_fp16_supported", None)
    if not found or (isa == "amx_fp16" and not (fp16 is not None and fp16())):
        return f"the C++ compiler generates no code for {isa} that this process can load and run"
    return ""


def loads(call: Callable[[Any, str], bool], vectors: Any, code: str) -> bool:
    """``VecISA.check_build``, whose answer yes is remembered on disk.

    It compiles a few lines, and starts a Python to load them: in each process, and for each level.  The folder is one
    of this CPU, compiler and torch, see ``machine.code_key``.

    Args:
        call: the original.
        vectors: Inductor's object for a level.
        code: the lines.
    """
    key = hashlib.sha256(repr((code, vectors.build_arch_flags())).encode()).hexdigest()
    remembered = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "loads" / key
    # Levels build on each other, and several threads and processes may ask for one.
    with _LOADING[key], contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # where nothing can be written
            remembered.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(files.locked(remembered.with_suffix(".lock"), stored.PATIENCE, mode=0o666))
        if remembered.exists():
            return True
        with stored.probing():
            found = call(vectors, code)
        if found:
            with contextlib.suppress(OSError):
                files.replace(remembered, b"")
        return found


_LOADING: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def without_warnings(call: Callable[..., None], command: str, *args: Any, **kwargs: Any) -> None:
    """``cpp_builder.run_compile_cmd`` without the compiler's warnings: up to 1 MB for a kernel, which nothing reads.

    What is compiled stays the same to the bit, and so do Inductor's keys, which are of the command before.  A
    precompiled header is for the user's own compiles too, so that command is left as it is.
    """
    call(command if " c++-header " in command else f"{command} -w", *args, **kwargs)


@functools.cache
def _vectors(isa: str) -> Any:
    """An object that stands for a level as Inductor's own does; it reads nothing of this machine."""
    from torch._inductor import cpu_vec_isa

    base: Any = getattr(cpu_vec_isa, _LEVELS[isa]["class"])
    amx, fp16 = ISAS.index(isa) >= ISAS.index("amx"), isa == "amx_fp16"
    # Inductor tells an AMX machine's flags apart once it has asked the machine, and caches that by class.
    more = (" -mavx512bf16" if amx else "") + (" -mamx-fp16" if fp16 else "")
    members = {
        "__bool__": lambda _: True,
        "__hash__": base.__hash__,
        "build_arch_flags": lambda _: f"{base._arch_flags}{more}",
        "is_avx512_bf16_supported": lambda _: amx,
        "is_amx_fp16_supported": lambda _: fp16,
    }
    return type(base.__name__, (base,), members)()


def isa_setup(isa: str) -> tuple[str, ...]:
    """What a script of PyTorch alone does to generate code for an instruction set; nothing for "".

    It leaves the compiler's ``-march=native`` as it is, which :func:`generating_for` does not.
    """
    if not isa:
        return ()
    name, rank = _LEVELS[isa]["class"], ISAS.index(isa)
    answers = {name: rank >= ISAS.index(least) for name, least in _ONEDNN.items()}
    lines = [
        "import torch._inductor.cpu_vec_isa as isa, torch._inductor.compile_fx",
        "import torch._inductor.fx_passes.mkldnn_fusion as onednn",
        f"isa.valid_vec_isa_list = lambda: [isa.{name}()]  # as on a CPU that ends with {isa}",
    ]
    # Only what the CPU lacks is denied: nothing can be given to it.
    return (*lines, *(f"onednn.{asked} = lambda device: False" for asked, answer in answers.items() if not answer))


@contextlib.contextmanager
def generating_for(isa: str) -> Iterator[None]:
    """Let Inductor generate and compile C++ for an instruction set as on a machine that has no higher one.

    What decides there depends here on the level: ``VecISA`` and with it macros, flags and ``-march``; ``torch.cpu``'s
    questions; whether oneDNN has bf16 and f16, on which lowerings depend.  What is computed outside of generated code
    (ATen, oneDNN) stays the machine's, and so does what oneDNN has, which packs weights while Inductor compiles.

    Args:
        isa: one of ``machine.isa.ISAS``; "" changes nothing.
    """
    if not isa:
        yield
        return
    import torch._inductor.compile_fx  # first: the modules below import each other in a circle
    from torch._inductor import cpu_vec_isa, utils
    from torch._inductor.fx_passes import mkldnn_fusion

    def has(least: str, machine: Callable[[], object]) -> bool:
        return ISAS.index(isa) >= ISAS.index(least) and bool(machine())

    # At the machine's best level the compiler goes on taking the machine for what it is, as it does for a user.
    here = isa_module.isas(processor.cpu().flags)
    best = here[-1:] == (isa,)
    march = "native" if best else _LEVELS[isa]["march"]

    def flags(call: Any, *args: Any, **kwargs: Any) -> Any:
        cflags, ldflags = call(*args, **kwargs)
        return [f"march={march}" if flag.startswith("march=") else flag for flag in cflags], ldflags

    hooks: dict[str, Callable[..., Any]] = {"torch._inductor.cpp_builder:_get_optimization_cflags": flags}
    changes: list[tuple[Any, str, Any]] = [(cpu_vec_isa, "valid_vec_isa_list", lambda: [_vectors(isa)])]
    for least, level in _LEVELS.items():
        known = ((name, getattr(torch.cpu, name, None)) for name in level["questions"])
        # Where the code is not to be executed, what this CPU answers does not count.
        answers = ((name, has(least, asked if isa in here else lambda: True)) for name, asked in known if asked)
        changes += [(torch.cpu, name, functools.partial(bool, answer)) for name, answer in answers]
    for name, least in _ONEDNN.items():
        for module in (utils, mkldnn_fusion):
            if asked := getattr(module, name, None):
                answer = has(least, functools.partial(asked, "cpu"))
                changes.append((module, name, functools.partial(_for_cpu, asked, answer)))
    with hooked(hooks), patched(changes):
        yield


def _for_cpu(asked: Callable[[str], bool], answer: bool, device: str) -> bool:
    """Wrap ``asked`` to report the emulated ISA."""
    return answer if device == "cpu" else asked(device)


# Libraries and levels by what was made of them: a loader of Inductor's, or a generated module.  Inductor keeps both and
# makes neither again.
libraries_of: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()
levels_of: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


@contextlib.contextmanager
def watch_libraries(seen: Session) -> Iterator[None]:
    """Note the libraries of generated C++ and the levels of their compile commands, of those that are there too."""

    def target(call: Any, builder: Any) -> Any:
        path = call(builder)
        if path.endswith(".so"):
            seen.libraries.append(path)
        return path

    def command(call: Any, builder: Any) -> Any:
        made = call(builder)
        seen.levels.append(level_of(made))
        return made

    def load(call: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(seen.libraries)
        loader = call(*args, **kwargs)  # makes the commands every time: its keys are of them
        if made := seen.libraries[before:]:
            libraries_of[loader] = tuple(made)
        else:
            seen.libraries += libraries_of.get(loader, ())
        return loader

    hooks = {
        "torch._inductor.cpp_builder:CppBuilder.get_target_file_path": target,
        "torch._inductor.cpp_builder:CppBuilder.get_command_line": command,
        "torch._inductor.codecache:CppCodeCache.load_async": load,
    }
    with hooked(hooks, optional=True):
        yield


def level_of(command: str) -> str:
    """The level of ``machine.isa.ISAS`` that a compile command of Inductor's names, "" for none.

    By the flags that its classes add, of which each level has one of its own.
    """
    found = (level for level in reversed(ISAS) if re.search(rf"{re.escape(_LEVELS[level]['mark'])}(?![\w-])", command))
    return next(found, "")
