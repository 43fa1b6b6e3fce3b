"""Problems of models drawn by chance, compiled as machines drawn by chance: which wrong answers does no level hold?

    python tests/studies/field.py [--lines 200] [--seed 0] [--backends aten,cpp] [--output DIR] > PAGE

A line is a layer of ``conformance/cases/models.toml`` in one of its forms, with its own steps and a number of tokens;
half of the lines have the blocking that the problem's line selects, the others Inductor's own.  Each machine is one run
of the suite.  The page has what every machine judged, and each case that was not right, with the entry of the ledger
that knows it.  It is no part of CI.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from studies import lines

from pytest_gemm.conformance import models
from pytest_gemm.core.outcome import Status
from pytest_gemm.machine.machines import machines
from pytest_gemm.record.reader import read

_WRONG = (Status.INCORRECT, Status.CRASHED, Status.FALLBACK, Status.KNOWN_FAILURE)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=200, metavar="N", help="problems to draw (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default: 0)")
    parser.add_argument("--backends", default="aten,cpp", metavar="LIST", help="default: aten,cpp")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose machines (default: cpu)")
    parser.add_argument("--workers", default="2", metavar="N", help="processes of pytest-xdist (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("build/field"), help="folder of the runs")
    return parser.parse_args()


def drawn(count: int, seed: int, device: str) -> dict[tuple[str, str], list[str]]:
    """Different problem lines by machine and by the candidates that are asked for."""
    dice, found, seen = random.Random(seed), defaultdict(list), set()
    names = [one.name for one in machines().values() if bool(one.threads) == (device == "cpu")]
    while len(seen) < count:
        where = dice.choice(names), dice.choice(("one", "winner"))
        line = models.draw(dice, device).line
        if line not in seen:
            seen.add(line)
            found[where].append(line)
    return dict(sorted(found.items()))


def main() -> int:
    """Print the page; returns 1 where a case is wrong that the ledger does not know."""
    given, rows, wrong = arguments(), [], []
    for (machine, which), problems in drawn(given.lines, given.seed, given.device).items():
        folder, begin = given.output / f"{machine}-{which}", time.monotonic()
        command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_gemm.conformance.test_products", "-q"]
        command += ["-n", given.workers, "-p", "no:cacheprovider", f"--gemm-problem={','.join(problems)}"]
        command += [f"--gemm-backends={given.backends}", f"--gemm-candidates={which}", "--gemm-distributions=rand,int-2"]
        command += [f"--gemm-set=run.machine={machine}", f"--gemm-output={folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        sys.stderr.write(f"{machine} {which}: {done.stdout.strip().splitlines()[-1]}\n")
        outcomes = read(folder).outcomes
        counts = Counter(outcome.status for outcome in outcomes)
        rows.append((machine, which, len(problems), counts, time.monotonic() - begin))
        wrong += [(machine, which, one) for one in outcomes if one.status in _WRONG]
    unknown = [f"{one.id}: {one.reason}" for _, _, one in wrong if one.status is not Status.KNOWN_FAILURE]
    return lines.printed(lines.page("field.md.jinja", given=given, rows=rows, wrong=wrong, Status=Status), unknown)


if __name__ == "__main__":
    raise SystemExit(main())
