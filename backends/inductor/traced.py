"""A program that Dynamo and AOTAutograd have traced once, for all of its candidates.

They know nothing of candidates: what they make of a program is the same for each, and takes as long as Inductor does
for a Triton template.  Inductor compiles their graph again for each candidate, and its code takes the place of the last
one's in the function that they have made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from pytest_gemm.backends.inductor.hooks import hooked

_INNER = "torch._inductor.compile_fx:_compile_fx_inner"


class _Traced:
    """A traced program, and Inductor's code in it: that of the candidate which is called."""

    # AOTAutograd passes the arguments in a list, which the code empties.
    _boxed_call = True

    def __init__(self, key: object, function: Callable[..., Any]) -> None:
        self.key, self.function = key, function
        self.code: Callable[[list[Any]], Any] | None = None
        self.again: Callable[[], Any] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        assert self.code is not None
        return self.code(inputs)

    def compile(self, call: Callable[..., Any], graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """``_compile_fx_inner`` for the first candidate; the graph is kept as it was before, for the others."""
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.virtualized import V

        if self.code is not None:  # several graphs
            self.again = None
            return call(graph, inputs, *args, **kwargs)
        kept, context, mode = copy.deepcopy(graph), TracingContext.get(), V.fake_mode

        def again() -> Any:
            with tracing(context), V.set_fake_mode(mode):
                return compile_fx_inner(copy.deepcopy(kept), inputs, *args, **kwargs)

        self.code, self.again = call(graph, inputs, *args, **kwargs), again
        return self

    def calling(self) -> Callable[..., Any]:
        """The function with the code that was compiled last."""
        code = self.code

        def function(*args: Any) -> Any:
            self.code = code
            return self.function(*args)

        return function


# The last one: the candidates of a problem come one after the other.
_last: list[_Traced] = []


def compiled(key: object, function: Callable[..., Any], args: list[Any]) -> Callable[..., Any]:
    """The compiled program, for the candidate that the session selects, after a call.

    Args:
        key: all that the program depends on but for the candidate.
        function: the program, to be compiled at its first call; not called where this key's has been traced.
        args: its arguments.
    """
    traced = _last[0] if _last else None
    if traced is not None and traced.key == key and traced.again is not None:
        traced.code = traced.again()
        made = traced.calling()
        made(*args)
        return made
    traced = _Traced(key, function)
    _last.clear()
    with hooked({_INNER: traced.compile}, optional=True):
        function(*args)
    _last.append(traced)
    return traced.calling()
