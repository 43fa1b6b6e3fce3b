"""What turns generated C++ into machine code, beside its text and the compiler's flags, as one short name.

Inductor keeps a compiled kernel by its text and the command.  The command has ``-march=native`` and the compiler's
name, and the text includes headers of torch: on another CPU, with another compiler or with another torch in the same
place the key is the same, and the kernel of before would be taken.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Final

from pytest_gemm.machine import isa, processor, software

# Folders of torch/include that generated C++ includes from: two or three megabytes.
_HEADERS: Final = ("ATen/cpu", "ATen/native", "c10", "torch/csrc/inductor", "torch/headeronly")


@functools.cache
def code_key() -> str:
    """Twelve hexadecimal digits, others for another CPU, cap of a library, compiler or torch."""
    found, cpu = hashlib.sha256(), processor.cpu()
    # What Inductor hands to oneDNN, and packs for it, depends on its cap.
    capped = (*isa.caps(cpu.flags).items(), *software.compiler().items())
    for part in (cpu.model, cpu.generation, *sorted(cpu.flags), *map(str, capped)):
        found.update(part.encode() + b"\0")
    for path in _headers():
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def _headers() -> Iterator[Path]:
    """The headers of torch that generated C++ includes; none where torch has none."""
    spec = util.find_spec("torch")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in _HEADERS:
            yield from sorted(Path(root, "include", folder).rglob("*.h"))
