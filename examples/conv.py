"""Operations from outside: ``conv1x1`` and ``conv3x3``, convolutions of an image of M pixels to N channels.

The image has rows of 4 pixels.  K is the size of a filter: its channels, or 9 times as many.  Compilers make a matrix
product of both, or have a template of their own.

Requirements: none
Run: PYTHONPATH=examples pytest -p conv --pyargs pytest_gemm.conformance --gemm-backends=aten --gemm-ops=conv1x1,conv3x3
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gemm.problem.layout import Layout
from pytest_gemm.problem.ops.op import Op

WIDTH = 4


def image(p: Any, a: Any, edge: int) -> Any:
    """A as an image (1, channels, height, width), channels last, with one more pixel on each side for 3 x 3 filters."""
    height, width, channels = p.shape.m // WIDTH + edge - 1, WIDTH + edge - 1, p.shape.k // edge**2
    return a.flatten()[: height * width * channels].view(1, height, width, channels).permute(0, 3, 1, 2)


def native(torch: Any, p: Any, t: dict[str, Any], edge: int) -> Any:
    """The program, as a user writes it; its result has a row for each pixel, as it lies in memory."""
    filters = t["b"].view(p.shape.n, p.shape.k // edge**2, edge, edge)
    c = torch.nn.functional.conv2d(image(p, t["a"], edge), filters, t.get("bias"))
    return c.permute(0, 2, 3, 1).reshape(p.shape.m, p.shape.n)


def around(torch: Any, p: Any, t: dict[str, Any], matmul: Any, edge: int) -> Any:
    """The same as a product of what each filter meets."""
    patches = torch.nn.functional.unfold(image(p, t["a"], edge), edge)[0]
    c = matmul(patches.mT, t["b"].mT)
    return c + t["bias"] if "bias" in t else c


def whole(p: Any) -> Iterator[tuple[str, int, str, str]]:
    """What a problem needs to be one of images."""
    edge = 3 if p.op.name == "conv3x3" else 1
    if p.shape.m % WIDTH:
        yield "shape", 0, f"M={p.shape.m} pixels are no rows of {WIDTH}", f"a multiple of {WIDTH}"
    if p.shape.k % edge**2 or p.shape.k == 0:
        yield "shape", 2, f"K={p.shape.k} is no filter of {edge} x {edge}", f"a multiple of {edge**2}"
    for index, flag in enumerate(p.flags):
        if flag.startswith("a.") or flag.endswith(".dynamic"):
            yield "flags", index, f"{flag}: the image is all of a contiguous A of a fixed size", f"drop {flag}"


def lacks(_: Any, backend: str) -> str:
    """Where a convolution is left to another library's kernel."""
    return "Inductor leaves a frozen convolution to oneDNN" if backend == "cpp" else ""


def pytest_gemm_register_ops(registry: Any) -> None:
    """Register both operations, and their cases once."""
    for edge in (1, 3):
        op = Op(
            f"conv{edge}x{edge}",
            "never",
            ("f32", "bf16", "f16"),
            lambda torch, p, t, edge=edge: native(torch, p, t, edge),
            lambda torch, p, t, matmul, edge=edge: around(torch, p, t, matmul, edge),
            help=f"F.conv2d of a channels-last image with filters of {edge} x {edge}",
            own_bias=True,
            weight=True,
            layouts=(Layout.NT,),
            check=whole,
            lacks=lacks,
            flags=("b.argument", "program.multi_output"),
        )
        registry.add(op, Path(__file__).with_name(f"conv{edge}x{edge}.toml"))
