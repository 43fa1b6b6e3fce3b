"""IREE's generated kernels on the CPU as the backend ``iree``.

Requirements: iree-base-compiler iree-base-runtime
Run: PYTHONPATH=examples pytest -p iree_backend --pyargs pytest_gemm.conformance --gemm-backends=iree

The input is linalg.matmul or linalg.batch_matmul, which convert their operands to the accumulator's type before they
multiply (https://mlir.llvm.org/docs/Dialects/Linalg/#linalgmatmul-linalgmatmulop): f32 for f32, bf16 and f16, f64 for
f64, i32 for i8.  arith.truncf rounds the sums once.  Workers flush subnormal numbers of f32
(https://github.com/iree-org/iree/blob/main/runtime/src/iree/task/worker.c).  A shape is compiled once, for this CPU.
"""

from __future__ import annotations

import functools
from typing import Any

from pytest_gemm.api.callable import CallableBackend

PROGRAM = """
func.func @main(%a: tensor<{a}x{kind}>, %b: tensor<{b}x{kind}>) -> tensor<{c}x{out}> {{
  %zero = arith.constant {zero} : {sums}
  %empty = tensor.empty() : tensor<{c}x{sums}>
  %start = linalg.fill ins(%zero : {sums}) outs(%empty : tensor<{c}x{sums}>) -> tensor<{c}x{sums}>
  %sum = linalg.{op} ins(%a, %b : tensor<{a}x{kind}>, tensor<{b}x{kind}>)
      outs(%start : tensor<{c}x{sums}>) -> tensor<{c}x{sums}>
  {last}
}}
"""
ROUND = "%c = arith.truncf %sum : tensor<{c}x{sums}> to tensor<{c}x{out}>\n  return %c : tensor<{c}x{out}>"
RETURN = "return %sum : tensor<{c}x{out}>"
KINDS = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int8": "i8"}


@functools.cache
def compiled(a: tuple[int, ...], b: tuple[int, ...], kind: str) -> Any:
    """A function of two operands of these shapes."""
    import iree.compiler
    import iree.runtime

    sums = {"f64": "f64", "i8": "i32"}.get(kind, "f32")
    out = "i32" if kind == "i8" else kind
    names = {"a": a, "b": b, "c": (*a[:-1], b[-1])}
    words = {name: "x".join(map(str, shape)) for name, shape in names.items()}
    words |= {"kind": kind, "sums": sums, "out": out, "op": "matmul" if len(a) == 2 else "batch_matmul"}
    last = (RETURN if out == sums else ROUND).format(**words)
    text = PROGRAM.format(**words, last=last, zero="0" if kind == "i8" else "0.0")
    options = ["--iree-llvmcpu-target-cpu=host", "--iree-input-demote-f64-to-f32=false"]
    binary = iree.compiler.compile_str(text, target_backends=["llvm-cpu"], extra_args=options)
    config = iree.runtime.Config("local-task")
    return iree.runtime.load_vm_module(iree.runtime.VmModule.copy_buffer(config.vm_instance, binary), config)


def matmul(a: Any, b: Any) -> Any:
    """The product of two matrices or of two batches of them."""
    import ml_dtypes
    import torch

    kind = KINDS[str(a.dtype).removeprefix("torch.")]
    x, y = a.contiguous(), b.contiguous()
    if kind == "bf16":
        x, y = (one.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for one in (x, y))
    else:
        x, y = x.numpy(), y.numpy()
    made = compiled(tuple(a.shape), tuple(b.shape), kind).main(x, y).to_host()
    if kind == "bf16":
        return torch.from_numpy(made.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(made.copy())


def pytest_gemm_register_backends(registry: Any) -> None:
    """Register the backend."""
    needs, dtypes = ("iree-base-compiler", "iree-base-runtime", "ml_dtypes"), ("f32", "f64", "bf16", "f16", "i8")
    registry.add(CallableBackend("iree", matmul, dtypes, distributions=needs, flushes=True))
