"""A problem as one program of XLA, and what its optimised text says was fused; of ``jax_backend``, ``jax_gpu_backend``.

With ``preferred_element_type`` the product accumulates to that type and returns it
(https://docs.jax.dev/en/latest/_autosummary/jax.lax.dot_general.html): f32 for f32, bf16 and f16, int32 for int8.
``HIGHEST`` asks for the full precision of f32.  Bias, factors and steps are computed in f32 and rounded once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from pytest_gemm.api.callable import CallablePrepared
from pytest_gemm.api.dlpack import hand_over, take_back
from pytest_gemm.api.proof import Proof

OPS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
# Words of flags that say where an operand lies, and not what is computed of it.
LAYOUTS = {"padded", "offset", "argument", "constant", "parameter", "dynamic", "tf32"}
STEPS = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "scale": "multiply", "clamp": "clip"}
STEPS |= {"bias": "add", "exp": "exp", "hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid"}
STEPS |= {name: name for name in ("relu", "gelu", "silu", "sigmoid", "tanh", "leaky_relu", "cast", "alpha", "beta")}
STEPS |= {"logsigmoid": "log_sigmoid", "gelu_tanh": "gelu"}


def product(a: Any, b: Any) -> Any:
    """The product of two arrays, in the type of its sums."""
    from jax import lax
    from jax import numpy as jnp

    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=sums)


def whole(problem: Any) -> Callable[..., Any] | None:
    """The problem as a function of JAX's arrays by name; ``None`` where it is more than this file computes."""
    from jax import nn
    from jax import numpy as jnp

    has_rest = {flag.partition(".")[2] for flag in problem.flags} - LAYOUTS or problem.autocast or problem.widens
    known = all(step.name in STEPS and step.extent != "at" for step in problem.epilogue)
    if problem.op.name not in OPS or has_rest or not known:
        return None

    def program(a: Any, b: Any, bias: Any = None, **residuals: Any) -> Any:
        x, given = product(a, b.T if problem.op.weight else b), iter(residuals.values())
        if bias is not None and (problem.op.addend or problem.op.own_bias):
            x = problem.alpha * x + (problem.beta * bias.astype(jnp.float32) if problem.beta else 0)
        for step in problem.chain:
            if step.name == "cast":
                x = x.astype(step.dtype.torch_name).astype(jnp.float32)
                continue
            exact = {"approximate": step.name != "gelu"} if step.name.startswith("gelu") else {}
            function = getattr(nn, STEPS[step.name], None) or getattr(jnp, STEPS[step.name])
            met = [bias] if step.name == "bias" else [next(given)] if step.kind.value == "binary" else []
            x = function(x, *(one.astype(jnp.float32) for one in met), *step.numbers, **exact)
        return x.astype(problem.result_dtype.torch_name)

    return program


def kernels(text: str) -> tuple[str, bool]:
    """The instructions of an optimised program that compute, and whether the one with the product is the last."""
    rest, _, entry = text.partition("\nENTRY ")
    products = {"%" + block.partition(" ")[0] for block in rest.split("\n%")[1:] if " dot(" in block}
    names, fused = [], False
    for line in entry.splitlines():
        found = re.match(r"\s+(ROOT )?%(\S+) = \S+ ([\w-]+)\(", line)
        if found is None or found[3] in {"parameter", "constant", "bitcast", "copy"}:
            continue
        target = re.search(r'custom_call_target="([^"]*)"(?:.*"epilogue":"(\w+)")?', line)
        called = re.search(r"calls=(%\S+?)(,|$)", line)
        has_dot = found[3] == "dot" or target is not None or (called is not None and called[1] in products)
        words = " ".join(filter(None, target.groups())) if target else "dot" if has_dot else ""
        names.append(f"{found[2]}({words})" if words else found[2])
        fused = has_dot
    return "jit: " + ", ".join(names), fused


class XlaPrepared(CallablePrepared):
    """The whole problem as one program, compiled once; what is no such program is composed around the product."""

    compiled: Any = None
    name, fused = "", False

    def bind(self, operands: Any) -> Callable[[], Any]:
        """Compile the program at the first call, and return its call."""
        import jax
        from jax import numpy as jnp

        program, tensors = whole(self.problem), self.arguments(operands)
        if program is None:
            return super().bind(operands)
        self.contract = dataclasses.replace(self.contract, epilogue="fused")
        align = 16 if tensors["a"].is_cuda else 1
        arrays = {name: hand_over(x, jnp.from_dlpack, compact=True, align=align) for name, x in tensors.items()}
        if self.compiled is None:
            self.compiled = jax.jit(program).lower(**arrays).compile()
            self.name, self.fused = kernels(self.compiled.as_text())
        run = self.own(functools.partial(self.compiled, **arrays), self.name)
        return lambda: take_back(run(), tensors["a"], wait=jax.block_until_ready)

    def proof(self) -> Proof:
        """What the compiled program executes, and whether the product's kernel does all of it."""
        return dataclasses.replace(super().proof(), fused=self.fused if self.name and self.problem.epilogue else None)
