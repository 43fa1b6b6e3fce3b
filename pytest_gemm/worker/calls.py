"""Calls into code under test: what it is handed, what it may raise, and what it must leave as it was.

Three things are done around each call, mostly in the kernel's own process:

* :func:`handing` gives it tensor objects of its own.
* :func:`calling` restores the state of the process that the next case there depends on, and raises :class:`Misconduct`
  for what was changed.  It turns whatever is raised into an :class:`Exception`, and so does :func:`asking`.
* :func:`taken` takes the ordinary tensors out of results whose class or attributes could answer for them, and copies
  them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import platform
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch

from pytest_gemm.core.outcome import Misconduct
from pytest_gemm.operands.tensors import Operands


class Escape(Exception):
    """Something that foreign code has raised and that is no :class:`Exception`: a skip of pytest's, ``SystemExit``."""


# -- what it is handed -------------------------------------------------------------------------------


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What makes a tensor the view that it is.  Two tensors with equal ones show the same elements."""
    storage = tensor.untyped_storage()
    place = (storage.data_ptr(), storage.nbytes(), tensor.storage_offset())
    form = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj())
    return (*place, *form, tensor.requires_grad, type(tensor))


@contextlib.contextmanager
def handing(given: Operands, *, compiling: bool = False) -> Iterator[Operands]:
    """:func:`calling`, with operands for the block: equal to ``given``, in tensor objects of their own over its memory.

    A tensor that stands in several places (the A of ``r0.alias``) is one object in all of them.  About 1 us a tensor.

    Raises:
        Misconduct: as :func:`calling`; ``inputs-rebound`` where a tensor has another memory, shape, stride or dtype
            after the block; ``inputs-written`` where PyTorch has counted a write, even one that was undone.
    """
    made: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}

    def own(name: str, tensor: torch.Tensor) -> torch.Tensor:
        # The third keeps the original alive, so that its id stays its own.
        return made.setdefault(id(tensor), (name, tensor.detach(), tensor))[1]

    handed = given.map(own)
    handed.buffers = tuple(
        dataclasses.replace(one, storage=own(one.name, one.storage), view=own(one.name, one.view))
        for one in given.buffers
    )
    before = [(name, tensor, _identity(tensor), tensor._version) for name, tensor, _ in made.values()]
    with quiet(), calling(compiling=compiling):
        yield handed
    if rebound := dict.fromkeys(name for name, tensor, identity, _ in before if _identity(tensor) != identity):
        text = f"the backend gave its inputs other memory, shapes or types: {', '.join(rebound)}"
        raise Misconduct("inputs-rebound", text, "work on a copy: x.clone(), or a view under another name")
    if written := dict.fromkeys(
        name for name, tensor, _, version in before if tensor._version != version and name != "out"
    ):
        raise Misconduct("inputs-written", f"the backend wrote to its inputs: {', '.join(written)}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A compiler's own deprecation warnings are not reported, whatever filters the user's pytest has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- what it returns ---------------------------------------------------------------------------------


# Results of this size together and larger ones are not copied: the kernel's own are judged.
KEPT_BYTES: Final = 1 << 28
# As they were before any foreign code ran: it may replace them in the class, or beside it in an instance.
_DETACH: Final = torch.Tensor.detach
_CLONE: Final = torch.Tensor.clone
_AS_SUBCLASS: Final = torch.Tensor.as_subclass
_ATTRIBUTES: Final = torch.Tensor.__dict__["__dict__"]
_METHODS: Final = frozenset(name for name in dir(torch.Tensor) if callable(getattr(torch.Tensor, name)))


def taken(results: Iterable[Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The results as ordinary tensors over the kernel's memory, and copies of them as they are now.

    Ordinary: no subclass, no lazy conjugate or negation, no names.  The copies are the same tensors where
    there are :data:`KEPT_BYTES` or more, or where the layout is another one than strided.

    Raises:
        Misconduct: ``wrong-type`` for what is no tensor, for a class that computes its own elements and for a tensor
            whose attributes hide methods of its class; ``wrong-layout`` for a nested tensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        own = tuple(map(ordinary, results))
        size = sum(one.numel() * one.element_size() for one in own)
        return own, tuple(one if size >= KEPT_BYTES or not has_bits(one) else _CLONE(one) for one in own)


def ordinary(result: Any) -> torch.Tensor:
    """One result as an ordinary tensor over the same memory; raises as :func:`taken`."""
    kind = type(result)
    if not issubclass(kind, torch.Tensor):  # isinstance would ask the result
        raise Misconduct("wrong-type", f"the result is a {kind.__name__}, not a tensor")
    if torch._C._dispatch_keys(result).has(torch._C.DispatchKey.Python):
        text = f"the result is a {kind.__name__}, a tensor class that intercepts every operator"
        raise Misconduct("wrong-type", text, "return a torch.Tensor")
    # What a library notes on its tensors under a name of its own changes nothing.
    if hidden := sorted(_METHODS.intersection(_ATTRIBUTES.__get__(result))):
        text = f"the result has attributes that hide methods of torch.Tensor: {', '.join(hidden)}"
        raise Misconduct("wrong-type", text, "return a torch.Tensor")
    with torch._C.DisableTorchFunctionSubclass():
        made = _DETACH(result if kind is torch.Tensor else _AS_SUBCLASS(result, torch.Tensor))
        if made.is_nested:
            raise Misconduct("wrong-layout", "the result is a nested tensor, not a strided one")
        if made.layout is not torch.strided or made.device.type == "meta":
            return made
        named: Any = made
        if hasattr(named, "has_names") and named.has_names():  # torch 2.13 has no names any more
            made = named.rename(None)
        return made.resolve_conj().resolve_neg()


def has_bits(x: torch.Tensor) -> bool:
    """Whether a tensor has elements of its dtype in memory: not sparse, on meta or quantised."""
    return x.layout is torch.strided and x.device.type != "meta" and not x.is_quantized


def check_place(results: Iterable[torch.Tensor], given: Operands) -> None:
    """Look where results lie.

    Args:
        results: the kernel's own, as :func:`taken` gives them.
        given: the operands of the call.

    Raises:
        Misconduct: ``wrong-device`` for a result on another GPU than the operands, ``result-is-input`` for one in the
            memory of an operand, ``wrong-place`` for one that is not the given tensor, ``written-beside``
            where memory around that has changed.
    """
    results = tuple(results)
    for one in results:
        if one.device != given.a.device and one.device.type == given.a.device.type:
            text = f"the result is on {one.device}, the operands on {given.a.device}"
            raise Misconduct("wrong-device", text, "allocate where the operands are, under torch.cuda.device_of(a)")
    inputs = {one.storage.untyped_storage().data_ptr(): one.name for one in given.buffers if one.name != "out"}
    for one in results:
        if one.layout is torch.strided and one.device.type != "meta" and one.numel():
            shared = inputs.get(one.untyped_storage().data_ptr())
            if shared is not None:
                text = f"the result lies in the memory of {shared}: a write to one of them changes the other"
                raise Misconduct("result-is-input", text, "return memory of its own")
    if given.out is None:
        return
    if not given.beside_out_intact():
        raise Misconduct("written-beside", "the kernel wrote beside the elements of the given result")
    if any(one.numel() and _place(one) != _place(given.out) for one in results):
        raise Misconduct("wrong-place", "the result is not the given tensor, or another view of its memory")


def _place(x: torch.Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.shape, x.stride()


# -- what it leaves behind ---------------------------------------------------------------------------


try:
    _LIBM: Final = ctypes.CDLL("libm.so.6")
except OSError:
    _LIBM = None  # type: ignore[assignment,misc]  # on another system
_HAS_ENVIRONMENT: Final = hasattr(_LIBM, "fegetenv")
# Where the register lies among what C's fegetenv saves, its first bit of the rounding mode, the names of these modes,
# and its further bits.
_MODES: Final = ("FE_TONEAREST", "FE_DOWNWARD", "FE_UPWARD", "FE_TOWARDZERO")
_MXCSR: Final = (28, 13, _MODES, {15: "flush-to-zero", 6: "denormals-are-zero"})
_FPCR: Final = (0, 22, (_MODES[0], _MODES[2], _MODES[1], _MODES[3]), {24: "flush-to-zero", 19: "flush-to-zero-f16"})
_REGISTERS: Final = {"x86_64": _MXCSR, "AMD64": _MXCSR, "aarch64": _FPCR, "arm64": _FPCR}


def _float_environment() -> bytes:
    environment = ctypes.create_string_buffer(64)
    if _HAS_ENVIRONMENT:
        _LIBM.fegetenv(environment)
    return environment.raw


def _set_float_environment(before: bytes) -> None:
    if _HAS_ENVIRONMENT:
        _LIBM.fesetenv(ctypes.create_string_buffer(before, 64))


def _float_difference(before: bytes, now: bytes) -> str:
    """The names of what is set now and was not; the sticky flags of operations do not count."""
    old, new = _float_modes(before), _float_modes(now)
    return "" if old == new else " ".join(sorted(new - old) or sorted(old - new))


def _float_modes(environment: bytes) -> frozenset[str]:
    """The rounding mode and the treatment of subnormal numbers in saved registers: MXCSR on x86, FPCR on ARM."""
    if platform.machine() not in _REGISTERS:
        return frozenset()
    offset, shift, rounding, flags = _REGISTERS[platform.machine()]
    register = int.from_bytes(environment[offset : offset + 4], "little")
    return frozenset({rounding[register >> shift & 3], *(name for bit, name in flags.items() if register >> bit & 1)})


@dataclasses.dataclass(frozen=True)
class _Switch:
    """A piece of the process's state.

    Attributes:
        name: for the sentence.
        read, write: get it, and set it back.
        compiling: what a change by a compile is: an ``error`` as in a run, ``restored`` without a word, or ``kept``.
        difference: what to call a difference, "" for none; without it, any is called by the name.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    compiling: Literal["error", "restored", "kept"] = "error"
    difference: Callable[[Any, Any], str] | None = None

    def differs(self, before: Any, now: Any) -> str:
        """What to call the difference; "" for none."""
        if self.difference is not None:
            return self.difference(before, now)
        same = torch.equal(before, now) if isinstance(before, torch.Tensor) else bool(before == now)
        return "" if same else self.name


def _lower_limit(before: int, now: int) -> str:
    """A recursion limit may be raised, as Inductor does."""
    return "recursion limit" if now < before else ""


def _default_device() -> torch.device | None:
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


_AUTOCAST: Final = ("cpu", "cuda")


def _autocast() -> tuple[object, ...]:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST)


def _set_autocast(before: Any) -> None:
    for device, (enabled, dtype) in zip(_AUTOCAST, before, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _precisions() -> tuple[object, ...]:
    """PyTorch's switches for less precise products; see ``precision``."""
    cuda: Any = torch.backends.cuda.matmul
    onednn: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import, unseen by type checkers
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # the old and the new switch contradict each other
        legacy = ""
    return legacy, cuda.fp32_precision, onednn.fp32_precision, cuda.allow_fp16_accumulation


def _set_precisions(before: Any) -> None:
    cuda: Any = torch.backends.cuda.matmul
    onednn: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # as above
    legacy, *rest = before
    if legacy:
        torch.set_float32_matmul_precision(legacy)
    cuda.fp32_precision, onednn.fp32_precision, cuda.allow_fp16_accumulation = rest


def _folder() -> str:
    with contextlib.suppress(FileNotFoundError):  # it has been removed
        return os.getcwd()
    return ""


def _enter(folder: str) -> None:
    if folder:
        os.chdir(folder)


_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def _handlers() -> tuple[Any, ...]:
    return tuple(map(signal.getsignal, _SIGNALS))


def _set_handlers(before: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in zip(_SIGNALS, before, strict=True):
            if handler is not None:  # one that Python did not install
                signal.signal(number, handler)


def _modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _pop_modes(before: tuple[int, int]) -> None:
    while torch._C._len_torch_function_stack() > before[0]:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > before[1]:
        torch._C._pop_torch_dispatch_stack(None)


# Variables that PyTorch's compilers set for themselves, also where a kernel is compiled by its first run.
_COMPILERS: Final = ("TORCH", "_TORCH", "TRITON", "PYTORCH")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_COMPILERS)}


def _set_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    name, words, *rest = state
    return name, words.tobytes(), *rest


def _set_numpy_state(before: Any) -> None:
    name, words, *rest = before
    np.random.set_state((name, np.frombuffer(words, dtype=np.uint32), *rest))


def _set_streams(before: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = before


# In this order they are restored: the default device is one of PyTorch's modes.
_SWITCHES: Final = (
    _Switch("rounding", _float_environment, _set_float_environment, difference=_float_difference),
    _Switch("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Switch("default device", _default_device, torch.set_default_device),
    _Switch("modes of PyTorch's dispatcher", _modes, _pop_modes),
    _Switch("gradients", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Switch("autocast", _autocast, _set_autocast),
    _Switch("precision of products", _precisions, _set_precisions),
    _Switch("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Switch("number of CPU threads", torch.get_num_threads, torch.set_num_threads),
    _Switch("current folder", _folder, _enter),
    _Switch("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, difference=_lower_limit),
    _Switch("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _Switch("signal handlers", _handlers, _set_handlers),
    _Switch("sys.stdout and sys.stderr", lambda: (sys.stdout, sys.stderr), _set_streams),
    # A compiler sets variables for its helpers, and draws random tensors to time its candidates.
    _Switch("environment variables", _environment, _set_environment, "kept"),
    _Switch("random numbers of PyTorch", torch.get_rng_state, torch.set_rng_state, "restored"),
    _Switch("random numbers of numpy", _numpy_state, _set_numpy_state, "restored"),
    _Switch("random numbers of Python", random.getstate, random.setstate, "restored"),
)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """A block that reads facts from foreign code.

    Raises:
        Escape: for what is raised in the block and is no ``Exception``.  A Ctrl-C of the user passes.
    """
    try:
        yield
    except BaseException as error:
        # A user's Ctrl-C comes to the main thread; what a kernel raises in its own process comes to another one.
        typed = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if isinstance(error, Exception) or typed:
            raise
        raise Escape(error) from error


def _restored(switches: Iterable[tuple[_Switch, Any]], compiling: bool) -> list[str]:
    """Set back what differs; what of it is the backend's fault."""
    left = []
    for switch, before in switches:
        if difference := switch.differs(before, switch.read()):
            switch.write(before)
            if not compiling or switch.compiling == "error":
                left.append(difference)
    return left


@contextlib.contextmanager
def calling(*, compiling: bool = False) -> Iterator[None]:
    """A block that compiles or runs foreign code; the state of the process is the same afterwards.

    Args:
        compiling: the block only compiles: it may set environment variables and draw random numbers.

    Raises:
        Escape: as :func:`asking`.
        Misconduct: ``left-state-behind``, when the block has come to its end and has changed the state.
    """
    switches = [(switch, switch.read()) for switch in _SWITCHES if not (compiling and switch.compiling == "kept")]
    try:
        with asking():
            yield
    except KeyboardInterrupt:
        raise  # the run ends, and no other case needs the state
    except BaseException:
        _restored(switches, compiling)
        raise
    left = _restored(switches, compiling)
    if left:
        text = f"the backend changed the state of the process: {', '.join(left)}"
        raise Misconduct("left-state-behind", text, "set it back before returning")
