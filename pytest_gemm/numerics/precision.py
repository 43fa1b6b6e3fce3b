"""PyTorch's settings while a problem is compiled and run: switches for less precise products, and CPU threads.

A contract describes one arithmetic, so nothing that a user, a plugin or an earlier test has set may change it.
:func:`settings` makes it a fact: less precision is allowed where a problem's flag asks for it, and forbidden
everywhere else.

There is one way to TF32 that all of PyTorch's parts read alike: ``torch.set_float32_matmul_precision``.  It sets the
old and the new switch alike.  cuBLAS, Inductor's templates and its caches read the new one
(``torch.backends.cuda.matmul.fp32_precision``), Dynamo's guards and other caches the old one, and PyTorch raises an
exception where the two contradict each other, as they do after the new one alone was set.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import torch

from pytest_gemm.numerics.contract import Contract
from pytest_gemm.problem.ops.op import HALVES
from pytest_gemm.problem.problem import Problem

# Significand bits of TF32, the hidden one included.
TF32_BITS: Final = 11

# Relative error of a product of two f32 that were cut to TF32: 1 - (1 - 2^-10)^2 < 2^-9.  Rounded to nearest they
# err by 2^-10, but whether the tensor core is given rounded operands is up to the kernel.
TF32_ERROR: Final = 2.0**-9


def as_allowed(contract: Contract, problem: Problem) -> Contract:
    """``contract`` as it is under the problem's flag ``tf32``: inputs may lose bits, and need not.

    The products of a sum are stored in the result's type, unless a backend says that it keeps them.  What ``reduced``
    allows is a matter of cuBLAS alone, see ``numerics.tensor_core.contract``.
    """
    count = problem.op.summands
    if count > 1 and not contract.narrow_partials:
        # In a half type that is one rounding too many, since the result's own is not among them; it covers what the
        # slices of each product lose.
        slices = count if problem.dtypes.out.name in HALVES else count * contract.slices
        contract = dataclasses.replace(contract, slices=slices, partials="out")
    if not problem.has("math.tf32"):
        return contract
    return dataclasses.replace(contract, input_error=TF32_ERROR, input_bits=TF32_BITS)


# Names on torch.backends.cuda.matmul.  The first two are pairs: sums in the half type, and split-K at all.
_REDUCTIONS: Final = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextlib.contextmanager
def settings(problem: Problem) -> Iterator[None]:
    """A block in which PyTorch is allowed what the problem's flags say, and nothing else; restored afterwards.

    On CPU and CUDA alike: TF32 (with ``tf32``), the storage of partial sums in a half type (with ``reduced``), and
    never sums in f16.
    """
    cuda: Any = torch.backends.cuda.matmul
    onednn: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at import, unseen by type checkers
    with contextlib.ExitStack() as stack:

        def change(owner: Any, name: str, value: object, before: object) -> None:
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)

        # With the new switches off, PyTorch can tell the old one whatever state it is in.
        for switches in (cuda, onednn):
            change(switches, "fp32_precision", "ieee", switches.fp32_precision)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if problem.has("math.tf32") else "highest")
        for name in _REDUCTIONS:
            # The second of a pair came with torch 2.10; what a release lacks was not changed there.
            before = getattr(cuda, name), getattr(cuda, f"{name}_split_k", True)
            change(cuda, name, problem.has("math.half_partials"), before)
        change(cuda, "allow_fp16_accumulation", False, cuda.allow_fp16_accumulation)
        yield


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """A block in which PyTorch has so many CPU threads, more than there are cores too; 0 changes nothing."""
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if count not in {0, before}:
            torch.set_num_threads(count)
            stack.callback(torch.set_num_threads, before)
        yield
