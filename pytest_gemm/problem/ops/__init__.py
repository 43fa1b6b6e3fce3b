"""The operations: :data:`OPS`.  A module of this package has an op, or several that differ in little.

A new op is one module with ``OPS``, a tuple of :class:`Op`; nothing else names it.  Those of a user's hook are added by
``api.ops``, in each process of a run.
"""

from __future__ import annotations

import copyreg
import pkgutil
from importlib import import_module
from typing import Final

from pytest_gemm.problem.ops.op import Op as Op

_NAMES: Final = sorted((one.name for one in pkgutil.iter_modules(__path__)), key=lambda name: (name != "dense", name))
_MODULES: Final = [import_module(f"{__name__}.{name}") for name in _NAMES]

OPS: Final[dict[str, Op]] = {op.name: op for module in _MODULES for op in getattr(module, "OPS", ())}


def _named(name: str) -> Op:
    if name not in OPS:
        raise LookupError(f"this process has not loaded the hook pytest_gemm_register_ops that registers {name}")
    return OPS[name]


# An op is pickled by its name: its functions have none.
copyreg.pickle(Op, lambda op: (_named, (op.name,)))
