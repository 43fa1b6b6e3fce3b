"""The run under NVIDIA's compute-sanitizer, as one command: ``pytest --gemm-guard=memcheck ...``.

pytest starts itself again below the tool, which watches every kernel of every process.  PyTorch's caching allocator is
turned off there: it hands out parts of large blocks, and a kernel that leaves its operand is still inside the block.
What the tool says is counted by kernel.  Kernels run ten to a hundred times slower; narrow the run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

# Exit status of the tool when it has found something; pytest has none of this number.
_FOUND: Final = 86
_SHOWN: Final = 30
# How the lines of a fault begin, by the tools of 2024 and later.
_COMPLAINT: Final = re.compile(
    r"Invalid|Uninitialized|Error: |Race reported|Barrier error|Program hit|Potential|Warning: "
)


def find(environment: Mapping[str, str] = os.environ) -> str:
    """The tool: on ``PATH``, or in the CUDA toolkit of ``CUDA_HOME`` or of ``/usr/local/cuda``.

    Raises:
        pytest.UsageError: when it is nowhere.
    """
    toolkits = (environment.get("CUDA_HOME", ""), "/usr/local/cuda")
    places = os.pathsep.join([environment.get("PATH", ""), *(f"{home}/bin" for home in toolkits if home)])
    found = shutil.which("compute-sanitizer", path=places)
    if found is None:
        raise pytest.UsageError(
            "--gemm-guard: compute-sanitizer is neither on PATH nor in CUDA_HOME/bin or /usr/local/cuda/bin; "
            "it comes with the CUDA toolkit (package cuda-sanitizer-MAJOR-MINOR)"
        )
    return found


def command(tool: str, arguments: Sequence[str], folder: Path, sanitizer: str) -> list[str]:
    """The command that runs pytest with these arguments below the tool, with a log for each process in ``folder``."""
    watched = [sys.executable, "-m", "pytest", *arguments, "--gemm-set=run.inline=yes", "--gemm-guard=none"]
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", str(_FOUND)]
    if tool == "memcheck":
        # Libraries ask the driver for entries that it may not have; what a call of PyTorch's meets, PyTorch raises.
        options += ["--report-api-errors", "no"]
    return [sanitizer, *options, "--log-file", str(folder / "%p.log"), *watched]


def findings(logs: Iterable[str]) -> Counter[tuple[str, str]]:
    """What the tool's logs complain of: how often, by (complaint, kernel)."""
    found: Counter[tuple[str, str]] = Counter()
    for log in logs:
        lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if _COMPLAINT.match(line):
                kernel = re.match(r"at (?:0x[0-9a-f]+ in )?(?:\S+:\d+:)?(?:void )?([\w:]+)", after)
                complaint = re.sub(r"0x[0-9a-f]+", "...", line)
                found[complaint, kernel[1] if kernel else "?"] += 1
    return found


def run(tool: str, arguments: Sequence[str], here: Path) -> int:
    """Run pytest with these arguments below the tool, say what it found, and return the exit status.

    Args:
        tool: one of :data:`TOOLS`.
        arguments: of the command line, ``--gemm-guard`` among them.
        here: folder in which the command was given.

    Raises:
        pytest.UsageError: when there is no compute-sanitizer.
    """
    sanitizer = find()
    with tempfile.TemporaryDirectory(prefix="pytest-gemm-") as name:
        folder = Path(name)
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command(tool, arguments, folder, sanitizer), cwd=here, env=environment, check=False)
        found = findings(path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log")))
    lines = [f"{count} x {complaint} in {kernel}" for (complaint, kernel), count in found.most_common(_SHOWN)]
    total = sum(found.values())
    sys.stdout.write("\n".join([f"\ncompute-sanitizer {tool}: {total} finding(s)", *lines, ""]))
    if done.returncode == _FOUND or (total and done.returncode == pytest.ExitCode.OK):
        return int(pytest.ExitCode.TESTS_FAILED)
    return done.returncode
