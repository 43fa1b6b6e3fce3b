"""A program whose products were computed by whatever autotuning selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pytest_gemm.api.proof import Proof
from pytest_gemm.backends.inductor.artifact import InductorPrepared

# What stands for a candidate where no selection took place: Inductor wrote sums of products by itself.
WRITTEN_OUT = "written out by Inductor"


class SelectedPrepared(InductorPrepared):
    """A compiled program that may call a template, a library's product, or both."""

    def proof(self) -> Proof:
        """What was selected, and what the last run executed: each has to agree with the other.

        A template alone is proved as in a backend of its kind.  A library's product is proved by the dispatcher and the
        program's text, and has to be there where it was selected.  A product that Inductor has written out is proved by
        the kernels of the program.
        """
        found, compiled = super().proof(), self.artifact._compiled
        seen, library = compiled.session, self.artifact.library
        if found.chosen and not library and not seen.foreign:
            return found
        products = _distinct(library)
        if not products and not seen.chosen and not compiled.templates:
            kernels = compiled.order or tuple(compiled.kernels)
            return dataclasses.replace(
                found, chosen=(WRITTEN_OUT,), generated=kernels, executed=kernels, foreign=(), device_kernel=""
            )
        contradiction = found.contradiction
        if found.chosen and not found.executed:
            contradiction = f"{', '.join(found.chosen)} was selected, and the program has {', '.join(products)}"
        elif seen.foreign and not products:
            contradiction = f"{', '.join(seen.foreign)} was selected, and the program calls no product of a library"
        return dataclasses.replace(
            found,
            chosen=tuple(seen.chosen) or products,
            generated=(*found.generated, *products),
            executed=(*found.executed, *products),
            foreign=(),
            device_kernel="",
            around_library=True,
            contradiction=contradiction,
        )


def _distinct(products: Iterable[str]) -> tuple[str, ...]:
    """Products by name, each once: the dispatcher and a program's text spell them differently."""
    found: dict[str, str] = {}
    for product in products:
        name = product.removeprefix("torch.ops.")
        found.setdefault(name.removeprefix("extern_kernels.").removeprefix("aten.").partition(".")[0], name)
    return tuple(found.values())
