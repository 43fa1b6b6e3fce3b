"""A function of a C library as one of tensors: its prototype is read, and what it names is handed over."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.operands.dtypes import torch_dtype
from pytest_gemm.problem.dtypes import DTYPES
from pytest_gemm.storage.datafile import document

if TYPE_CHECKING:
    from pytest_gemm.tools.kernel import Form

SIGNATURE: Final = "void f(int m, int n, int k, const float* a, const float* b, float* c)"
"""Of a function of a shared library, unless ``--signature`` gives another one."""

_WORDS: Final[Mapping[str, Any]] = document(Path(__file__).with_name("c_words.toml"))
_ELEMENTS, _NAMES, COMPILERS = (
    {word: key for key, words in _WORDS[of].items() for word in words} for of in ("elements", "names", "compilers")
)

_MATRICES: Final = ("a", "b", "bias", "c")
_BASIC: Final = re.compile(r"(void|_?[Bb]ool|char|short|int|long|unsigned|signed|float|double)\b")
# Comments, attributes, the body of a definition; then what changes nothing in how a parameter is handed over.
_NOISE: Final = (
    r"/\*.*?\*/|//[^\n]*|\[\[.*?\]\]|extern\s*\"C\"\s*\{?|\w+::|\{.*"
    r"|(__attribute__|__declspec|alignas|noexcept)\s*\(([^()]|\(([^()]|\([^()]*\))*\))*\)"
)
_WEIGHT: Final = r"\bw(eights?)?\b"
_QUALIFIER: Final = r"\b(const|volatile|register|struct|enum|_*restrict(__)?)\b|\[[^]]*\]"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a C function.

    Attributes:
        role: what is handed over: a name of c_words.toml, "length" of a text, "" for a fixed value.
        kind: the words of its type, or of what it points to, in the order of the alphabet.
        is_pointer: it takes an address.
        flags: the values for a matrix as it is and for a transposed one; of a layout the one for rows.
        fixed: what is always handed over, as ctypes takes it.
    """

    role: str
    kind: str
    is_pointer: bool
    flags: tuple[int, ...] = ()
    fixed: Any = None

    def argument(self, values: Mapping[str, float]) -> Any:
        """What ctypes takes, of the values of all roles."""
        if self.fixed is not None:
            return self.fixed
        value = values[self.role]
        if self.role in _MATRICES:
            return ctypes.c_void_p(int(value))
        return self.number(self.flags[int(value)] if self.flags else value)

    def number(self, value: float) -> Any:
        """A number, or its address.

        64 bits serve for an integer of any size: processors of 64 bits pass it alike and store its lower bytes first.
        """
        kind = {"f32": ctypes.c_float, "f64": ctypes.c_double}.get(_ELEMENTS.get(self.kind, ""))
        held = kind(value) if kind else ctypes.c_int64(int(value))
        return ctypes.byref(held) if self.is_pointer else held


@dataclasses.dataclass(frozen=True)
class Prototype:
    """What is known of a C function.

    Attributes:
        parameters: in their order.
        result: its type for ctypes, where it tells whether the function failed; else ``None``.
        assumed: what of it the user has not said.
    """

    parameters: list[Parameter]
    result: Any
    assumed: str


_EMPTY: Final = torch.zeros(16)


@functools.cache
def of_library(path: str, symbol: str, signature: str, form: Form) -> Callable[..., None]:
    """A function of A, B, perhaps a bias, and C around one of C, on row-major matrices; strided ones are copied before.

    Its attribute ``out_dtype`` is the type of C.

    Raises:
        AttributeError: where the library has no such function.
        OSError: where it cannot be loaded.
        ValueError: for a prototype of which something cannot be handed over.
    """
    prototype = read(signature)
    foreign = _function(Path(path).absolute(), symbol)
    foreign.restype = prototype.result
    kinds = {one.role: one.kind for one in prototype.parameters}
    roles = [role for role in _MATRICES if role in kinds]
    dtypes = [torch_dtype(DTYPES[_ELEMENTS[kinds[role]]]) for role in roles]
    absent = [name for name in "mnk" if kinds.keys() & {"m", "n", "k"} and name not in kinds]

    def call(*tensors: torch.Tensor) -> None:
        if [x.dtype for x in tensors] != dtypes or tensors[0].dim() != 2 or not tensors[-1].is_contiguous():
            types = ", ".join(f"{role} of {_ELEMENTS[kinds[role]]}" for role in roles)
            raise TypeError(f"{symbol} takes matrices, the last one compact: {types}")
        (m, n), k = tensors[-1].shape, tensors[0].shape[0 if form.columns else 1]
        if absent and not m == n == k and not (absent == ["n"] and n == 1):
            what = "one column, or " * (absent == ["n"]) + "square matrices"
            raise ValueError(f"{symbol} takes {what}: its prototype has no {' and no '.join(absent)}")
        ready = [one.contiguous() for one in tensors]
        # An empty matrix has an address too, as callers have one.
        values: dict[str, float] = {x: one.data_ptr() or _EMPTY.data_ptr() for x, one in zip(roles, ready, strict=True)}
        values |= {"m": m, "n": n, "k": k, "alpha": 1, "beta": form.c == "addend", "cs": 1, "length": 1, "layout": 0}
        for x, one in zip("abc", (tensors[0], tensors[1], tensors[-1]), strict=True):
            values |= {f"rows{x}": one.shape[0], f"cols{x}": one.shape[1]}
        values |= {"ta": form.columns, "tb": form.weight, "threads": torch.get_num_threads()}
        # A BLAS asks for leading dimensions above 0 of empty matrices too.
        values |= {"lda": max(1, m if form.columns else k), "ldb": max(1, k if form.weight else n), "ldc": max(1, n)}
        code = foreign(*(one.argument(values) for one in prototype.parameters))
        if prototype.result is not None and bool(code) != (prototype.result is ctypes.c_bool):
            raise ValueError(f"{symbol} returned {code} (declare it void if that is no error)")

    names = ("out" if role == "c" else role for role in roles)
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    vars(call).update(out_dtype=dtypes[-1], __signature__=inspect.Signature(parameters))
    return call


def read(signature: str) -> Prototype:
    """What a prototype says, or the usual one where it is "".

    Raises:
        ValueError: for what is no prototype of a product, and for a parameter of which nothing is known.
    """
    text = re.sub(_NOISE, " ", signature or SIGNATURE, flags=re.DOTALL)
    outline = re.match(r"([^()]*?)\b\w+\s*\((.*)\)[^()]*$", text, re.DOTALL)
    head, inner = outline.groups() if outline else ("", "")
    wrong, assumed = f"--signature={signature}: ", "" if signature else SIGNATURE
    if local := re.search(r"\b(static|__global__)\b", head):
        raise ValueError(f"{wrong}a {local[0]} function is no symbol of a library")
    texts = [part.strip() for part in inner.split(",")] if outline else []
    stars = [_words(part)[0] for part in texts]
    if sorted(stars) == [0, 0, 0, 1, 1, 1] and not any(_words(part)[2] for part in texts):
        # What is written to is the last pointer.
        order = sorted(range(6), key=lambda i: (stars[i], stars[i] and "const" not in texts[i]))
        for i, name in zip(order, "mnkabc", strict=True):
            texts[i] += f" {name}"
        assumed = f"unnamed parameters are {', '.join(part[-1] for part in texts)}"
    hints = {hint for hint in ("char", "cblas", _WEIGHT) if re.search(hint, text, re.I)}
    parameters: list[Parameter] = []
    for part in texts:
        if (one := _parameter(part, hints)) is None:
            known = f"{' '.join(_WORDS['names'])}, pointers to {' '.join(x[0] for x in _WORDS['elements'].values())}"
            fixed = "'int nt=4', 'char side='L'', 'float* ws=1024' (memory of 1024 elements) or 'void* stream=NULL'"
            raise ValueError(f"{wrong}cannot hand over {part!r}; known are {known}; give others a value, as {fixed}")
        if one.role in _MATRICES and one.role in {earlier.role for earlier in parameters}:
            raise ValueError(f"{wrong}{part!r} is a second {one.role}: rename one of them, or fix its value")
        parameters.append(one)
    if not {"a", "b", "c"} <= {one.role for one in parameters}:
        raise ValueError(f"{wrong}give a function of C with pointers a, b and c, as {SIGNATURE!r}")
    return Prototype(parameters, _result(head), assumed)


def _result(head: str) -> Any:
    """The type of ctypes for a result that tells whether a function failed, by the text before the function's name."""
    if re.search(r"\*|\b(void|unsigned|long|short)\b", head):
        return None
    if re.search(r"\b(_B|b)ool\b", head):
        return ctypes.c_bool
    return ctypes.c_int if re.search(r"\bint(32_t)?\b|\benum\b|status|err", head, re.I) else None


def _words(text: str) -> tuple[int, str, str]:
    """Of a parameter how many addresses it is away from a value, the words of its type, sorted, and its name or ""."""
    words = re.findall(r"\w+", re.sub(_QUALIFIER, " ", text))
    name = words.pop() if len(words) > 1 and not _BASIC.fullmatch(words[-1]) else ""
    # An array of any number of dimensions is one address.
    return text.count("*") + text.count("&") + ("[" in text and "(" not in text), " ".join(sorted(words)), name


def _parameter(text: str, hints: set[str]) -> Parameter | None:
    """A parameter by its text, where there is something to hand over."""
    declared, _, value = map(str.strip, text.partition("="))
    stars, kind, name = _words(declared)
    role, dtype = _NAMES.get(name.lower().replace("_", ""), ""), _ELEMENTS.get(kind, "")
    role = "bias" if name.lower() == "b" and _WEIGHT in hints else role  # y = x w + b
    if value:
        one, is_memory = Parameter("", kind, stars > 0), stars > 0 and ("const" not in declared or role in _MATRICES)
        fixed = _fixed(one, value, is_memory=is_memory)
        return None if fixed is None else dataclasses.replace(one, fixed=fixed)
    flags: tuple[int, ...] = ()
    if role in {"ta", "tb"}:
        is_truth = kind.endswith("_t") or all(map(_BASIC.fullmatch, kind.split()))
        flags = (78, 84) if kind == "char" else (111, 112) if "cblas" in hints else (0, 1) if is_truth else ()
    elif role == "layout" and "cblas" in hints:
        flags = (101,)
    elif not role and "char" in hints and ("len" in f"{kind} {name}" or (kind, name) == ("size_t", "")):
        role = "length"  # Fortran takes the lengths of texts after all other parameters
    if role in _MATRICES:
        is_known = stars == 1 and dtype != ""
    elif role in {"alpha", "beta"}:
        is_known = dtype in {"f32", "f64", "i32"}
    else:
        is_known = flags != () if role in {"ta", "tb", "layout"} else role != "" and kind != "void"
    return Parameter(role, kind, stars > 0, flags) if is_known and stars < 2 else None


def _fixed(one: Parameter, value: str, *, is_memory: bool) -> Any:
    """A fixed value as ctypes takes it: a number, its address, NULL, or memory; ``None`` for what is no value."""
    value = _WORDS["values"].get(value, value)
    if value == "NULL":
        return ctypes.c_void_p(None)
    if letter := re.fullmatch(r"'(.)'", value):
        return one.number(ord(letter[1]))
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?[fFuUlL]*", value):
        return None
    number, dtype = float(value.rstrip("fFuUlL")), _ELEMENTS.get(one.kind)
    if not is_memory:
        return one.number(number)
    size = DTYPES[dtype].bits // 8 if dtype else 1 if one.kind == "void" else 8
    # At an address that vector code may ask for.
    memory: Any = torch.zeros(int(number) * size, dtype=torch.uint8).numpy()
    return (ctypes.c_char * len(memory)).from_buffer(memory) if number else ctypes.c_void_p(None)


def _function(path: Path, symbol: str) -> Any:
    """A function of a library."""
    library = ctypes.CDLL(str(path))
    if hasattr(library, symbol):
        return getattr(library, symbol)
    names: list[str] = []
    with contextlib.suppress(OSError):  # there may be no tools
        listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=False)
        names = re.findall(r" [TWi] (\w+)", listed.stdout)
    hint = did_you_mean(symbol, names) or f"; it has {', '.join(names[:5]) or 'none'}"
    if mangled := re.search(rf"\b_[ZR]\w*?(?<!\d){len(symbol)}{re.escape(symbol)}\w*", " ".join(names)):
        hint = f', but {mangled[0]}: declare it extern "C"'
    raise AttributeError(f"{path.name} has no function {symbol!r}{hint}")
