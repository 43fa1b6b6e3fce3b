"""Problems of models drawn by chance, compiled as machines drawn by chance: which wrong answers does no level hold?

    python tests/studies/field.py [--lines 200] [--seed 0] [--backends aten,cpp] [--output DIR] > PAGE

A line is a layer of ``conformance/cases/models.toml`` in one of its forms, with its own steps and a number of tokens.
It is compiled as on a machine of ``machines.toml`` or, on a CPU, with a blocking of ``micro_kernels.toml``.  Each of
these is one run of the suite.  The page has what each run judged, and each problem that was not right, with the entry
of the ledger that knows it.  It is no part of CI.
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

from pytest_gemm.backends.cpp import micro_kernels
from pytest_gemm.conformance import models
from pytest_gemm.core.outcome import Outcome, Status
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


def drawn(count: int, seed: int, device: str) -> dict[str, list[str]]:
    """Different problem lines by the option that says how they are compiled."""
    dice, found, seen = random.Random(seed), defaultdict[str, list[str]](list), set[str]()
    names = [one.name for one in machines().values() if bool(one.threads) == (device == "cpu")]
    ways = [f"--gemm-set=run.machine={name}" for name in names]
    blockings = micro_kernels.blockings("fixed", 0) if device == "cpu" else ()
    ways += [f"--gemm-candidates=CppMicro*{axes}" for axes in dice.sample(blockings, min(3, len(blockings)))]
    while len(seen) < count:
        way, line = dice.choice(ways), models.draw(dice, device).line
        if line not in seen:
            seen.add(line)
            found[way].append(line)
    return dict(sorted(found.items()))


def main() -> int:
    """Print the page; returns 1 where a case is wrong that the ledger does not know."""
    given, rows = arguments(), []
    wrong: list[tuple[str, Outcome]] = []
    for number, (way, problems) in enumerate(drawn(given.lines, given.seed, given.device).items()):
        folder, begin = given.output / str(number), time.monotonic()
        command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_gemm.conformance.test_products", "-q"]
        command += ["-n", given.workers, "-p", "no:cacheprovider", f"--gemm-problem={','.join(problems)}"]
        command += [f"--gemm-backends={given.backends}", f"--gemm-output={folder}", "--gemm-distributions=rand,int-2"]
        command += [way, "--gemm-level=models", "--gemm-allow=unjudged"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        sys.stderr.write(f"{way}: {done.stdout.strip().splitlines()[-1]}\n")
        outcomes = read(folder).outcomes
        counts = Counter(outcome.status for outcome in outcomes)
        rows.append((way, len(problems), counts, time.monotonic() - begin))
        wrong += {(one.case.whole, one.status): (way, one) for one in outcomes if one.status in _WRONG}.values()
    unknown = [f"{one.case}: {one.reason}" for _, one in wrong if one.status is not Status.KNOWN_FAILURE]
    return lines.printed(lines.page("field.md.jinja", given=given, rows=rows, wrong=wrong, Status=Status), unknown)


if __name__ == "__main__":
    raise SystemExit(main())
