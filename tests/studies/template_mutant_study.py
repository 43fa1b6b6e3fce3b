"""Mutation study of PyTorch's own templates: which regressions of them does the suite find?

    python tests/studies/template_mutant_study.py --backend cpp [--level quick] [--only PATTERN] [--most N] > PAGE

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

from studies import lines
from template_mutants import report, table
from template_mutants.study import Study

from pytest_gemm.conformance import matrix
from pytest_gemm.problem.axes import APART, LEVELS, QUICK


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=table.BACKENDS, default="cpp", help="whose templates (default: cpp)")
    parser.add_argument("--level", choices=(*LEVELS, *APART), default=QUICK, help="of the suite (default: quick)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only mutants of this name (* is any text)")
    parser.add_argument("--problems", default="", metavar="LINES", help="only these problems, separated by commas")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="problems for a mutant (default: 0, all)")
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="with which a run ends (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--state", type=Path, default=Path("build/template-mutants"), help="folder of the answers")
    return parser.parse_args()


def main() -> int:
    """Print the page of all that the state holds; returns 1 where a null mutant, or no mutant, makes a problem fail."""
    given = arguments()
    marked, missing = table.in_release(table.load(given.backend))
    there, missing = ([one for one in part if fnmatch.fnmatchcase(one.name, given.only)] for part in (marked, missing))
    problems = given.problems.split(",") if given.problems else [one.line for one in matrix.products(given.level)]
    study = Study(given.backend, given.level, problems, given.state.resolve(), given.jobs, given.most, given.failures)
    nulls, killing, wrong = {one.name for one in there if one.null}, set(), []
    for verdict in study.verdicts(there, marked):
        by = f" by {verdict.problem} ({verdict.status})" if verdict.problem else ""
        counts = f"{verdict.tried} of {verdict.reaching} problems, {verdict.seconds:.0f} s"
        sys.stderr.write(f"{verdict.mutant}: {verdict.verdict}{by}; {counts}\n")
        if verdict.verdict == "killed":
            killing.add(verdict.problem)
            if verdict.mutant in nulls:
                wrong.append(f"{verdict.mutant} changes nothing, and was killed")
    wrong += [f"{line} fails without a mutant" for line in study.right(sorted(killing))]
    sys.stderr.write(f"not in this release: {', '.join(one.name for one in missing) or 'none'}\n")
    return lines.printed(report.page(given.state.resolve()), wrong)


if __name__ == "__main__":
    raise SystemExit(main())
