"""A problem is one line of text, both ways: ``op:dtypes:layout:shape[:epilogue][:subject.word+word]...``.

This module is the vocabulary of the whole project: every other package receives a :class:`Problem` and none of them
parses text.  It imports no torch, so that collection stays fast.

Examples::

    mm:f16:nt:512x768x1024
    int_mm:i8-i8-i32:nt:512x1024x2048
    bmm:bf16:nn:4x128x96x192
    linear:f32:nt:1000x1024x1000:bias+gelu:a.padded:m.dynamic
    linear:f32-f32-bf16:nt:32x384x64:bias
    addmm:f32:nn:33x65x127:bias-m1+alpha-0.5+beta-2
    qlinear:u8-i8-bf16:nt:17x64x128:bias+relu:quant.static-0.02_7

The characters are those that ``pytest -k`` and every shell take unquoted.  ``docs/reference/words.md`` lists the
words.

A problem has one spelling, the canonical line.  Whatever else means the same is read and shown in it: numbers are
written in their shortest form, a parameter that is the default goes unwritten (``scale-0.50`` is ``scale``), and so do
factors of 1 and ``b.constant`` or ``b.argument`` where the op implies them; bias, alpha and beta stand in this order,
subjects in that of :data:`SUBJECTS`, words in that of :data:`FLAGS`; a ``perm`` that swaps the last two dimensions is
``t``.  A token that would change nothing else is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Final

from pytest_gemm.core.text import did_you_mean
from pytest_gemm.problem.dtypes import DTypes
from pytest_gemm.problem.errors import FIELDS, GRAMMAR, SUBJECTS, ProblemError, Token, split
from pytest_gemm.problem.facts import Facts
from pytest_gemm.problem.layout import Layout, Shape
from pytest_gemm.problem.ops import OPS
from pytest_gemm.problem.rules import FLAGS, check, rank_of
from pytest_gemm.problem.steps import Step, StepKind

# The sizes at which an artifact for any value of them is compiled, whichever comes first: a single rerun then compiles
# the very same kernel.  No other dimension of a test is likely to equal one by chance, which Dynamo takes for one size.
HINTS: Final[Mapping[str, int]] = {"m": 61, "n": 208, "k": 176, "batch": 11}
# Characters that a line may have.
_LONGEST: Final = 1000
_SWAPPED: Final = Step("t")
_TWO_RESULTS: Final = frozenset({"program.multi_output", "program.branching"})
# What of its operands the second product of a chain keeps.
_CHAINED: Final = frozenset(
    {"m.dynamic", "batch.dynamic"}
    | {f"b.{word}" for word in ("padded", "offset", "broadcast", "constant", "argument", "relu", "floor", "halved")}
)


@dataclasses.dataclass(frozen=True)
class Problem(Facts):
    """What is to be computed: op, dtypes, layout, shape, epilogue, flags and quantisation parameters.

    ``str(problem)`` is its canonical line and ``Problem.parse(str(problem)) == problem``.  Fields may be given in any
    order and spelling that the grammar takes; they are canonical afterwards.  A problem says nothing about values
    (distribution, seed) or about who computes it (backend).

    Raises:
        ProblemError: when the parts contradict each other, or one of them has no effect.
    """

    def __post_init__(self) -> None:
        for field in ("epilogue", "flags", "quant"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        try:
            check(self)
        except ProblemError as error:
            raise error.on(self.text()) from None
        object.__setattr__(self, "epilogue", self._canonical_epilogue())
        # The requantisation is the last of the quantisation parameters.
        object.__setattr__(self, "quant", tuple(sorted(self.quant, key=lambda step: step.name == "requant")))
        implied = "b.constant" if self.op.constant_b and not self.b_is_a else "b.argument"
        if self.flags:
            flags = tuple(flag for flag in FLAGS if flag in self.flags and flag != implied)
            object.__setattr__(self, "flags", flags)

    def _canonical_epilogue(self) -> tuple[Step, ...]:
        """The steps without factors of 1, parameters of the product before what is done to the result, ``t`` as t."""
        found = []
        rank = len(self.result_shape)
        for step in self.epilogue:
            if step.kind is StepKind.FACTOR and not step.text:
                continue
            if step.name == "view":
                rank = len(step.sizes)
            swapped = step.name == "perm" and step.order(rank) == _SWAPPED.order(rank)
            found.append(_SWAPPED if swapped else step)
        return tuple(sorted(found, key=rank_of))

    # -- text ------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, line: str) -> Problem:
        """Read a problem line.

        Raises:
            ProblemError: naming the field and the character that is wrong, and what is allowed there.
        """
        line = line.strip()
        if len(line) > _LONGEST:
            problem = f"a line of {len(line)} characters"
            raise ProblemError("op", problem, f"up to {_LONGEST} are read", line=f"{line[:80]}...")
        try:
            return cls._read(split(line))
        except ProblemError as error:
            raise error.on(line) from None  # pointing into the text that the user typed

    @classmethod
    def _read(cls, tokens: dict[str, list[Token]]) -> Problem:
        texts = {field: [token.text for token in tokens[field]] for field in FIELDS}
        for field in FIELDS[:4]:
            if not any(texts[field]):
                raise ProblemError(field, "is missing", f"a line is {GRAMMAR}")
        (op,), (layout,) = texts["op"], texts["layout"]
        if op not in OPS:
            raise ProblemError("op", f"unknown op {op!r}{did_you_mean(op, OPS)}", f"known: {' '.join(OPS)}")
        dtypes = DTypes.parse(texts["dtypes"])
        if layout not in {one.value for one in Layout}:
            raise ProblemError("layout", f"unknown layout {layout!r}", f"one of {' '.join(map(str, Layout))}")
        shape = Shape.parse(texts["shape"])
        epilogue, quant = (
            tuple(_read_step(field, index, token) for index, token in enumerate(texts[field]))
            for field in ("epilogue", "quant")
        )
        return cls(OPS[op], dtypes, Layout(layout), shape, epilogue, tuple(texts["flags"]), quant)

    @functools.cached_property
    def line(self) -> str:
        """The canonical text; also the problem's id."""
        return self.text()

    def text(self) -> str:
        """The line of the fields as they are: the canonical one after construction."""
        parts = [self.op.name, str(self.dtypes), str(self.layout), str(self.shape)]
        parts += ["+".join(map(str, self.epilogue))] if self.epilogue else []
        words = [token.partition(".") for token in (*(f"quant.{step}" for step in self.quant), *self.flags)]
        words.sort(key=lambda word: SUBJECTS.index(word[0]) if word[0] in SUBJECTS else len(SUBJECTS))
        for subject, own in itertools.groupby(words, lambda word: word[0]):
            parts.append(f"{subject}.{'+'.join(word for _, _, word in own)}")
        return ":".join(parts)

    def __str__(self) -> str:
        return self.line

    # -- other problems --------------------------------------------------------------------------

    @property
    def outputs(self) -> tuple[Problem, ...]:
        """What each result of the program is the answer to: one, or two with a flag of ``program``.

        With ``multi_output`` the first is the value before the last step, with ``branching`` what the step before the
        last makes of the value that the last one reads too.  These problems share the operands of this one.  The second
        of ``chained`` does not: its A is the first result.
        """
        if self.has("program.chained"):
            once = dataclasses.replace(self, flags=tuple(f for f in self.flags if f != "program.chained"))
            layout = Layout.NT if self.layout.b_transposed else Layout.NN
            kept = tuple(f for f in self.flags if f in _CHAINED)
            own = tuple(s for s in self.epilogue if s not in self.chain)
            return once, dataclasses.replace(self, layout=layout, epilogue=own, flags=kept)
        if _TWO_RESULTS.isdisjoint(self.flags):
            return (self,)
        places = [index for index, step in enumerate(self.epilogue) if step in self.chain]
        return self.without(places[-1]), self.without(places[-2] if self.has("program.branching") else None)

    def without(self, place: int | None) -> Problem:
        """The program of one result that lacks the step at this place of the epilogue; ``None``: that lacks none."""
        kept = tuple(step for index, step in enumerate(self.epilogue) if index != place)
        gone = _TWO_RESULTS if any(s.kind is StepKind.BINARY for s in kept) else {*_TWO_RESULTS, "r0.alias"}
        if not any(step.name == "bias" for step in kept):
            gone = {*gone, *(flag for flag in self.flags if flag.startswith("bias."))}
        return dataclasses.replace(self, epilogue=kept, flags=tuple(f for f in self.flags if f not in gone))

    @property
    def output_names(self) -> tuple[str, ...]:
        """What a report calls each of :attr:`outputs`; "" for the only one."""
        if self.has("program.branching") or self.has("program.chained"):
            return ("the first result", "the second result")
        return ("the intermediate value", "the result") if self.has("program.multi_output") else ("",)

    def resized(self, sizes: Mapping[str, int]) -> Problem:
        """The same problem at other sizes, by name: ``m n k batch``."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, **sizes))

    @property
    def at_hints(self) -> Problem:
        """The problem that stands for every value of its dynamic sizes: the artifact of all is compiled for it."""
        return self.resized({size: HINTS[size] for size in self.dynamic}) if self.dynamic else self


def _read_step(field: str, index: int, token: str) -> Step:
    try:
        return Step.parse(token)
    except ProblemError as error:
        raise error.at(field, index) from None


def canonical_line(line: str) -> str:
    """The canonical spelling of a line that was stored, perhaps by an earlier version; as it is where it is no line."""
    try:
        return Problem.parse(line).line
    except ProblemError:
        return line
