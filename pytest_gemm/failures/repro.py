"""A failing case as a standalone script: PyTorch alone, the same kernel, an exit status that shows whether it fails.

The script makes its operands itself where it can: small integers (or multiples of 1/512) by a formula, in views of the
failing ones' geometry.  They are not the values of the distribution, so the kernel that failed is asked first: only
where it is outside the bound for them too are they used.  Everything else (NaN, a distribution that is the point) is
saved beside the script, with the accepted interval.

With operands of its own the script computes the reference by the same program in float64 and holds each element
against the largest bound that the oracle allows any element of the result: what it calls wrong is wrong.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.api.protocols import Recipe
from pytest_gemm.core.outcome import Outcome, Status, Unsupported
from pytest_gemm.core.templates import Templates
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.operands import views
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

if TYPE_CHECKING:
    from pytest_gemm.judging.case import Evidence
    from pytest_gemm.worker.messages import Ran

# A script has fewer lines.
LONGEST: Final = 60


@dataclasses.dataclass(frozen=True)
class Script:
    """A script's text, and the tensors that it loads from the file of its own name with the suffix ``.pt``."""

    text: str
    tensors: dict[str, torch.Tensor]


# -- operands of the script's own ---------------------------------------------------------------------

# Formulas for the value of element i, by what a reader would call the values.
_VALUES: Final = {"small integers": "i % 1021 % 5 - 2", "multiples of 1/512": "(i % 1021 - 510) / 512"}


def operand(
    shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype, seed: int, values: str
) -> torch.Tensor:
    """What the function ``tensor`` of a script returns; ``values`` is a formula of ``i``, see ``_VALUES``."""
    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True)))
    i = 31 * n * n + 17 * n + seed
    made: torch.Tensor = eval(values, {"i": i})
    return made.to(dtype).as_strided(tuple(shape), tuple(stride), offset)


def _offset(tensor: torch.Tensor) -> int:
    """Elements past a 64-byte boundary: what is left of an offset once the guard band before it is gone."""
    return int(tensor.storage_offset()) % (64 // tensor.element_size())


@dataclasses.dataclass(frozen=True)
class _Own:
    """Operands of a script's own on which the kernel fails.

    Attributes:
        kind: of the values, a key of ``_VALUES``.
        bound: how far an element may be from the reference.
    """

    kind: str
    bound: float


def _replaced(given: Operands, values: str) -> Operands:
    """The operands with a formula's values in the same geometry.

    Raises:
        Unsupported: where a tensor of the program is no operand of its own.
    """
    new = {
        name: operand(t.shape, t.stride(), _offset(t), t.dtype, seed, values).to(given.device)
        for seed, (name, t) in enumerate(program.args(given.problem, given).items(), 1)
    }
    if given.problem.op.several or given.problem.has("program.concat"):
        raise Unsupported("own-operands", "several weights have no formula of their own")
    weight = given.problem.op.weight
    new |= {name: views.cut(given.problem, name, new[name]) for name in ("a", "b") if given.problem.view_of(name)}
    new["a"] = new["a"].view(given.a.shape)  # a program may take it 3-D or 4-D
    b = new["a"].mT if "b" not in new else new["b"].mT if weight else new["b"]
    residuals = tuple(
        views.residual_of(given.problem, i, new[f"r{i}"]) if f"r{i}" in new else new["a"]
        for i in range(len(given.residuals))
    )
    facts: dict[str, Any] = {"quantum": 0.0, "base_quantum": 0.0, "zero_mean": False, "finite": True, "buffers": ()}
    scale_b = new.get("scale", new.get("scale_b"))
    return dataclasses.replace(
        given, a=new["a"], b=b, bias=new.get("bias"), residuals=residuals, scale_b=scale_b,
        scale_a=new.get("scale_a"), **facts,
    )  # fmt: skip


def _own(evidence: Evidence) -> _Own | None:
    """Values of the script's own that fail as well; ``None`` where the failing ones are needed."""
    failed, again, problem = evidence.operands, evidence.again, evidence.operands.problem
    # The script computes its reference in float64, which these programs do not take.
    is_decoded = failed.quantisation is not None or problem.op.coded
    quantised = failed.zero_b is not None or is_decoded or problem.op.rounds_once
    in_place = problem.in_place != ""  # the program would find its own result in C
    has_groups = failed.offs is not None or failed.counts is not None
    if again is None or in_place or has_groups or failed.lookups or quantised or problem.shape.is_empty:
        return None
    for kind, values in _VALUES.items():
        with contextlib.suppress(Exception):  # whatever a program raises for them, the failing operands are saved then
            bound = _bound(evidence, again(given := _replaced(failed, values)), given)
            if bound is not None:
                return _Own(kind, bound)
    return None


def _bound(evidence: Evidence, ran: Ran, given: Operands) -> float | None:
    """How far an element may be from the reference, where one of this run is further; ``None`` of a right run."""
    problem, place = given.problem, evidence.place
    output, reference = problem.outputs[place], reference_module.reference(problem, given)
    interval = interval_module.intervals(problem, given, reference, ran.contract)[place]
    # The script computes its reference in this way, which not every program takes: not _weight_int8pack_mm.
    wide: Any = program.build(problem)(**{name: t.double() for name, t in program.args(problem, given).items()})
    results = ((x[place] if isinstance(x, tuple) else x) for x in (wide, ran.results))
    expected, actual = (one.double().cpu() for one in results)
    expected, value = expected.reshape(output.returned_shape), views.forth(interval.value, output.view_steps)
    if not bool(value.isfinite().all()) or not torch.allclose(expected, value, rtol=1e-12, atol=1e-12):
        return None
    bound = float(torch.maximum(interval.hi - interval.value, interval.value - interval.lo).max())
    return bound if actual.shape == value.shape and bool((~((actual - value).abs() <= bound)).any()) else None


# -- the text ---------------------------------------------------------------------------------------------


def traced(problem: Problem, names: Sequence[str], matmul: bool) -> str:
    """The program as a function of these tensors, in the straight-line code of torch.fx.

    Raises:
        Unsupported: when its course depends on values.
    """
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    tensors: dict[str, Any] = {name: torch.fx.Proxy(graph.placeholder(name), tracer) for name in names}

    def mine(a: Any, b: Any) -> Any:
        return tracer.create_proxy("call_function", product, (a, b), {})

    try:
        result: Any = program.build(problem, mine if matmul else None)(**tensors)
    except Exception as error:
        raise Unsupported("no-script", f"the program of {problem} has no straight-line code: {error}") from None
    graph.output(tuple(one.node for one in result) if isinstance(result, tuple) else result.node)
    lines, code = [], graph.python_code("self")
    for line in code.src.splitlines():
        kept = re.sub(r";  [\w = ]* = None\b.*$", "", line).rstrip()
        if kept.strip():
            lines.append(re.sub(r"[\w.]*_product\(", "matmul(", kept))
    text = "\n".join(lines).replace("def forward(self, ", "def program(")
    if matmul:
        text = text.replace("):", ", matmul=torch.matmul):", 1)
    own = [value for value in code.globals.values() if _is_ours(value) and value is not product]
    for function in own:
        text = re.sub(rf"[\w.]*_{function.__name__}\(", f"{function.__name__}(", text)
    return "\n\n\n".join([*map(_definition, own), text])


def _is_ours(value: Any) -> bool:
    return inspect.isfunction(value) and value.__module__.partition(".")[0] == __name__.partition(".")[0]


def _definition(function: Callable[..., Any]) -> str:
    """A function of this package that a traced program calls: it needs torch alone, and its types need more."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.unparse(tree)


def product(a: Any, b: Any) -> Any:
    """Takes the place of a plain function in a traced program."""
    raise NotImplementedError("it stands in a trace, and is never called")


def _literal(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tuple(tensor.stride())}, {_offset(tensor)}, {tensor.dtype}"


# A string as repr() writes it.
_STRING: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def _statement(text: str, indent: int) -> str:
    """A long call or literal over as many lines as it takes; a string in it stays on one."""
    kept = _STRING.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(kept, 116, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def script(outcome: Outcome, recipe: Recipe, evidence: Evidence, warm: str = "") -> Script:
    """The script of a failing case.

    Args:
        outcome: how the case ended.
        recipe: how PyTorch alone comes to the kernel.
        evidence: operands, result and interval; its compiled problem is asked whether operands of the script's own fail
            as well.
        warm: ``here`` or ``elsewhere``: it fails after the same problem was compiled with other constants, in
            this process or in another one; ``others``: after other problems were compiled in this process.

    Raises:
        Unsupported: when PyTorch alone cannot show it.
    """
    code = outcome.reason.code if outcome.reason else ""
    wrong = evidence.interval is not None and evidence.actual is not None
    if outcome.ended is Status.INCORRECT and not wrong:
        raise Unsupported("no-script", f"a script shows a wrong result, a crash or a fallback, not {code}")
    if warm == "others":
        raise Unsupported("no-script", "it fails after other programs were compiled, and a script holds one program")
    if outcome.ended is Status.FALLBACK and (recipe.matmul or recipe.how == "aoti"):
        raise Unsupported("no-script", "a script shows the products that Inductor calls in a program of PyTorch alone")
    if code in {"other-isa", "other-micro-kernel"}:
        raise Unsupported("no-script", "a disassembly shows the wrong instruction set, and a script has none")
    own = _own(evidence) if outcome.ended is Status.INCORRECT else None
    saved = wrong and own is None
    lines = _rendered(outcome, recipe, evidence, warm, own, saved=saved).splitlines()
    if len(lines) >= LONGEST:  # one empty line between two functions does
        lines = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    if len(lines) >= LONGEST:
        begin = lines.index('"""') + 1
        lines = lines[:begin] + [line for line in lines[begin:] if line]
    return Script("\n".join(lines) + "\n", _saved(evidence) if saved else {})


def _saved(evidence: Evidence) -> dict[str, torch.Tensor]:
    """The failing operands and what the result may be."""
    assert evidence.interval is not None
    evidence.operands.reset_out()
    problem, interval = evidence.operands.problem, evidence.interval
    steps = problem.outputs[evidence.place].view_steps
    ends = {name: views.forth(getattr(interval, name), steps) for name in ("lo", "hi", "expected", "signed")}
    return program.args(problem, evidence.operands) | ends


_TEMPLATES: Final = Templates(
    "pytest_gemm.failures",
    repr=repr,
    dict=dict,
    prose=textwrap.wrap,
    statement=_statement,
    folder=os.path.dirname,
    stem=lambda path: Path(path).stem,
)


def _rendered(outcome: Outcome, recipe: Recipe, evidence: Evidence, warm: str, own: _Own | None, *, saved: bool) -> str:
    """The template ``repro.py.jinja`` with the facts of the case."""
    given, code = evidence.operands, outcome.reason.code if outcome.reason else ""
    tensors, compiled = program.args(given.problem, given), recipe.how != "eager"
    kind = code.rpartition("-")[2]
    return _TEMPLATES.render(
        "repro.py.jinja",
        outcome=outcome,
        reason=outcome.reason.text if outcome.reason else "",
        recipe=recipe,
        problem=given.problem,
        place=evidence.place,
        torch_version=torch.__version__,
        own=own,
        wrong=evidence.interval is not None,
        saved=saved,
        compiled=compiled,
        fallback=outcome.ended is Status.FALLBACK and compiled,
        died=code in {"process-died", "can-crash", "page-guard"},
        cuda=given.device == "cuda",
        warm=warm,
        formula=_VALUES[own.kind if own else "small integers"] if not saved or warm or recipe.dynamic else "",
        traced=traced(given.problem, list(tensors), recipe.matmul is not None and not recipe.call),
        inputs=[n for n in tensors if n not in recipe.constants],
        constants=[n for n in tensors if n in recipe.constants],
        tensors={name: _literal(t) for name, t in tensors.items()},
        raised=kind if outcome.ended is Status.CRASHED and kind[:1].isupper() else "",
    )
