"""A picture of where a result is wrong: error over bound for each element, the tiles of the kernel, the worst element.

matplotlib is imported when a picture is drawn, and only its objects are used: no state of a user's own is touched.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.judging import verdict

if TYPE_CHECKING:
    from pytest_gemm.numerics.span import Interval


# A picture has no more rows or columns of colour than this; of a larger result each cell is the worst of its elements.
_CELLS: Final = 512
# With more lines than this in a direction a grid hides what it is drawn on.
_LINES: Final = 64
# Error over bound at which the colours end.
_FAR: Final = 1e6


def tile(candidate: str) -> tuple[int, int] | None:
    """Rows and columns that one block of the kernel computes, out of a candidate's name; ``None`` where it says none.

    ``triton_mm-64x128x32,s4,w8`` has the tile M x N x K, ``CppMicroGemmFP32Vec-8x48x1`` the register blocking,
    and CUTLASS's ``..._128x256x64_...`` the tile of a block of threads.
    """
    found = re.search(r"-(\d+)x(\d+)x\d+", candidate) or re.search(r"_(\d+)x(\d+)x?(?:_)?\d+_", candidate)
    return (int(found[1]), int(found[2])) if found else None


def draw(path: Path, actual: torch.Tensor, interval: Interval, title: str, candidate: str = "") -> None:
    """Write the picture of a wrong result as PNG: of a batch the matrix with the worst element.

    Args:
        path: of the picture.
        actual: the result, with the shape of the interval.
        interval: what it might have been.
        title: above the picture.
        candidate: name of the candidate; a grid of its tiles is drawn where it names them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    found = verdict.ratios(actual.detach().double().to(interval.expected.device), interval).cpu()
    while found.dim() < 2:
        found = found.unsqueeze(0)
    matrices = found.reshape(-1, *found.shape[-2:])
    which, row, column = (int(i) for i in torch.unravel_index(matrices.argmax(), matrices.shape))
    matrix = matrices[which]
    rows, columns = matrix.shape
    finite = matrix[matrix.isfinite()]
    # Where the bound is 0 or nearly so a ratio says no more than "far".
    top = min(max(10.0, float(finite.max()) if finite.numel() else 10.0), _FAR)
    shown = _pooled(matrix.clamp(min=1e-3, max=top))
    figure = Figure(figsize=(8, 6.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    image = axes.imshow(
        shown.numpy(),
        norm=LogNorm(vmin=1e-3, vmax=top),
        cmap="inferno",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        interpolation="nearest",
        aspect="auto",
    )
    figure.colorbar(image, ax=axes, label="error / bound (above 1: wrong)")
    if found_tile := tile(candidate):
        for size, extent, line in ((found_tile[0], rows, axes.axhline), (found_tile[1], columns, axes.axvline)):
            if extent / size <= _LINES:
                for place in range(size, extent, size):
                    line(place - 0.5, color="deepskyblue", linewidth=0.6)
    axes.plot([column], [row], marker="o", markersize=14, markerfacecolor="none", markeredgecolor="lime", mew=2)
    batch = f"matrix {which} of {len(matrices)}, " if len(matrices) > 1 else ""
    axes.set_xlabel(f"column; {batch}the worst element is at ({row}, {column})")
    axes.set_ylabel("row")
    axes.set_title("\n".join(filter(None, (title, candidate))), fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _pooled(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with no more than :data:`_CELLS` cells a side, each the largest of its elements."""
    rows, columns = (-(-n // _CELLS) for n in matrix.shape)
    if rows == columns == 1:
        return matrix
    pool = torch.nn.functional.max_pool2d(matrix[None, None], (rows, columns), ceil_mode=True)
    return pool[0, 0]
