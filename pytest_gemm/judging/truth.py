"""What is right for a problem and its operands, shared by the backends and candidates that compute it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch

from pytest_gemm.judging import sampled, verdict
from pytest_gemm.judging.case import Case
from pytest_gemm.judging.inherited import Theirs
from pytest_gemm.judging.results import words
from pytest_gemm.numerics import interval as interval_module
from pytest_gemm.numerics import reference as reference_module
from pytest_gemm.numerics.contract import Contract
from pytest_gemm.operands import tensors, views
from pytest_gemm.operands.groups import of_groups
from pytest_gemm.operands.tensors import Operands
from pytest_gemm.problem.problem import Problem
from pytest_gemm.programs import program
from pytest_gemm.worker.calls import KEPT_BYTES
from pytest_gemm.worker.messages import Thrown, Worker

# Results of earlier calls by name, one for each place of the program's results.
Earlier = Mapping[str, tuple[torch.Tensor, ...]]
# Why eager ATen does not run a problem on a device, in words; "" where it runs.
EagerRefusal = Callable[[Problem, str], str]


@dataclasses.dataclass
class Truth:
    """What is known of a problem with one distribution.

    Attributes:
        operands: of the problem.
        digest: of the operands, as they were made.
        spoiled: a backend has taken the memory of an operand away, or the judge's own part has failed.
        product: what A @ B is taken for, float64; ``None``: what it is.
        pytorch: what PyTorch's own product gave, by the numbers of CPU threads.
    """

    operands: Operands
    digest: str
    spoiled: bool = False
    product: torch.Tensor | None = None
    pytorch: dict[tuple[int, int], Theirs] = dataclasses.field(default_factory=dict)
    # Of the contract that came last: the candidates of a backend mostly share one.
    _intervals: tuple[Contract, tuple[interval_module.Interval, ...]] | None = None
    _eager: tuple[torch.Tensor, ...] | str | None = None
    _others: dict[tuple[str, ...], Truth] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def other_values(self, names: tuple[str, ...]) -> Iterator[Truth]:
        """A block in which the memory of A or B, or of both, holds other values, and its truth.

        The rows of A and the columns of B stand one place further: they are as good operands of the distribution, and
        their truth is that of no other block.  They are as they were afterwards.

        Args:
            names: of :attr:`changeable`.
        """
        lines = [self.changeable[name] for name in names]
        for line in lines:
            line.copy_(line.roll(1, 0))
        try:
            yield self._others.setdefault(names, Truth(self.operands, self.digest)) if names else self
        finally:
            for line in lines if not self.spoiled else ():
                line.copy_(line.roll(-1, 0))

    @functools.cached_property
    def changeable(self) -> dict[str, torch.Tensor]:
        """Bits of the elements of B and A, each once, the columns or rows foremost.

        Neither one that is the other one, that is large, or that has equal lines alone.
        """
        given, found = self.operands, dict[str, torch.Tensor]()
        for name, x, dim in (("b", given.b, given.b.dim() - 1), ("a", given.a, given.a.dim() - 2)):
            once = words(x[tuple(slice(1 if stride == 0 else None) for stride in x.stride())]).movedim(dim, 0)
            small = x.numel() * x.element_size() < KEPT_BYTES
            if small and once.numel() and bool((once != once[:1]).any()) and name in {g.name for g in given.buffers}:
                found[name] = once
        return found

    @property
    def problem(self) -> Problem:
        """The problem."""
        return self.operands.problem

    @functools.cached_property
    def _reference(self) -> reference_module.Reference:
        found = reference_module.reference(self.problem, self.operands)
        return found if self.product is None else dataclasses.replace(found, c=self.product)

    @functools.cached_property
    def _sample(self) -> sampled.Sample:
        return sampled.Sample(self.operands)

    def intervals(self, contract: Contract) -> tuple[interval_module.Interval, ...]:
        """What each result may be under ``contract``; the reference behind it is computed once."""
        if self._intervals is None or self._intervals[0] != contract:
            given, reference = self.operands, self._reference
            if contract.flushes:
                given = tensors.flushed(given)
                reference = reference_module.reference(self.problem, given)
            found = interval_module.intervals(self.problem, given, reference, contract)
            self._intervals = contract, found
        return self._intervals[1]

    def answers(
        self, results: tuple[torch.Tensor, ...], contract: Contract
    ) -> Iterator[tuple[Problem, Operands, interval_module.Interval]]:
        """For each result the problem that it answers, its operands and its interval.

        The second product of a chained GEMM is judged on what the first one returned, if that can be an operand.
        """
        problem, given = self.problem, self.operands
        outputs, chained = problem.outputs, problem.has("program.chained")
        for output, interval in zip(outputs, self.intervals(contract), strict=not chained):
            yield output, given, interval
        if chained and verdict.complaint_of(results[0], outputs[0], given) is None:
            used = tensors.again(given, outputs[1], results[0])
            reference = reference_module.reference(outputs[1], used)
            yield outputs[1], used, interval_module.interval(outputs[1], used, reference, contract)

    def verdicts(
        self, results: tuple[torch.Tensor, ...], contract: Contract, earlier: Earlier, reference: str
    ) -> list[sampled.ResultVerdict]:
        """The verdict on each result: by sample where ``reference`` asks for it, or on every element."""
        others = [{name: one[place] for name, one in earlier.items()} for place in range(len(results))]
        if sampled.applies(self.problem, reference):
            return list(map(self._sample.judge, self.problem.outputs, results, itertools.repeat(contract), others))
        found = []
        for result, other, (output, used, interval) in zip(
            results, others, self.answers(results, contract), strict=False
        ):
            doubt = interval_module.insensitive(output, interval) if used is self.operands else None
            compared = verdict.compare(result, interval, output, used, others=other)
            found.append(sampled.ResultVerdict(compared, interval.tier, doubt, "", self.operands, result, interval))
        return found

    def beside_eager(
        self, actual: tuple[torch.Tensor, ...], contract: Contract, refusal: EagerRefusal, worker: Worker
    ) -> str:
        """The comparison with eager ATen in words, or why there is none."""
        if self._eager is None:
            self._eager = refusal(self.problem, self.operands.device) or self._run_eager(worker)
        if isinstance(self._eager, str):
            return self._eager
        intervals = self.intervals(contract)
        count = len(intervals)  # a second product is one of what the first one gave, which differs from eager's
        # Eager rounds after each step and is right by a bound of its own, which may be much wider.
        fused = contract.epilogue == "fused" and self.problem.epilogue
        bound = "the bound of a fused epilogue, which rounds once" if fused else "the bound"
        return verdict.beside_eager(actual[:count], self._eager[:count], intervals, self.problem.output_names, bound)

    def _run_eager(self, worker: Worker) -> tuple[torch.Tensor, ...] | str:
        try:
            made = worker.eager(self.problem, self.operands)
        except Thrown as error:  # eager cannot do everything that a template can
            if error.lost is not None:
                raise
            return f"eager cannot: {error}".rstrip(": ")
        return program.gathered(self.problem, of_groups(self.operands, views.in_product(self.problem, made)))


def _written_over(old: Operands, new: Operands) -> Operands:
    """The values of ``new`` in the storages of ``old``, operands of the same problem, as ``copy_()`` leaves them."""
    storages = {one.name: one.storage for one in old.buffers}
    return new.moved(lambda one: one.over(storages[one.name].copy_(one.storage), 0))


class Truths:
    """The truths of the problem at hand, and what one backend has returned for it.

    They are kept until another problem comes: pytest asks for the backends of one problem one after the other.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Free everything."""
        self._key: tuple[object, ...] = ()
        self._known: dict[str, Truth] = {}
        self._replaced: dict[str, Truth] = {}
        self._by: object = None
        self._earlier: dict[str, tuple[torch.Tensor, ...]] = {}

    def of(self, case: Case, distribution: str) -> Truth:
        """The truth of a case with one distribution; operands that a backend has written to are made again.

        With a user's caches those of another seed are written into the memory of those before: at the same addresses.
        """
        key = (case.problem.line, case.device, case.seed)
        if self._key != key:
            same = case.user_caches and self._key[:-1] == key[:-1]
            self._replaced = {name: one for name, one in self._known.items() if same and not one.spoiled}
            self._key, self._known = key, {}
        known = self._known.get(distribution)
        if known is None or known.spoiled or known.operands.changed(known.digest):
            made = tensors.make(case.problem, distribution, case.seed, case.device)
            if (before := self._replaced.pop(distribution, None)) is not None:
                made = _written_over(before.operands, made)
            known = self._known[distribution] = Truth(made, made.digest())
        return known

    def known(self, distribution: str) -> Truth | None:
        """The truth with one distribution, if it has been made."""
        return self._known.get(distribution)

    def earlier(self, case: Case) -> dict[str, tuple[torch.Tensor, ...]]:
        """Results by name that this backend gave for the problem: a wrong one may be one of these, kept too long."""
        key = (case.backend.name, case.mode, case.isa, case.problem.line)
        if self._by != key:
            self._by, self._earlier = key, {}
        return self._earlier
