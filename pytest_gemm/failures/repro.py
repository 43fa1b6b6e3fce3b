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
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final

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
    facts: dict[str, Any] = {"quantum": 0.0, "grain": 0.0, "zero_mean": False, "finite": True, "buffers": ()}
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
    quantised = case.operands.zero_b is not None or case.operands.affine is not None
    indexed = case.operands.offs is not None or bool(case.operands.lookups)
    if prepared is None or indexed or quantised or problem.shape.is_empty:
        return None
    for values in _VALUES.values():
        output = problem.outputs[case.place]
        try:
            given = _replaced(case, values)
            reference = reference_module.reference(problem, given)
            interval = interval_module.intervals(problem, given, reference, prepared.contract)[case.place]
            expected = _in_float64(problem, program.args(problem, given), case.place)
            made: Any = prepared.run(given)
        except Exception:
            continue
        actual = (made[case.place] if isinstance(made, tuple) else made).double().cpu()
        expected, value = expected.cpu().reshape(output.returned_shape), views.forth(interval.value, output.moves)
        if not bool(value.isfinite().all()) or not torch.allclose(expected, value, rtol=1e-12, atol=1e-12):
            continue
        bound = float(torch.maximum(interval.hi - interval.value, interval.value - interval.lo).max())
        if actual.shape == value.shape and bool((~((actual - value).abs() <= bound)).any()):
            return _Own(values, bound)
    return None


# -- the text ---------------------------------------------------------------------------------------------


def _traced(problem: Problem, names: Sequence[str], matmul: bool) -> str:
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
    outcome, recipe, given = case.outcome, case.recipe, case.operands
    problem = given.problem
    tensors = program.args(problem, given)
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
    died = outcome.reason is not None and outcome.reason.code in {"process-died", "can-crash", "page-guard"}
    first = bool(case.warm or recipe.dynamic)
    lines = _lines(case, tensors, own, saved=saved, died=died, first=first)
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
    interval, steps = case.interval, case.operands.problem.outputs[case.place].moves
    ends = {"lo": interval.lo, "hi": interval.hi, "expected": interval.expected, "signed": interval.signed}
    return {**tensors, **{name: views.forth(end, steps) for name, end in ends.items()}}


def _imports(case: Case, *, died: bool, fell_back: bool, saved: bool) -> list[str]:
    """What the script imports; an empty folder for the caches has to be named before torch is there."""
    recipe = case.recipe
    names = {"sys", "traceback"}
    names |= {"os", "tempfile"} if recipe.caches else set()
    names |= {"subprocess"} if died or case.warm == "elsewhere" else set()
    names |= {"re"} if fell_back else set()
    names |= {"runpy"} if recipe.matmul else set()
    names |= {"ctypes", "mmap"} if died and case.operands.device == "cpu" else set()
    lines = [f"import {', '.join(sorted(names))}"]
    if saved:
        lines.append("from pathlib import Path")
    if recipe.caches:
        lines.append('os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())  # caches that start empty')
    lines.append("import torch, torch._inductor.config" if recipe.how != "eager" else "import torch")
    if fell_back:
        lines.append("from torch._inductor.select_algorithm import ExternKernelCaller")
        lines.append("from torch._inductor.utils import run_and_get_code")
    return [*lines, ""]


def _tensor(case: Case, formula: str, *, died: bool) -> list[str]:
    """The function that makes operands."""
    cuda = case.operands.device == "cuda"
    guarded = died and not cuda
    made = f"({formula}).to(dtype)" + ('.to("cuda")' if cuda else "")
    return [
        *["", ""],
        "def tensor(shape, stride, offset, dtype, seed):",
        "    n = torch.arange(offset + 1 + sum((s - 1) * t for s, t in zip(shape, stride)))",
        "    i = 31 * n * n + 17 * n + seed",
        f"    flat = {made}" if guarded else f"    return {made}.as_strided(shape, stride, offset)",
        *(_pages(case.outcome.case.guard) if guarded else ()),
    ]


def _lines(
    case: Case,
    tensors: dict[str, torch.Tensor],
    own: _Own | None,
    *,
    saved: bool,
    died: bool,
    first: bool,
) -> list[str]:
    """The script, line by line."""
    recipe, problem = case.recipe, case.operands.problem
    compiled = recipe.how != "eager"
    constants = [n for n in tensors if n in recipe.constants]
    inputs = [n for n in tensors if n not in constants]
    cuda = case.operands.device == "cuda"
    fell_back = case.outcome.status is Status.FALLBACK and compiled
    seeds = _seeds(tensors)

    def value(one: str, other: int = 0) -> str:
        if saved and not other:
            return f"saved[{one!r}]"
        return f"tensor({_literal(tensors[one])}, {seeds[one] + other})"

    lines = [*_head(case, own), *_imports(case, died=died, fell_back=fell_back, saved=saved)]
    if compiled:
        lines += _wrapped(f"OPTIONS = {_options(recipe)!r}", 11)
    lines += recipe.setup
    if recipe.matmul:
        path, function = recipe.matmul
        lines.append(f"mine = runpy.run_path({path!r})[{function!r}]")
    if not saved or first:
        lines += _tensor(case, own.values if own is not None else _VALUES["small integers"], died=died)
    lines += ["", "", *_traced(problem, list(tensors), recipe.matmul is not None).splitlines(), "", ""]
    if compiled:
        lines += _compiling(recipe, inputs, constants, fell_back=fell_back)
    lines += _switches(problem, cuda, recipe)
    if fell_back:
        lines += [
            "found, node = set(), ExternKernelCaller.output_node  # what is chosen of ATen's own kernels, and called",
            "ExternKernelCaller.output_node = lambda self: (found.add(self.name), node(self))[1]",
        ]
    if died:
        # A lost device is an exception of the child's; on a CPU nothing but a signal is a dead process.
        verdict = "int(status != 0)" if cuda else "1 if status < 0 else 2 * (status > 0)"
        lines += [
            'if "child" not in sys.argv:',
            '    status = subprocess.run([sys.executable, __file__, "child"]).returncode',
            '    print("the process ended with status", status)',
            f"    sys.exit({verdict})",
        ]
    if saved:
        device = "cuda" if cuda else "cpu"
        lines.append(f'saved = torch.load(Path(__file__).with_suffix(".pt"), map_location="{device}")')
    given = ", ".join(f"{n}={value(n)}" for n in tensors)
    lines += _wrapped(f"given = dict({given})", 13)
    call = "run(**given)" if compiled else f"program(**given{', matmul=mine' if recipe.matmul else ''})"
    if recipe.dynamic:
        lines.append("first = dict(given)")
    lines += ["try:", *_first(case, constants, value), *_run(case, call, cuda)]
    return lines + _verdict(case, own, saved=saved, fell_back=fell_back)


def _pages(side: str) -> tuple[str, ...]:
    """In the function ``tensor`` of a script whose kernel leaves its operands: they end, or begin, with a page."""
    before = side == "begin"
    protected = "start" if before else "start + mmap.PAGESIZE + size"
    offset = "mmap.PAGESIZE" if before else "mmap.PAGESIZE + size - room"
    room = "    room = -(-flat.nbytes // 64) * 64 if offset else flat.nbytes  # a view stays as unaligned as it is"
    return (
        "    if not flat.numel():",
        "        return flat.as_strided(shape, stride, offset)",
        *(() if before else (room,)),
        "    size = -(-flat.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE",
        "    memory = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)",
        "    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))",
        f"    ctypes.CDLL(None).mprotect(ctypes.c_void_p({protected}), mmap.PAGESIZE, 0)  # nobody may touch it",
        f"    here = torch.frombuffer(memory, dtype=dtype, offset={offset}, count=flat.numel())",
        "    return here.copy_(flat).as_strided(shape, stride, offset)",
    )


def _compiling(recipe: Recipe, inputs: Sequence[str], constants: Sequence[str], *, fell_back: bool) -> list[str]:
    """The functions that compile the program with its constants inside, and run it."""
    names, frozen = ", ".join(inputs), bool(constants)
    keywords = ", ".join(f"{n}={n}" for n in inputs)
    lines: list[str] = []
    if frozen:
        lines += [
            "class Module(torch.nn.Module):",
            "    def __init__(self, constants):",
            "        super().__init__()",
            "        for name, value in constants.items():",
            "            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))",
            "",
            f"    def forward(self, {names}):",
            f"        return program({keywords}, **dict(self.named_parameters()))",
            *["", ""],
        ]
    elif recipe.how == "aoti":  # an export is one of a module
        lines += [
            "class Module(torch.nn.Module):",
            f"    def forward(self, {names}):",
            f"        return program({names})",
            *["", ""],
        ]
    made = f"Module({'constants' if frozen else ''})" if frozen or recipe.how == "aoti" else "program"
    dynamic = ", dynamic=True" if recipe.how == "dynamic" else ""
    compiled = f"torch.compile({made}, fullgraph=True{dynamic})"
    kept = ", kept=[]" if recipe.dynamic else ""
    lines += [
        f"def run({names}{kept}{', **constants' if frozen else ''}):",
        "    with torch.no_grad(), torch._inductor.config.patch(OPTIONS):",
    ]
    if recipe.how == "aoti":
        lines += [
            f"        exported = torch.export.export({made}, ({names},))",
            "        package = torch._inductor.aoti_compile_and_package(exported, inductor_configs=OPTIONS)",
            f"        return torch._inductor.aoti_load_package(package)({names})",
        ]
    elif recipe.dynamic:  # the first call compiles for any M, and the later ones use what it has compiled
        lines += [
            "        if not kept:",
            f"            kept.append({compiled})",
            *(f"            torch._dynamo.mark_dynamic({n}, {d})" for n, d in recipe.dynamic.items()),
            f"        return kept[0]({names})",
        ]
    elif fell_back:
        lines.append(f"        return run_and_get_code({compiled}, {names})[1]")
    else:
        lines.append(f"        return {compiled}({names})")
    return [*lines, "", ""]


def _switches(problem: Problem, cuda: bool, recipe: Recipe) -> list[str]:
    """PyTorch's threads and precision as they were."""
    lines = [f"torch.set_num_threads({recipe.threads})"]
    if recipe.how in {"compile", "dynamic"} and not recipe.caches:
        lines.append("torch._functorch.config.enable_autograd_cache = False")
    if problem.has("math.tf32"):
        lines.append('torch.set_float32_matmul_precision("high")')
    if cuda and not problem.has("math.half_partials"):
        half = "torch.backends.cuda.matmul.allow_{}_reduced_precision_reduction"
        lines.append(f"{half.format('bf16')} = {half.format('fp16')} = False")
    return lines


def _first(case: Case, constants: Sequence[str], value: Callable[[str, int], str]) -> list[str]:
    """What is compiled before: the same with other constants, or for the M of the artifact."""
    recipe = case.recipe
    if case.warm:
        others = ", ".join(f"{n}={value(n, 100)}" for n in constants)
        lines = _wrapped(f"    other = {{**given, **dict({others})}}", 8)
        if case.warm == "elsewhere":
            return [
                *lines,
                '    if "first" in sys.argv:  # the process that fills the caches',
                "        sys.exit(bool(run(**other) is None))",
                '    subprocess.run([sys.executable, __file__, "first"], check=True)',
            ]
        return [*lines, "    run(**other)  # fills the caches", "    torch.compiler.reset()"]
    if recipe.dynamic:
        return [
            f"    for name, dim in {dict(recipe.dynamic)!r}.items():  # compiled at M = {recipe.hint}",
            f"        first[name] = given[name].narrow(dim, 0, 1).repeat_interleave({recipe.hint}, dim)",
            "    run(**first)",
        ]
    return []


def _run(case: Case, call: str, cuda: bool) -> list[str]:
    """The call, and what an exception means."""
    lines = [f"    actual = {call}", *(["    torch.cuda.synchronize()"] if cuda else [])]
    lines += ["except Exception as error:", "    traceback.print_exc()"]
    if case.outcome.status is Status.CRASHED and case.outcome.reason is not None:
        kind = case.outcome.reason.code.rpartition("-")[2]
        if kind[:1].isupper():
            return [*lines, f"    sys.exit(1 if type(error).__name__ == {kind!r} else 2)"]
    return [*lines, "    sys.exit(2)"]


def _verdict(case: Case, own: _Own | None, *, saved: bool, fell_back: bool) -> list[str]:
    """What the script ends with: the worst element and the exit status."""
    if fell_back:
        return [
            'found |= set(re.findall(r"extern_kernels\\.\\w+|aoti_torch_\\w*mm\\w*", "".join(actual)))',
            'print("products of somebody else:", ", ".join(sorted(found)) or "none")',
            "sys.exit(int(bool(found)))",
        ]
    if own is None and not saved:
        return ['print("it came to its end")', "sys.exit(0)"]
    one = f"actual[{case.place}]" if len(case.operands.problem.outputs) > 1 else "actual"
    if case.operands.problem.several:
        flat = ".flatten(1, 2)" if case.operands.problem.has("a.3d") and not case.operands.problem.has("out.2d") else ""
        one = f"torch.stack(actual){flat}"
    lines = [f"actual = {one}.double().cpu()"]
    if own is not None:
        reference = f"program(**{{n: t.double() for n, t in given.items()}}){one.removeprefix('actual')}.cpu()"
        lines += [
            f"expected = {reference}",
            f"bound = torch.full_like(expected, {own.bound!r})  # the largest that any element may be off",
            "wrong = ~((actual - expected).abs() <= bound)",
        ]
    else:
        lines += [
            'lo, hi, expected = (saved[name].double().cpu() for name in ("lo", "hi", "expected"))',
            "bound = torch.maximum(hi - expected, expected - lo)",
            "free = lo.isnan() | (lo.isinf() & hi.isinf() & (lo < hi))  # where NaN is right",
            "wrong = ~((actual >= lo) & (actual <= hi) | actual.isnan() & free)",
            "other = (actual == 0) & (actual.signbit() != expected.signbit())",
            'wrong |= other & saved["signed"].cpu()  # where IEEE 754 gives a zero its sign',
        ]
    return [
        *lines,
        "error = (actual - expected).abs().nan_to_num(nan=float('inf')).masked_fill(~wrong, -1)",
        "at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))",
        'print(f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst is at {at}:")',
        'print(f"expected {expected[at]:.9g}, actual {actual[at]:.9g}, bound {bound[at]:.3g}")',
        "sys.exit(int(bool(wrong.any())))",
    ]
