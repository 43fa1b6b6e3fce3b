"""One case as a run judges it: the ledger withholds, the judge judges, the ledger explains, files keep what failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from pytest_gemm.config.config import GemmConfig
from pytest_gemm.core.outcome import Outcome, Reason, Status
from pytest_gemm.failures import artifacts
from pytest_gemm.failures.text import Rerun
from pytest_gemm.judging.case import Case, Judged
from pytest_gemm.judging.judge import Judge, Timing
from pytest_gemm.record.lines import Use
from pytest_gemm.run import admission, known


@dataclasses.dataclass(frozen=True)
class Orchestrator:
    """Judges the cases of one test function.

    Attributes:
        config: of the run.
        judge: judges.
        test: name of the test function, by which the ledger knows its cases.
    """

    config: GemmConfig
    judge: Judge
    test: str

    def withheld(self, case: Case, candidate: str = "") -> Outcome | None:
        """The outcome of a case, or of one candidate, that the ledger forbids to run; ``None`` of any other."""
        return known.withheld(self.config.ledger, case, self.test, candidate)

    def judged(self, case: Case, timing: Timing | None = None) -> Iterator[Judged]:
        """Judge a case without the candidates that the ledger withholds; arguments as of :meth:`Judge.judge`.

        A case of gigabytes begins when the other test processes leave it the memory.
        """
        need = admission.needed(case)
        with admission.admitted(need, case.device) as refusal:
            if refusal is not None:
                yield Judged(Outcome(case.id(), "", case.seed, Status.UNSUPPORTED, refusal))
                return
            yield from self.judge.judge(case, lambda candidate: self.withheld(case, candidate), timing)
            if need:
                self.judge.release()

    def repeated(self, case: Case, judgements: list[Judged]) -> list[Judged]:
        """The outcomes of a case; of one that fails as compiled in a batch, those of its kernels alone.

        Where these do not fail, a user has no wrong kernel: the failures stay, as a defect of the test.  What the
        ledger knows is not judged again.
        """
        failed = [judged for judged in judgements if judged.outcome.status.is_failure and judged.outcome.compiled_with]
        if not self._fails(case, failed):
            return judgements
        text = f"  {failed[0].outcome.batch} it failed; compiled alone, as a user has it, it fails, too"
        alone = list(self.judged(dataclasses.replace(case, alone=text)))
        if self._fails(case, alone):
            return alone
        return [_of_batch(judged) if judged in failed else judged for judged in judgements]

    def _fails(self, case: Case, judgements: list[Judged]) -> bool:
        """Whether there is a failure that the ledger does not know."""
        return any(judged.outcome.status.is_failure for judged in self.explained(case, judgements)[0])

    def explained(self, case: Case, found: Iterable[Judged]) -> tuple[list[Judged], Use]:
        """Apply the ledger; return the outcomes, named by the test, and the use of its entries."""
        found = list(found)
        named = [dataclasses.replace(judged.outcome, test=self.test) for judged in found]
        outcomes, use = known.explain(named, case.problem, self.config.ledger, known.environment_of(case))
        return [Judged(outcome, judged.evidence) for outcome, judged in zip(outcomes, found, strict=True)], use

    def keep(self, case: Case, found: Sequence[Judged], rerun: Rerun, warm: str = "") -> dict[str, str]:
        """Write the files of what failed; what cannot be written changes no outcome.

        Args:
            case: that was judged.
            found: explained by the ledger.
            rerun: how to run the test again.
            warm: as :func:`repro.script` has it.

        Returns:
            Why a file could not be written, by the option that asks for it.
        """
        folder, most = self.config.artifacts, self.config.most_bytes
        why = artifacts.save(folder, found, case, rerun, warm, most) if folder is not None else ""
        return {str(folder): why} if why else {}


def _of_batch(judged: Judged) -> Judged:
    """A failure of a kernel that a user does not have; it has made way for the kernel alone, and cannot run again."""
    outcome, evidence = judged.outcome, judged.evidence
    text = f"{outcome.batch} it is {outcome.status}: {outcome.why}; compiled alone, as a user has it, it does not fail"
    reason = Reason("compiled-together", text, "--gemm-set=run.together=no")
    outcome = dataclasses.replace(outcome, status=Status.MISTRUSTED, reason=reason, cause="")
    return Judged(outcome, evidence and dataclasses.replace(evidence, again=None))
