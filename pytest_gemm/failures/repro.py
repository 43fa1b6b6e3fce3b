"""A failing case as a standalone script: PyTorch alone, the same kernel, and an exit status that says whether it fails.

The script makes its operands itself where it can: small integers (or multiples of 1/512) by a formula, in views of the
failing ones' geometry.  They are not the values of the distribution, so the kernel that failed is asked first: only
where it is outside the bound for them too are they used.  Everything else (NaN, a distribution that is the point) is
saved beside the script, with the accepted interval.

With operands of its own the script computes the reference by the same program in float64 and holds each element
against the largest bound that the oracle allows any element of the result: what it calls wrong is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.api.protocols import Prepared, Recipe
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.numerics import span
from pytest_gemm.operands import views
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.outcome import Outcome, Status, Unsupported
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program

if TYPE_CHECKING:
    import jinja2

# A script has fewer lines.
LONGEST: Final = 60


@dataclasses.dataclass(frozen=True)
class Case:
    """What a script is written about.

    Attributes:
        outcome: how the case ended.
        recipe: how PyTorch alone comes to the kernel.
        operands: of the failing run.
        actual: its result, ``None`` where there is none.
        interval: what it might have been, ``None`` where there is no result.
        prepared: the compiled problem, asked whether operands of the script's own fail as well; ``None``: not asked.
        place: which of several results is wrong.
        warm: ``here`` or ``elsewhere``: it fails after the same problem was compiled with other constants, in
            this process or in another one; ``others``: after other problems were compiled in this process.
    """

    outcome: Outcome
    recipe: Recipe
    operands: Operands
    actual: torch.Tensor | None = None
    interval: span.Interval | None = None
    prepared: Prepared | None = None
    place: int = 0
    warm: str = ""


@dataclasses.dataclass(frozen=True)
class Script:
    """A script's text, and the tensors that it loads from the file of its own name with the suffix ``.pt``."""

    text: str
    tensors: dict[str, torch.Tensor]


# -- operands of the script's own ---------------------------------------------------------------------

# Formulas for the value of element i, by what a reader would call the values.
_VALUES: Final = {
    "small integers": "i % 1021 % 5 - 2",
    "multiples of 1/512": "(i % 1021 - 510) / 512",
}


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
    """Operands of a script's own on which the kernel fails, and how far an element may be from the reference."""

    values: str
    bound: float


def _seeds(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: index + 1 for index, name in enumerate(tensors)}


def _replaced(case: Case, values: str) -> Operands:
    """The operands with a formula's values in the same geometry."""
    given, device = case.operands, case.operands.device
    tensors = program.args(given.problem, given)
    seeds = _seeds(tensors)
    new = {
        name: operand(t.shape, t.stride(), _offset(t), t.dtype, seeds[name], values).to(device)
        for name, t in tensors.items()
    }
    if given.problem.op.several or given.problem.has("program.concat"):
        raise Unsupported("own-operands", "several weights have no formula of their own")
    weight = given.problem.op.weight
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


def _in_float64(problem: Problem, tensors: dict[str, torch.Tensor], place: int) -> torch.Tensor:
    """The program on float64 copies, as the script computes its reference."""
    made = program.build(problem)(**{name: t.double() for name, t in tensors.items()})
    result: torch.Tensor = made[place] if isinstance(made, tuple) else made
    return result


def _own(case: Case) -> _Own | None:
    """Values of the script's own that fail as well; ``None`` where the failing ones are needed."""
    problem, prepared = case.operands.problem, case.prepared
    quantised = case.operands.zero_b is not None or case.operands.quantisation is not None
    indexed = case.operands.offs is not None or bool(case.operands.lookups)
    if prepared is None or indexed or quantised or problem.shape.is_empty:
        return None
    for values in _VALUES.values():
        output = problem.outputs[case.place]
        try:
            given = _replaced(case, values)
        except Unsupported:
            return None
        try:
            made: Any = prepared.run(given)
        except Exception:  # of a foreign kernel
            continue
        reference = reference_module.reference(problem, given)
        interval = interval_module.intervals(problem, given, reference, prepared.contract)[case.place]
        expected = _in_float64(problem, program.args(problem, given), case.place)
        actual = (made[case.place] if isinstance(made, tuple) else made).double().cpu()
        expected, value = expected.cpu().reshape(output.returned_shape), views.forth(interval.value, output.view_steps)
        if not bool(value.isfinite().all()) or not torch.allclose(expected, value, rtol=1e-12, atol=1e-12):
            continue
        bound = float(torch.maximum(interval.hi - interval.value, interval.value - interval.lo).max())
        if actual.shape == value.shape and bool((~((actual - value).abs() <= bound)).any()):
            return _Own(values, bound)
    return None


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
    lines = []
    for line in graph.python_code("self").src.splitlines():
        kept = re.sub(r";  [\w = ]* = None\b.*$", "", line).rstrip()
        if kept.strip():
            lines.append(re.sub(r"[\w.]*_product\(", "matmul(", kept))
    text = "\n".join(lines).replace("def forward(self, ", "def program(")
    return text.replace("):", ", matmul=torch.matmul):", 1) if matmul else text


def product(a: Any, b: Any) -> Any:
    """Takes the place of a plain function in a traced program."""
    raise NotImplementedError("it stands in a trace, and is never called")


def _literal(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tuple(tensor.stride())}, {_offset(tensor)}, {tensor.dtype}"


# A string as repr() writes it.
_STRING: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def _wrapped(statement: str, indent: int) -> list[str]:
    """A long call or literal over as many lines as it takes; a string in it stays on one."""
    kept = _STRING.sub(lambda found: found[0].replace(" ", "\0"), statement)
    lines = textwrap.wrap(kept, 116, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _head(case: Case, own: _Own | None) -> list[str]:
    outcome = case.outcome
    reason = outcome.reason.text if outcome.reason else ""
    title = f"{outcome.problem} on {outcome.who}: {reason}".replace("\\", "/").replace('"""', "'''")
    candidate = outcome.candidate or ", ".join(outcome.chosen)
    named = f"Candidate {candidate}.  " if candidate else ""
    kind = next((k for k, v in _VALUES.items() if own is not None and v == own.values), "")
    values = f"here with {kind}" if kind else f"distribution {outcome.distribution or '-'}, seed {outcome.seed}"
    needed = [] if own is not None or case.interval is None else ["the .pt file beside it"]
    needed += case.recipe.needs
    needs = f"Needs {' and '.join(['torch', *needed])}" if needed else "Needs torch alone"
    ends = "Exit status: 1 the failure is there, 0 it is not, 2 something else went wrong."
    lines = textwrap.wrap(title, 112)[:3]
    return [
        f'"""{lines[0]}',
        *lines[1:],
        "",
        *textwrap.wrap(f"{named}Seen on torch {torch.__version__}, {values}.", 112)[:3],
        *textwrap.wrap(f"{needs}.  {ends}", 119),
        '"""',
    ]


def _options(recipe: Recipe) -> dict[str, object]:
    options = dict(recipe.options)
    if not recipe.caches:
        options["fx_graph_cache"] = False
    return options


def script(case: Case) -> Script:
    """The script of a failing case.

    Args:
        case: what failed, and how PyTorch comes to it.

    Raises:
        Unsupported: when PyTorch alone cannot show it.
    """
    outcome, given = case.outcome, case.operands
    tensors = program.args(given.problem, given)
    own = _own(case) if outcome.status is Status.INCORRECT else None
    wrong = case.interval is not None and case.actual is not None
    if outcome.status is Status.INCORRECT and not wrong:
        code = outcome.reason.code if outcome.reason else ""
        raise Unsupported("no-script", f"a script shows a wrong result, a crash or a fallback, not {code}")
    if case.warm == "others":
        raise Unsupported("no-script", "it fails after other programs were compiled, and a script holds one program")
    if outcome.reason is not None and outcome.reason.code in {"other-isa", "other-micro-kernel"}:
        raise Unsupported("no-script", "a disassembly shows the wrong instruction set, and a script has none")
    saved = wrong and own is None
    lines = _lines(case, tensors, own, saved=saved)
    if len(lines) >= LONGEST:  # one empty line between two functions does
        lines = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    if len(lines) >= LONGEST:
        begin = lines.index('"""') + 1
        lines = lines[:begin] + [line for line in lines[begin:] if line]
    return Script(
        "\n".join(lines) + "\n",
        _saved(case, tensors) if saved else {},
    )


def _saved(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert case.interval is not None
    interval, steps = case.interval, case.operands.problem.outputs[case.place].view_steps
    ends = {"lo": interval.lo, "hi": interval.hi, "expected": interval.expected, "signed": interval.signed}
    return {**tensors, **{name: views.forth(end, steps) for name, end in ends.items()}}


def _imports(case: Case, *, died: bool, fallback: bool) -> str:
    """The modules of the standard library that the script uses."""
    names = {"sys", "traceback"}
    names |= {"os", "tempfile"} if case.recipe.caches else set()
    names |= {"subprocess"} if died or case.warm == "elsewhere" else set()
    names |= {"re"} if fallback else set()
    names |= {"runpy"} if case.recipe.matmul else set()
    names |= {"ctypes", "mmap"} if died and case.operands.device == "cpu" else set()
    return ", ".join(sorted(names))


def _result(case: Case) -> str:
    """The expression of the judged result, with ``RESULT`` for what the program returns."""
    problem = case.operands.problem
    if problem.several:
        flat = ".flatten(1, 2)" if problem.has("a.3d") and not problem.has("out.2d") else ""
        return f"torch.stack(RESULT){flat}"
    return f"RESULT[{case.place}]" if len(problem.outputs) > 1 else "RESULT"


def _raised(outcome: Outcome) -> str:
    """The class of the exception that a crash ended with, "" where it was none."""
    kind = outcome.reason.code.rpartition("-")[2] if outcome.reason else ""
    return kind if outcome.status is Status.CRASHED and kind[:1].isupper() else ""


@functools.cache
def _template() -> jinja2.Template:
    import jinja2  # late: a run without a failure does without it

    loader = jinja2.PackageLoader("pytest_gemm.failures")
    made = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"repr": repr, "dict": dict}
    return made.get_template("repro.py.j2")


def _lines(case: Case, tensors: dict[str, torch.Tensor], own: _Own | None, *, saved: bool) -> list[str]:
    """The script, line by line: the template ``repro.py.j2`` with what the case fills in."""
    outcome, recipe, problem = case.outcome, case.recipe, case.operands.problem
    constants = [n for n in tensors if n in recipe.constants]
    cuda, compiled = case.operands.device == "cuda", recipe.how != "eager"
    fallback = outcome.status is Status.FALLBACK and compiled
    died = outcome.reason is not None and outcome.reason.code in {"process-died", "can-crash", "page-guard"}
    formula = own.values if own is not None else _VALUES["small integers"]
    seeds = _seeds(tensors)

    def made(name: str, other: int = 0) -> str:
        return f"{name}=tensor({_literal(tensors[name])}, {seeds[name] + other})"

    given = ", ".join(f"{n}=saved[{n!r}]" if saved else made(n) for n in tensors)
    others = ", ".join(made(n, 100) for n in constants)
    text = _template().render(
        head="\n".join(_head(case, own)),
        imports=_imports(case, died=died, fallback=fallback),
        recipe=recipe,
        problem=problem,
        saved=saved,
        compiled=compiled,
        fallback=fallback,
        died=died,
        cuda=cuda,
        warm=case.warm,
        options="\n".join(_wrapped(f"OPTIONS = {_options(recipe)!r}", 11)),
        formula=formula if not saved or case.warm or recipe.dynamic else "",
        pages=(outcome.case.guard or "end") if died and not cuda else "",
        traced=traced(problem, list(tensors), recipe.matmul is not None),
        inputs=[n for n in tensors if n not in constants],
        constants=constants,
        given="\n".join(_wrapped(f"given = dict({given})", 13)),
        other="\n".join(_wrapped(f"    other = {{**given, **dict({others})}}", 8)),
        raised=_raised(outcome),
        bound=repr(own.bound) if own is not None else "",
        result=_result(case),
    )
    return text.splitlines()
