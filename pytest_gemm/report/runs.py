"""What is said of two runs as a whole."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from pytest_gemm.machine import software
from pytest_gemm.record.lines import Head
from pytest_gemm.record.reader import Run

# Arguments of pytest that change no outcome; the second kind has a word behind it.
_IDLE: Final = (
    *("--gemm-output", "--gemm-shard", "--junit", "-q", "-v", "--tb", "--color"),
    *("-n", "--dist", "--durations", "-p"),
)
_TAKES_WORD: Final = frozenset({"-n", "-p", "--dist", "--gemm-output", "--gemm-shard", "--junit-xml"})


def tested(*heads: Head) -> str:
    """What runs are of, for a title: ``cpp, mine with torch 2.13.0+cpu``."""
    found = (
        f"{', '.join(head.terms.backends) or 'no backend'} with torch {head.versions.get('torch', '?')}"
        for head in heads
    )
    return "; ".join(dict.fromkeys(found))


def deciding_arguments(command: Sequence[str]) -> list[str]:
    """The arguments that decide what is judged."""
    words = iter(command[1:])
    found = []
    for word in words:
        if word in _TAKES_WORD:
            next(words, None)
        elif not word.startswith(_IDLE):
            found.append(word)
    return found


def environment(before: Head, after: Head) -> list[tuple[str, str, str]]:
    """What the runs are of: torch in any case, and whatever else differs; ``-`` for what is not there."""
    names = dict.fromkeys(("torch", *before.versions, *after.versions))
    found = [(name, before.versions.get(name, "-"), after.versions.get(name, "-")) for name in names]
    found += [
        (name, " ".join(sorted(map(str, a))) or "-", " ".join(sorted(map(str, b))) or "-")
        for name, a, b in (
            ("machine", [before.machine], [after.machine]),
            ("CPU", [before.cpu], [after.cpu]),
            ("instruction set", [before.isa], [after.isa]),
            ("GPUs", before.gpus, after.gpus),
            ("compiled as on", [before.compiled_as or "-"], [after.compiled_as or "-"]),
            ("CPU threads of a process", [before.threads or "-"], [after.threads or "-"]),
        )
    ]
    found.append(("other files in torch/_inductor", "", software.differing(before.inductor, after.inductor)))
    return [(name, a, b) for name, a, b in found if name == "torch" or a != b]


def warnings(before: Run, after: Run) -> list[str]:
    """Why the two cannot be compared in full, one sentence each."""
    found = []
    heads = before.head, after.head
    hardware = [(head.machine, head.cpu, head.isa, head.gpus) for head in heads]
    if hardware[0] != hardware[1]:
        found.append("The runs are of different hardware: a kernel, bits or a time may differ for that reason alone.")
    threads = [head.threads for head in heads]
    if threads[0] != threads[1] and all(threads):
        found.append(
            "The processes of the runs had different numbers of CPU threads: bits may differ for that reason alone."
        )
    asked = [deciding_arguments(head.command) for head in heads]
    if set(asked[0]) != set(asked[1]):
        before_only, after_only = (
            shlex.join(word for word in mine if word not in others) or "nothing"
            for mine, others in (asked, asked[::-1])
        )
        found.append(f"The runs were asked for different things: only before {before_only}, only after {after_only}.")
    for name, one in (("before", before), ("after", after)):
        if not one.ended:
            found.append(f"The run {name} did not end: cases are missing.")
    return found
