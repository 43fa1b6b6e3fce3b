"""Which lines and branches of Inductor a block of code executes, with those of its Jinja templates.

The tracing is that of the package ``coverage``.  A Jinja template is compiled to Python: here that text is written to a
file, so that a branch of a template is one of a file like any other.  The meter has to be there before Inductor is
imported, because a template is compiled with the module that holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import coverage
from template_mutants.patches import folder

# What makes matrix products in Inductor, below its folder.
FILES: Final = (
    "codegen/common.py",
    "codegen/cpp.py",
    "codegen/cpp_*template*.py",
    "codegen/cpp_micro_gemm.py",
    "codegen/cpp_utils.py",
    "codegen/cutlass/*.py",
    "codegen/subgraph.py",
    "codegen/triton.py",
    "freezing.py",
    "fx_passes/b2b_gemm.py",
    "fx_passes/binary_folding.py",
    "fx_passes/decompose_mem_bound_mm.py",
    "fx_passes/freezing_patterns.py",
    "fx_passes/group_batch_fusion.py",
    "fx_passes/joint_graph.py",
    "fx_passes/mkldnn_fusion.py",
    "fx_passes/pad_mm.py",
    "fx_passes/post_grad.py",
    "fx_passes/quantization.py",
    "kernel/*.py",
    "kernel_inputs.py",
    "mkldnn_ir.py",
    "mkldnn_lowerings.py",
    "quantized_lowerings.py",
    "select_algorithm.py",
    "template_heuristics/*.py",
)

# A file below Inductor's folder, or ``jinja/NAME``, and two of its lines: one followed the other.
Arc = tuple[str, int, int]


class Meter:
    """Counts what is executed between :meth:`start` and :meth:`stop`.

    Args:
        scratch: a folder for the text of Jinja templates.
    """

    def __init__(self, scratch: Path) -> None:
        self._inductor, self._jinja = folder(), scratch / "jinja"
        self._jinja.mkdir(parents=True, exist_ok=True)
        include = [*(str(self._inductor / name) for name in FILES), f"{self._jinja}/*"]
        self._coverage = coverage.Coverage(data_file=None, branch=True, include=include, config_file=False)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])

    def watch_templates(self) -> None:
        """Have Jinja compile each template out of a file, whose name is a digest of the template."""
        import jinja2

        compiled = jinja2.Environment._compile

        def compile_from_file(environment: Any, source: str, _: str) -> Any:
            path = self._jinja / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
            path.write_text(source, encoding="utf-8")
            return compiled(environment, source, str(path))

        vars_of_class: Any = jinja2.Environment
        vars_of_class._compile = compile_from_file

    @contextlib.contextmanager
    def arcs(self) -> Iterator[set[Arc]]:
        """Count what the block executes; the set is filled when it ends."""
        reached: set[Arc] = set()
        self._coverage.erase()
        self._coverage.start()
        try:
            yield reached
        finally:
            self._coverage.stop()
            data = self._coverage.get_data()
            for path in data.measured_files():
                name = self._name(Path(path))
                reached |= {(name, begin, end) for begin, end in data.arcs(path) or ()}

    def _name(self, path: Path) -> str:
        if path.is_relative_to(self._inductor):
            return path.relative_to(self._inductor).as_posix()
        return f"jinja/{path.stem}"
