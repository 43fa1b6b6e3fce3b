"""C++ kernels of several programs, compiled as one translation unit.

Two thirds of what g++ does for a kernel are the same for the next one: the header, and the instances of a micro-kernel
that both of them call.  So several programs are generated first; then their kernels are compiled together, and each is
linked into a library of its own, in the place where Inductor looks for it.  The micro-kernel that several begin with
stands once, the rest of each in a namespace.

The compiler, its flags and the text of a kernel are those of Inductor.  What it inlines into what may be another thing
with several callers in sight, so the library ends with the number of the other kernels, and Inductor's key of it is not
that of the kernel alone.  A kernel that cannot be compiled so is left to Inductor.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from pytest_gemm.backends.inductor.hooks import hooked
from pytest_gemm.core.text import causes

# The function of a kernel, and the one that Python calls when it loads the library.
_NAMES: Final = ("kernel", "PyInit_kernel")
# Functions that begin a kernel's text: a block of the micro-kernel, and the loop over blocks.
_SHARED: Final = 2
# Libraries that come with libtorch: to look for names in them takes most of the time of linking.
_BEHIND_TORCH: Final = frozenset({"-ltorch_cpu", "-ltorch_python"})
# Compiled so, a library has only what its kernel calls.
_SECTIONS: Final = ("-c", "-ffunction-sections", "-fdata-sections")
# The other linker of binutils takes a third of the time.
_LINKER: Final = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
# Behind the text of a kernel, and part of the key of its program: Inductor's caches answer by these.
_KEY: Final = "// compiled together\n"
# Behind the last part of a library.
_NOTE: Final = b"\nother kernels: "


class NotCompiledError(Exception):
    """A kernel was called that waits for a compiler."""


class Waiting:
    """A kernel that waits for a compiler; ``load`` gives its function."""

    def __init__(self, load: Callable[[], Callable[..., Any]]) -> None:
        self.load = load

    def __call__(self, *_: Any) -> None:
        """Stop the program that has called it.

        Raises:
            NotCompiledError: always.
        """
        raise NotCompiledError


def compiled_with(kernel: object) -> int:
    """How many other kernels the compiler saw beside this one, by its library; 0 for one that was compiled alone."""
    path = getattr(getattr(kernel, "__self__", None), "__file__", None)
    _, note, count = Path(path).read_bytes().rpartition(_NOTE) if path else (b"", b"", b"")
    return int(count) if note else 0


def stopped_by(error: BaseException) -> bool:
    """Whether a program ended because a kernel of it waits."""
    return any(isinstance(one, NotCompiledError) for one in causes(error))


class Batch:
    """Kernels that wait for a compiler."""

    def __init__(self) -> None:
        self._builders: list[Any] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Programs that are generated in the block leave their kernels here."""

        def binding(_: Any, __: Any, argtypes: list[str], source: str) -> Waiting:
            from torch._inductor.codecache import CppPythonBindingsCodeCache

            load = CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source + _KEY, submit_fn=self._take)
            return Waiting(load)

        hooks: dict[str, Callable[..., Any]] = {
            "torch._inductor.async_compile:AsyncCompile.cpp_pybinding": binding,
            "torch._inductor.codecache:PyCodeCache.write": lambda call, text, extra="": call(text, extra + _KEY),
        }
        with hooked(hooks):
            yield

    def _take(self, task: Any) -> Future[None]:
        """In place of a pool that compiles: Inductor does what is not done when it loads the kernel."""
        _, builders = task.args
        self._builders += builders
        done = Future[None]()
        done.set_result(None)
        return done

    def compile(self) -> None:
        """Compile them, and leave to Inductor what cannot be compiled so."""
        commands = {
            builder.get_target_file_path(): shlex.split(builder.get_command_line()) for builder in self._builders
        }
        self._builders.clear()
        groups: defaultdict[tuple[str, ...], list[_Kernel]] = defaultdict(list)
        for target, command in commands.items():
            kernel = _Kernel(Path(target), command)
            groups[kernel.flags].append(kernel)
        with contextlib.suppress(OSError):  # a full disk
            for kernels in groups.values():
                _compile_accepted(kernels)


class _Kernel:
    """One kernel's text, and Inductor's command for it."""

    def __init__(self, target: Path, command: Sequence[str]) -> None:
        self.target, self.command = target, command
        self.source = next(word for word in command if word.endswith(".cpp"))
        text = Path(self.source).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        self.includes = [line for line in lines if line.startswith(("#include", "#define PY_SSIZE_T_CLEAN"))]
        own = "".join(line for line in lines if line not in self.includes)
        # Functions end with a brace in the first column; the kernel's own and what is behind it are one part.
        before, kernel, after = own.partition('extern "C"')
        self.parts = (*re.split(r"(?<=\n\}\n)", before), kernel + after)

    @property
    def flags(self) -> tuple[str, ...]:
        """The command without what differs between two kernels."""
        return tuple(self._words("", ""))

    def _words(self, source: str, target: str) -> list[str]:
        own = {self.source: source, str(self.target): target}
        return [own.get(word, word) for word in self.command]

    def run(self, source: Path, target: Path, *more: str, without: frozenset[str] = frozenset()) -> None:
        """Run its command on another file, with more words and without some.

        Raises:
            OSError, subprocess.CalledProcessError: where it fails.
        """
        compiler, *words = (word for word in self._words(str(source), str(target)) if word not in without)
        subprocess.run(
            [compiler, "-Wl,--no-as-needed", *words, "-w", *more], check=True, capture_output=True, text=True
        )


def _compile_accepted(kernels: Sequence[_Kernel]) -> None:
    """Compile those that the compiler does not complain of."""
    while len(kernels) > 1 and (complaint := _complaint(kernels)):
        left = [kernel for kernel in kernels if kernel.source not in complaint]  # it names the kernels' own files
        if len(left) == len(kernels):
            return
        kernels = left


def _complaint(kernels: Sequence[_Kernel]) -> str:
    """What the compiler says against these kernels, "" when they are compiled."""
    try:
        _compile(kernels)
    except subprocess.CalledProcessError as error:
        return str(error.stderr) or str(error)
    return ""


def _compile(kernels: Sequence[_Kernel]) -> None:
    """Compile kernels together, and link each.

    Raises:
        OSError, subprocess.CalledProcessError: where the compiler fails.
    """
    numbers = {kernel.target: number for number, kernel in enumerate(kernels)}
    first = kernels[0]
    with tempfile.TemporaryDirectory(dir=first.target.parent) as folder:
        source, made, exported = (Path(folder, name) for name in ("kernels.cpp", "kernels.o", "exported"))
        source.write_text("".join(_text(kernels, numbers)), encoding="utf-8")
        exported.write_text("{ global: PyInit_kernel; local: *; };", encoding="utf-8")
        first.run(source, made, *_SECTIONS)
        # Each library would have the debug lines of all kernels, which nothing reads.
        linking = ["-Wl,--strip-debug", "-Wl,--gc-sections", f"-Wl,--version-script={exported}"]
        for kernel in kernels:
            library, named = Path(folder, kernel.target.name), f"PyInit_kernel_{numbers[kernel.target]}"
            words = [*linking, f"-Wl,--defsym=PyInit_kernel={named}"]
            try:
                kernel.run(made, library, *words, *_LINKER, without=_BEHIND_TORCH)
            except subprocess.CalledProcessError:  # an installed linker need not find all that this compiler has
                kernel.run(made, library, *words, without=_BEHIND_TORCH)
            with library.open("ab") as file:
                file.write(b"%b%d" % (_NOTE, len(kernels) - 1))
            library.replace(kernel.target)


def _text(kernels: Sequence[_Kernel], numbers: Mapping[Path, int]) -> Iterator[str]:
    """The translation unit: what kernels begin with alike once, and the rest of each in a namespace within."""
    yield from dict.fromkeys(line for kernel in kernels for line in kernel.includes)
    alike: defaultdict[tuple[str, ...], list[_Kernel]] = defaultdict(list)
    for kernel in kernels:
        alike[kernel.parts[:-1][:_SHARED]].append(kernel)
    for place, (shared, those) in enumerate(alike.items()):
        yield f"namespace alike_{place} {{\n"
        yield from shared
        for kernel in those:
            number = numbers[kernel.target]
            yield from (f"#define {name} {name}_{number}\n" for name in _NAMES)
            yield f'#line 1 "{kernel.source}"\nnamespace of_{number} {{\n'
            yield from kernel.parts[len(shared) :]
            yield "\n}\n"
            yield from (f"#undef {name}\n" for name in _NAMES)
        yield "}\n"
