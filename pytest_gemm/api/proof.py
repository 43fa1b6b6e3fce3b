"""The proof of execution: which kernels computed a result."""

from __future__ import annotations

import dataclasses
import re

from pytest_gemm.api import device_kernels
from pytest_gemm.core.outcome import Reason
from pytest_gemm.machine.isa import ISAS


@dataclasses.dataclass(frozen=True)
class Generation:
    """For which instruction set of the CPU a program was generated and compiled, as three witnesses have it.

    Attributes:
        asked: one of ``machine.isa.ISAS``.
        compiled: levels of the compile commands that made its libraries; "" is a command that names none.
        level: the lowest level that executes all of the libraries' machine code; "" for code without vectors.
        units: what that code has: ``ymm``, ``zmm``, ``vnni``, ``bf16``, ``amx``, ``amx_fp16``, ``brgemm``.
        counted: the compiler's counters of AMX kernels that rose while it generated the program.
        needed: a unit that the machine code of each chosen candidate has to have, by its name.
    """

    asked: str
    compiled: tuple[str, ...]
    level: str
    units: tuple[str, ...]
    counted: tuple[str, ...] = ()
    needed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.asked}: {self._units}"

    @property
    def _units(self) -> str:
        return ", ".join(self.units) or "no vectors"

    def objection(self) -> Reason | None:
        """Why this is not code of the requested level, or not of the candidate that was chosen."""
        if set(self.compiled) != {self.asked}:
            seen = " and ".join(name or "no instruction set" for name in self.compiled) or "an unknown instruction set"
            return Reason("other-isa", f"{self.asked} was requested, the code was compiled for {seen}")
        if unknown := {self.asked, self.level or self.asked} - set(ISAS):
            return Reason("other-isa", f"no instruction set is called {min(unknown)}")
        if self.level and ISAS.index(self.level) > ISAS.index(self.asked):
            text = f"{self.asked} was requested, the machine code needs {self.level} (it has {self._units})"
            return Reason("other-isa", text)
        if self.counted and ISAS.index(self.asked) < ISAS.index("amx"):  # it counts AMX's alone
            return Reason("other-isa", f"{self.asked} was requested, Inductor's {', '.join(self.counted)} rose")
        for name, unit in self.needed:
            if unit not in self.units:
                text = f"{name} at {self.asked} needs {unit}, the machine code has {self._units}"
                return Reason("other-micro-kernel", text)
        return None


@dataclasses.dataclass(frozen=True)
class Proof:
    """Evidence of what computed a result, gathered in four independent ways.

    Attributes:
        chosen: candidates that were selected, ``("triton_mm-64x64x32,s2,w4",)``.
        generated: kernels that the generated program defines.
        executed: kernels seen to execute during the last run.
        foreign: matrix products of other libraries seen to execute (``aten.mm``): a fallback.
        profiled: names of the kernels that the device's own profiler saw, in order; ``None`` where it was not used.
        device_kernel: pattern (``re``) of the backend's own kernels among these; "" where any name will do.
        around_library: whether what was chosen is a program around a library's product (decompose-K), whose kernels
            may then be among these.
        configuration: what the generated code shows of each product's blockings, where the backend can read it.
        contradiction: where the generated code is not that of the requested candidate, in words.
        provable: ``False`` where there is nothing to prove, for a plain callable.
        wanted: pattern (``re``) of the one choice that has to be chosen; "" where any of the backend's will do.
        generation: for which instruction set the code was generated, where one was requested.
        fused: whether the product's own kernel did the whole epilogue; ``None`` without one, or where that is unknown.
        fusions: steps that Inductor's scheduler has fused into C++ templates; a lowering may have fused others before.
        uncalled: the backend's function, where the last run has called neither it nor one in its place; "" otherwise.
        composed: whether eager PyTorch computed a part of the problem around a function; ``None`` where there is none.
        whole: whether ``bind=`` or ``linear=`` of a function computed all of it; ``None`` where it has neither.
        compiled_with: how many kernels of other programs the compiler saw beside one of its own; 0: as for a user.
    """

    chosen: tuple[str, ...] = ()
    generated: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    profiled: tuple[str, ...] | None = None
    device_kernel: str = ""
    around_library: bool = False
    configuration: tuple[str, ...] = ()
    contradiction: str = ""
    provable: bool = True
    wanted: str = ""
    generation: Generation | None = None
    fused: bool | None = None
    fusions: int = 0
    uncalled: str = ""
    composed: bool | None = None
    whole: bool | None = None
    compiled_with: int = 0

    @property
    def kernels(self) -> tuple[str, ...]:
        """What ran, by name: the executed kernels with the choice that they came from.

        Of eager code, which names operators only, the products that the profiler saw stand beside them.
        """
        if not self.provable and self.profiled:
            return self.executed + tuple(f"[{name}]" for name in device_kernels.libraries(self.profiled))
        code = f" [{self.generation}]" if self.generation is not None else ""
        executed = tuple(f"{name}{code}" for name in self.executed)
        if self.chosen and len(self.chosen) == len(self.executed):
            pairs = zip(self.executed, self.chosen, strict=True)
            return tuple(f"{e}{code}" if c == e else f"{e} ({c}){code}" for e, c in pairs)
        return executed + tuple(f"({c})" for c in self.chosen)

    def objection(self) -> Reason | None:
        """Why the evidence does not show that the backend computed the result; ``None`` when it does."""
        if self.foreign:
            return Reason("foreign-kernel", f"the product was computed by {', '.join(self.foreign)}")
        if self.uncalled:
            remedy = "a bind() that calls another function of the library calls self.own(function)"
            return Reason("nothing-called", f"the run returned without a call of {self.uncalled}", remedy)
        if not self.provable:  # and of an empty product the device executes nothing
            return self._lacks_own_kernel() if self.device_kernel else None
        for name in ("chosen", "generated", "executed"):
            if not getattr(self, name):
                return Reason(f"nothing-{name}", f"no kernel of the backend was {name}")
        if self.wanted and (len(self.chosen) > 1 or not re.match(self.wanted, self.chosen[0])):
            text = f"the products were computed by {', '.join(self.chosen)}, not by one template"
            return Reason("other-template", text)
        if self.generation is not None and (objection := self.generation.objection()) is not None:
            return objection
        if self.contradiction:
            return Reason("another-candidate", self.contradiction)
        if not self.around_library and (library := device_kernels.libraries(self.profiled or ())):
            return Reason("foreign-kernel", f"the device executed a library's product: {', '.join(library)}")
        return self._lacks_own_kernel()

    def _lacks_own_kernel(self) -> Reason | None:
        if self.profiled is None or any(re.search(self.device_kernel, name) for name in self.profiled):
            return None
        seen = ", ".join(map(device_kernels.short, self.profiled)) or "nothing"
        text = f"the device executed no kernel of the backend ({self.device_kernel}) but {seen}"
        return Reason("nothing-profiled", text)
