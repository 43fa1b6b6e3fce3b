"""An operation from outside: ``causal_mm``, a product of which nothing above the diagonal is kept, and a kernel of it.

Requirements: none
Run: PYTHONPATH=examples pytest -p causal_mm --pyargs pytest_gemm.conformance --gemm-backends=tiles --gemm-ops=causal_mm
"""

from pathlib import Path
from typing import Any

from pytest_gemm.problem.ops.op import OUTPUTS, Op

TILE = 16


def native(torch: Any, _: Any, t: dict[str, Any]) -> Any:
    """The program, as a user writes it."""
    return torch.tril(torch.mm(t["a"], t["b"]))


def around(torch: Any, _: Any, t: dict[str, Any], matmul: Any) -> Any:
    """The same with a given product: a kernel's, or the exact one."""
    return torch.tril(matmul(t["a"], t["b"]))


def bind(problem: Any, t: dict[str, Any]) -> Any:
    """A kernel that computes the tiles below the diagonal alone; of other problems PyTorch leaves out the rest."""
    if problem.op.name != "causal_mm" or problem.chain or problem.flags:
        return None

    def tiles() -> Any:
        a, b = t["a"], t["b"]
        c = a.new_zeros(a.shape[0], b.shape[1])
        for i in range(0, len(a), TILE):
            c[i : i + TILE, : i + TILE] = (a[i : i + TILE] @ b[:, : i + TILE]).tril(i)
        return c

    return tiles


def pytest_gemm_register_ops(registry: Any) -> None:
    """Register the operation and its cases."""
    more: dict[str, Any] = {"help": "tril(a @ b): nothing above the diagonal", "flags": ("b.argument", *OUTPUTS)}
    op = Op("causal_mm", "never", ("f32", "f16", "bf16"), native, around, **more)
    registry.add(op, Path(__file__).with_name("causal_mm.toml"))


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the kernel."""
    registry.add_callable("tiles", lambda a, b: a @ b, bind=bind)
