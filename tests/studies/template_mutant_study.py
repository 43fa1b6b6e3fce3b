"""Mutation study of PyTorch's own templates: which regressions of them does the suite find?

    python tests/studies/template_mutant_study.py --backend cpp [--level quick] [--only PATTERN] [--most N] [--out PAGE]

Each mutant of ``template_mutants/*.toml`` is killed, has survived, is not reached by a problem of the level, or is not
in the installed release.  Null mutants are controls.  The state is kept, and a run that is repeated goes on where the
last one ended.  It is no part of CI.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from template_mutants import report, table
from template_mutants.study import Study

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import HUGE, LEVELS, QUICK


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=table.BACKENDS, default="cpp", help="whose templates (default: cpp)")
    parser.add_argument("--level", choices=(*LEVELS, HUGE), default=QUICK, help="of the suite (default: quick)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only mutants of this name (* is any text)")
    parser.add_argument("--problems", default="", metavar="LINES", help="only these problems, separated by commas")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="problems for a mutant (default: 0, all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--state", type=Path, default=Path("build/template-mutants"), help="folder of the answers")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the report of all that the state holds")
    return parser.parse_args()


def main() -> int:
    """Run the study; returns 1 where a null mutant fails, or a problem that kills fails without a mutant."""
    given = arguments()
    marked, missing = table.in_release(table.load(given.backend))
    there, missing = ([one for one in part if fnmatch.fnmatchcase(one.name, given.only)] for part in (marked, missing))
    lines = given.problems.split(",") if given.problems else [one.line for one in matrix.products(given.level)]
    study = Study(given.backend, given.level, lines, given.state.resolve(), given.jobs, given.most)
    found = []
    for verdict in study.verdicts(there, marked):
        found.append(verdict)
        by = f" by {verdict.problem} ({verdict.status})" if verdict.problem else ""
        counts = f"{verdict.tried} of {verdict.reaching} problems, {verdict.seconds:.0f} s"
        sys.stdout.write(f"{verdict.mutant}: {verdict.verdict}{by}; {counts}\n")
        sys.stdout.flush()
    wrong = study.right(sorted({one.problem for one in found if one.problem}))
    sys.stdout.write("".join(f"{line} fails without a mutant\n" for line in wrong))
    sys.stdout.write(report.summary(there, missing, found))
    if given.out:
        given.out.write_text(report.page(given.state.resolve()), encoding="utf-8")
    nulls = {one.name for one in there if one.null}
    return int(bool(wrong or any(one.verdict == "killed" and one.mutant in nulls for one in found)))


if __name__ == "__main__":
    raise SystemExit(main())
