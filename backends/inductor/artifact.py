"""A problem compiled by Inductor once, and run with any operands.

With freezing, the weight is a constant of the generated program: packed into the layout of the micro-kernel at
compile time.  Compiling again for every distribution would cost hundreds of times more than computing, so an
artifact *rebinds*: the compile runs on stand-in constants of the same geometry and random contents, the
template's own packing call is recorded, and for new operands that very code packs the new weight into the
module's constant.  Before an artifact may do so it has shown that the replay on the stand-ins gives every
constant of the module bit for bit, and that every constant operand is accounted for.  Where it has not
(a bias of up to 8 elements is written into the kernel's text, for example) each set of constants is compiled
anew: correct and slower, see :attr:`Artifact.rebind_reason`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import finalize

import torch

from pytest_gemm.api.executed import is_product, record_products
from pytest_gemm.api.proof import Generation, Proof
from pytest_gemm.backends.cpp import machine_code, micro_kernels
from pytest_gemm.backends.inductor import torch_compat
from pytest_gemm.backends.inductor.bindings import (
    Binding,
    RecompileError,
    Tensors,
    bindings,
    same_bits,
    stand_in,
    stand_ins,
)
from pytest_gemm.backends.inductor.compilation import CompileSpec
from pytest_gemm.backends.inductor.compiled import Compiled, calling, compile_once, constant_tensors, uncounted
from pytest_gemm.backends.inductor.poisoning import poisoned_memory
from pytest_gemm.core.outcome import Reason, Unsupported
from pytest_gemm.machine import isa as isa_module
from pytest_gemm.machine import processor
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import guard_pages
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

if TYPE_CHECKING:
    from pytest_gemm.operands.tensors import Operands

_Made = TypeVar("_Made")  # What pauses where a generated program may wait for its kernels.
Steps: TypeAlias = Generator[None, None, _Made]


class Artifact:
    """A problem compiled for one geometry of operands; until :meth:`finish` it is generated, and nothing of it has run.

    Attributes:
        rebind_reason: why it cannot be rebound, "" when it can or has no constants.
    """

    def __init__(self, problem: Problem, tensors: Tensors, spec: CompileSpec) -> None:
        self._recorded: tuple[str, ...] = ()
        self.problem = problem
        self.spec = spec
        self.rebind_reason = ""
        self._bindings: list[Binding] = []
        self._bound: tuple[Any, ...] | None = None
        self._kept: list[torch.Tensor] = []
        self._names = constant_tensors(problem, tensors, spec)
        self._steps = self._make(tensors)
        next(self._steps)

    def finish(self) -> None:
        """Wait for the compiler; nothing to do the second time."""
        _finished(self._steps)

    def _make(self, tensors: Tensors) -> Steps[None]:
        # A compile that inlines a tensor of this shape can never be rebound, so the stand-ins are not even tried.
        inlined = [n for n in self._names if tensors[n].dim() < 2 and tensors[n].numel() <= 8]
        if not self._names:
            self._compiled = yield from self._run_compiler(tensors, {})
        elif self.spec.request.user_caches:
            self.rebind_reason = "a user's caches hold the constants"
        elif inlined:
            self.rebind_reason = f"{', '.join(inlined)} is written into the kernel's text"
        else:
            yield from self._try_to_rebind(tensors)
        if self.rebind_reason:
            yield from self._compile_for(tensors)
        if self.spec.mode == "cudagraphs":
            self.run(tensors)  # PyTorch may skip the graph: to be known before a judged run

    def _run_compiler(self, tensors: Tensors, constants: Tensors) -> Steps[Compiled]:
        self.spec.log.compiles += 1
        spec, again = self.spec, hasattr(self, "_compiled")
        if again and spec.candidate is None:  # other constants are no reason to select something else
            spec = dataclasses.replace(spec, candidate=self.chosen)
        made = yield from compile_once(self.problem, tensors, constants, spec)
        if spec is not self.spec:  # a second compile for the same selection benchmarks nothing
            made.session.pruned.update(self._compiled.session.pruned)
        for module in made.modules:
            finalize(self, torch_compat.forget_module, module)
        return made

    def _try_to_rebind(self, tensors: Tensors) -> Steps[None]:
        constants = stand_ins(self._names, tensors)
        self._compiled = yield from self._run_compiler(tensors, constants)
        if len(self._compiled.modules) != 1:
            self.rebind_reason = f"{len(self._compiled.modules)} modules were generated"
            return
        ignorable = frozenset({"zero_b", "bias"} if self.problem.beta == 0.0 else {"zero_b"})
        module = self._compiled.modules[0]
        sources = {**constants, **program.derived(self.problem, constants)}
        self._bindings, self.rebind_reason = bindings(module, self._compiled.session, sources, ignorable)
        # The packings hold the stand-ins; the recipes hold what they need of them.
        self._compiled.session.packings.clear()

    def _compile_for(self, tensors: Tensors) -> Steps[None]:
        # Copies: the program keeps its constants, and the operands are not its own.
        constants = {n: _copy(tensors[n]) for n in self._names}
        self._compiled = yield from self._run_compiler(tensors, constants)
        self._contents = constants

    def bind(self, tensors: Tensors) -> None:
        """Make these constants those of the program; nothing to do when they are already."""
        if not self._names:
            return
        identity = tuple((t.data_ptr(), t._version, t.shape, t.stride()) for t in (tensors[n] for n in self._names))
        if identity == self._bound:
            return
        if self.rebind_reason:
            if not all(same_bits(tensors[n], self._contents[n]) for n in self._names):
                _finished(self._compile_for(tensors))
        else:
            tensors = {**tensors, **program.derived(self.problem, tensors)}
            for binding in self._bindings:
                constant = guard_pages.moved(binding.recipe(tensors[binding.source]), "packed")
                setattr(self._compiled.modules[0], binding.attribute, constant)
        self._bound = identity
        # Alive, so that no other tensor can take their address.
        self._kept = [tensors[n] for n in self._names]

    def run(self, tensors: Tensors) -> torch.Tensor:
        """Compute the program on these tensors, in memory that holds poison.

        Raises:
            RecompileError: when the compiled program's guards reject them.
        """
        before = tensors["a"].clone() if self.problem.has("out.alias") else None
        self.bind(tensors)
        if before is not None:  # a compile calls the program, which writes its result over A
            tensors["a"].copy_(before)
        compiled = self._compiled
        args = [tensors[n] for n in compiled.inputs]
        compiled.calls.clear()
        try:
            check_bands = self.spec.mode != "cudagraphs"
            with calling(self.problem, self.spec), poisoned_memory(compiled.modules, check_bands=check_bands):
                return compiled.function(*args) if check_bands else self._replayed(args)
        except RuntimeError as error:
            if torch_compat.recompiled(error):
                raise RecompileError(f"{self.problem}: {error}") from error
            raise

    def _replayed(self, args: list[torch.Tensor]) -> Any:
        """The result of a replayed CUDA graph, copied out of the graph's own memory.

        The first calls warm up and record, so it is called until it can only be a replay.  Kernels are called from
        Python while they are recorded and not when they are replayed: those calls are what the proof goes by.  Where
        the two calls of the compile have been enough to record, they are those of the second one.

        Raises:
            Unsupported: when PyTorch has not made a graph of the program.
        """
        calls, skipped = self._compiled.calls, torch_compat.graphs_skipped()
        made: Any = None
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            made = self._compiled.function(*args)
        if self._compiled.session.graph_skipped or torch_compat.graphs_skipped() > skipped:
            raise Unsupported("cudagraphs-skipped", "PyTorch made no CUDA graph of the program")
        if calls:
            self._recorded = tuple(dict.fromkeys(calls))
        calls[:] = self._recorded or self._compiled.order
        return tuple(one.clone() for one in made) if isinstance(made, tuple) else made.clone()

    def proof(self) -> Proof:
        """What the last run executed, what the module defines and what was chosen."""
        compiled = self._compiled
        templates = compiled.templates
        if compiled.session.subgraphs:
            # Inductor's own program around a product of ATen's slices: what it generated is the sum of these.
            templates = tuple(compiled.kernels)
        chosen = tuple(c for c in self.chosen if c not in compiled.session.foreign)
        is_warm = not compiled.session.choices and bool(self.spec.request.user_caches)
        if is_warm:
            # Nothing was selected: the program came out of the FX graph cache, with what was selected back then.
            chosen = tuple(f"{name} out of the FX graph cache" for name in templates)
        is_unseen = not torch_compat.sees_selections()
        if is_unseen:
            chosen = tuple(f"{name} by a selection that {torch.__version__} does not show" for name in templates)
        wanted = "" if is_warm or is_unseen else self.spec.wanted
        # Where one template has to have computed it, the code has to be that template's, however it was selected.
        named = len(chosen) == 1 and not (is_warm or is_unseen) and (wanted or self.spec.suffix)
        asked = self.spec.request.candidate or (chosen[0] if named else "")
        return Proof(
            chosen=chosen,
            generated=templates,
            executed=tuple(c for c in (compiled.order if compiled.in_cpp else compiled.calls) if c in templates),
            foreign=tuple(dict.fromkeys((*self.library, *compiled.session.foreign))),
            device_kernel=self.spec.device_kernel or rf"^(?:{'|'.join(map(re.escape, templates))})",
            around_library=bool(compiled.session.subgraphs),
            wanted=wanted,
            generation=self._generation and micro_kernels.needing(self._generation, chosen),
            configuration=tuple(dict.fromkeys(map(str, self.products))),
            contradiction=micro_kernels.contradiction(self.products, asked),
            fused=self.fused if self.problem.passes and not self.problem.has("program.chained") else None,
            fusions=compiled.session.fusions,
            compiled_with=compiled.session.compiled_with,
        )

    @functools.cached_property
    def _generation(self) -> Generation | None:
        """What the program was generated for, by its libraries; ``None`` where no instruction set was asked for."""
        if not self.spec.request.isa or not self._compiled.templates:
            return None
        isa, compiled, seen = self.spec.request.isa, self._compiled, self._compiled.session
        paths = dict.fromkeys(map(Path, seen.libraries))
        for module in compiled.modules:
            for name in compiled.kernels:
                # The function that Python calls has the library that it is in.
                kernel = getattr(module, name, None)
                path = getattr(getattr(getattr(kernel, "kernel", kernel), "__self__", None), "__file__", None)
                if path is not None:
                    paths[Path(path)] = None
        units = frozenset[str]().union(*(machine_code.units_of(path) for path in paths if path.is_file()))
        # At the CPU's best level the compiler may use all that it has, and bf16 conversions come without AMX too.
        needed = units - {"bf16"} if isa_module.isas(processor.cpu().flags)[-1:] == (isa,) else units
        # Commands that link, and those of constants, have no level.
        levels = tuple(dict.fromkeys(filter(None, seen.levels))) or tuple(dict.fromkeys(seen.levels))
        return Generation(isa, levels, machine_code.level(needed), tuple(sorted(units)), seen.counted)

    @property
    def products(self) -> tuple[micro_kernels.Product, ...]:
        """What the generated code shows of the C++ templates' products; none where it has none of them."""
        return self._compiled.products

    @property
    def source(self) -> str:
        """Text of the generated program with its kernels."""
        return self._compiled.source

    @property
    def chosen(self) -> tuple[str, ...]:
        """The candidates that the program was made of; one but for a program with several products."""
        names, foreign, suffix = self._compiled.session.chosen, self._compiled.session.foreign, self.spec.suffix
        is_idle = ("NUM_SMS" in suffix and "NUM_SMS" not in self.source) or micro_kernels.unmet(self.products, suffix)
        if not suffix or is_idle:  # the options make no difference to this program
            return tuple(names)
        return tuple(name if name in foreign else f"{name}{suffix}" for name in names)

    @property
    def library(self) -> tuple[str, ...]:
        """The products of libraries that the program calls, without those of decompose-K's slices."""
        foreign = self._compiled.foreign
        return tuple(n for n in foreign if not (self._compiled.session.subgraphs and _multiplies_slices(n)))

    @property
    def fused(self) -> bool:
        """Whether the program calls no other kernel after its one template: nothing is done to a stored result."""
        order, templates = self._compiled.order, self._compiled.templates
        return len(templates) == 1 and templates[0] in order and {*order[order.index(templates[0]) :]} == {*templates}


def _finished(steps: Steps[None]) -> None:
    for _ in steps:
        pass


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = stand_in(tensor, 0)
    if copy.numel():
        # Through the view; an expanded one repeats itself, which is why it is not assigned element by element.
        narrow = tuple(slice(1 if s == 0 else n) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        copy[narrow].copy_(tensor[narrow])
    return copy


def _multiplies_slices(name: str) -> bool:
    """Whether this is the batched product that decompose-K calls ATen for: ``aten.bmm.dtype_out``, ``bmm_dtype``."""
    return re.fullmatch(r"(torch\.ops\.)?(aten|extern_kernels)\.bmm(_dtype)?(\.\w+)?", name) is not None


class InductorPrepared:
    """A problem on its artifact; several of them share one where only dynamic sizes differ."""

    def __init__(self, problem: Problem, artifact: Artifact, contract: Contract) -> None:
        self.problem = problem
        self.artifact = artifact
        self.contract = contract

    def run(self, operands: Operands) -> torch.Tensor:
        """Rebind the constants where needed and run; see :meth:`Artifact.run`."""
        return self.artifact.run(program.args(self.problem, operands))

    @contextlib.contextmanager
    def timed(self, operands: Operands) -> Iterator[Callable[[], torch.Tensor]]:
        """A block with the compiled program as a user calls it: constants bound, memory not poisoned, nothing counted.

        PyTorch's threads and switches are those of the problem inside the block, so that a call sets none.
        """
        tensors = program.args(self.problem, operands)
        self.artifact.run(tensors)
        compiled = self.artifact._compiled
        args = [tensors[n] for n in compiled.inputs]
        function = compiled.function
        with calling(self.problem, self.artifact.spec), uncounted(compiled.modules):
            yield lambda: function(*args)

    def proof(self) -> Proof:
        """What the last :meth:`run` executed.  An empty result needs no kernel, so none has to be proved."""
        proof = self.artifact.proof()
        return dataclasses.replace(proof, provable=False) if self.problem.shape.is_empty else proof

    @property
    def constant_b(self) -> bool:
        """Whether B is among the constants of the program, and no argument of it."""
        return bool(self.artifact._names)

    @property
    def pruned(self) -> dict[str, Reason]:
        """Candidates that were left out on the way to the one that runs: name -> why."""
        return dict(self.artifact._compiled.session.pruned)

    @property
    def timings(self) -> dict[str, float]:
        """Seconds a call of the candidates that the selection timed, by name; empty where it timed none."""
        return dict(self.artifact._compiled.session.timings)

    @property
    def source(self) -> str:
        """Text of the generated program, for the artifacts of a failure."""
        return self.artifact.source


class CalledPrepared(InductorPrepared):
    """A compiled program whose products are ATen's own: they are what is to be judged, and nothing has to be proved."""

    def proof(self) -> Proof:
        """The products that the program calls, by what the dispatcher saw and by its text."""
        compiled = self.artifact._compiled
        return Proof(executed=compiled.foreign or compiled.order, provable=False)


class AroundPrepared(InductorPrepared):
    """A compiled program with a user's operator or kernel in it."""

    def __init__(self, problem: Problem, artifact: Artifact, contract: Contract, graph: str) -> None:
        super().__init__(problem, artifact, contract)
        self._graph, self._seen = graph, list[str]()

    def run(self, operands: Operands) -> Any:
        """As every compiled program, with the operators noted that the dispatcher executes."""
        own = self._graph.replace("::", ".")
        with record_products(lambda name: name.startswith(f"{own}.") or is_product(name)) as self._seen:
            return super().run(operands)

    def proof(self) -> Proof:
        """The operator or the kernel, and the kernels that Inductor has written around it."""
        compiled, is_operator = self.artifact._compiled, "::" in self._graph
        calls = compiled.order if compiled.in_cpp else tuple(compiled.calls)
        own = re.compile(re.escape(self._graph.replace("::", ".")) + (r"\." if is_operator else r"(_\d+)?$"))
        if compiled.in_cpp:
            calls += tuple(re.findall(rf"\b(?:call_|kernels\.)({re.escape(self._graph)}(?:_\d+)?)\(", compiled.source))
        seen = [name for name in (*self._seen, *calls) if own.match(name)]
        products = (*self._seen, *(name.removeprefix("torch.ops.") for name in self.artifact.library))
        foreign = [name for name in products if not own.match(name)]
        nothing = self.problem.shape.is_empty or self.problem.shape.k == 0
        return Proof(
            generated=tuple(compiled.kernels),
            executed=tuple(dict.fromkeys((*seen, *calls))),
            foreign=tuple(dict.fromkeys(foreign)),
            device_kernel="" if is_operator or nothing or self._seen else f"^{re.escape(self._graph)}",
            uncalled="" if seen or nothing else self._graph,
            provable=False,
        )
