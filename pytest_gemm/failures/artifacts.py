"""What a failure leaves on disk: a folder a case."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from pytest_gemm.api.protocols import ScriptedBackend
from pytest_gemm.core.extras import lacking
from pytest_gemm.core.outcome import Unsupported
from pytest_gemm.core.text import described, first_line
from pytest_gemm.core.units import plural
from pytest_gemm.failures import findings, repro
from pytest_gemm.failures.findings import Finding
from pytest_gemm.failures.text import folder_name
from pytest_gemm.judging import verdict
from pytest_gemm.numerics import precision
from pytest_gemm.programs import program
from pytest_gemm.worker import calls

if TYPE_CHECKING:
    from pytest_gemm.core.outcome import Outcome
    from pytest_gemm.failures.text import Rerun
    from pytest_gemm.judging.case import Case, Evidence, Judged
    from pytest_gemm.numerics.interval import Interval


# A picture has no more rows or columns of colour than this; of a larger result each cell is the worst of its elements.
_CELLS: Final = 512
# With more lines than this in a direction a grid hides what it is drawn on.
_LINES: Final = 64
# Operands of more bytes than this are not written, and no script makes them.
_MOST_BYTES: Final = 1 << 30
# Problems of one cause on one backend of which a process writes all files; of further ones the report alone.
_CASES: Final = 3
# Part of the limit of the folder that a file of tensors may have.
_PART: Final = 16
# Error over bound at which the colours begin and end, and how many there are.
_NEAR: Final = 1e-3
_FAR: Final = 1e6
_SHADES: Final = 1024
# A picture of no more rows than this is a low one.
_FEW: Final = 4


def save(folder: Path, found: Sequence[Judged], case: Case, rerun: Rerun, warm: str = "", most: int = 0) -> str:
    """One folder a failed case.

    ``report.txt`` is what the run said. ``repro.py`` shows the failure with PyTorch alone, with ``repro.pt`` beside it
    where it cannot make its operands itself; where no script can be written the report has the reason.
    ``error_map.png`` is where the result is wrong; ``generated_code.py`` is the generated program where there is one,
    and ``tensors.pt`` the program's inputs by name, the actual result and the accepted interval.

    Args:
        folder: of all artifacts.
        found: outcomes; those with evidence have failed.
        case: that they are of.
        rerun: how to run it again.
        warm: ``here`` or ``elsewhere`` where it was compiled before with other constants, see :func:`repro.script`.
        most: bytes of the folder from which reports alone are written, as they are of what the ledger knows and of the
            fourth problem of a cause on; 0 for all files of all.

    Returns:
        why the folder of a case is not complete, a full disk for instance; "" where all was written.
    """
    lost = ""
    for judged in found:
        try:
            if judged.evidence is not None:
                _save_one(folder, judged.outcome, judged.evidence, case, rerun, warm, most)
        except Exception as error:  # noqa: PERF203  # each case is tried, and no file is worth its verdict
            lost = lost or (str(error) if isinstance(error, OSError) else described(error))
    return lost


@contextlib.contextmanager
def _noting(lines: list[str], file: str) -> Iterator[None]:
    """A block that makes a file; where it cannot, the report says why, but of a disk that takes no file at all."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        lines.append(f"no {file}: {error.reason if isinstance(error, Unsupported) else described(error)}")


def _save_one(
    folder: Path, outcome: Outcome, evidence: Evidence, case: Case, rerun: Rerun, warm: str, most: int
) -> None:
    """The folder of one case."""
    place = folder / folder_name(outcome)
    place.mkdir(parents=True, exist_ok=True)
    lines = [findings.text(Finding([outcome], outcome.cause), rerun.line(outcome))]
    if omitted := _omitted(folder, outcome, most):
        lines.append(f"no further files: {omitted}; {_ALL_FILES}")
    else:
        _save_files(place, outcome, evidence, case, warm, most // _PART or _MOST_BYTES, lines)
    (place / "report.txt").write_text("\n  ".join(lines) + "\n", encoding="utf-8")  # the last one, see :func:`_size`


def _save_files(
    place: Path, outcome: Outcome, evidence: Evidence, case: Case, warm: str, most: int, lines: list[str]
) -> None:
    """What is in the folder beside the report, whose ``lines`` get the reason for each file that is missing."""
    with _noting(lines, "script"):
        _write_script(place / "repro.py", outcome, evidence, case, warm, most)
    x, interval = evidence.actual, evidence.interval
    if interval is not None and (no_map := lacking("matplotlib")):
        lines.append(f"no error map: {no_map}")
    elif interval is not None and x is not None and calls.has_bits(x) and x.shape == interval.lo.shape:
        with _noting(lines, "error map"):
            draw(place / "error_map.png", x, interval, outcome.problem, ", ".join(outcome.candidates))
    with _noting(lines, "tensors.pt"):
        tensors: dict[str, object] = dict(program.args(case.problem, evidence.operands))
        tensors |= {} if x is None else {"actual": x}
        tensors |= {} if interval is None else {"lo": interval.lo, "hi": interval.hi}
        if (size := _bytes(tensors)) > most:
            raise Unsupported("no-tensors", f"it would have {size >> 20} MB; {_ALL_FILES}")
        _store(tensors, place / "tensors.pt")
    if evidence.source:
        (place / "generated_code.py").write_text(evidence.source, encoding="utf-8")


_ALL_FILES: Final = "the rerun with --gemm-output=DIR --gemm-set=run.files=0 writes all"
# Problems and candidates of which this process has written all files, by folder, backend and title.
_WRITTEN: Final = defaultdict[tuple[str, ...], set[tuple[str, str]]](set)
# Bytes of the folders of failures that are written, by any process: they are not looked at again.
_SIZES: Final[dict[Path, int]] = {}


def _omitted(folder: Path, outcome: Outcome, most: int) -> str:
    """Why only the report of a failure is written; "" where all files are."""
    if not most:
        return ""
    if outcome.known_failure:
        return f"the ledger has it as {outcome.known_failure}"
    kind = str(folder), outcome.who, findings.title(outcome)
    case = outcome.problem, outcome.candidate
    if case in _WRITTEN[kind] or len(_WRITTEN[kind]) == _CASES:
        return f"{plural(len(_WRITTEN[kind]), 'problem')} of this cause have them"
    if _size(folder) >= most:
        return f"{folder} has reached {most >> 20} MB"
    _WRITTEN[kind].add(case)
    return ""


def _size(folder: Path) -> int:
    """Bytes of the failures of all processes."""
    total = 0
    for place in filter(Path.is_dir, folder.iterdir()):
        size = _SIZES.get(place)
        if size is None:
            files = [path for path in place.iterdir() if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            if any(path.name == "report.txt" for path in files):
                _SIZES[place] = size
        total += size
    return total


def _bytes(tensors: Mapping[str, object]) -> int:
    """What the elements take: those of a crash are whole, those of a wrong large result are lines."""
    return sum(t.numel() * t.element_size() for t in tensors.values() if isinstance(t, torch.Tensor))


def _store(tensors: Mapping[str, object], path: Path) -> None:
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # of PyTorch's own writer
        raise OSError(f"{path}: {first_line(error)}") from error


def _write_script(path: Path, outcome: Outcome, evidence: Evidence, case: Case, warm: str, most: int) -> None:
    """The script of one outcome, with its tensors beside it.

    Raises:
        Unsupported: when there can be none.
    """
    if _bytes(program.args(evidence.operands.problem, evidence.operands)) > _MOST_BYTES:
        raise Unsupported("no-script", "the operands have more than a GiB")
    if evidence.actual is not None and not calls.has_bits(evidence.actual):
        raise Unsupported("no-script", "a script compares elements in memory, and the result has none")
    candidate = outcome.candidate or (outcome.chosen[0] if len(outcome.chosen) == 1 else "")
    if outcome.chosen and "out of the FX graph cache" in candidate:
        candidate = ""
    backend = case.backend
    if not isinstance(backend, ScriptedBackend):
        raise Unsupported("no-script", f"{backend.name} has no recipe by which PyTorch alone reaches its kernels")
    with precision.cpu_threads(case.threads):
        recipe = backend.recipe(case.problem, evidence.operands, case.request(candidate))
    made = repro.script(outcome, recipe, evidence, warm)
    if (size := _bytes(made.tensors)) > most:
        raise Unsupported("no-script", f"its tensors would have {size >> 20} MB", _ALL_FILES)
    beside = path.with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.unlink(missing_ok=True)
    if made.tensors:
        _store(made.tensors, beside)
    path.write_text(made.text, encoding="utf-8")


# -- the picture -----------------------------------------------------------------------------------------


def tile(candidate: str) -> tuple[int, int] | None:
    """Rows and columns that one block of the kernel computes, out of a candidate's name; ``None`` where it names none.

    ``triton_mm-64x128x32,s4,w8`` has the tile M x N x K, ``CppMicroGemmFP32Vec-8x48x1`` the register blocking,
    and CUTLASS's ``..._128x256x64_...`` the tile of a block of threads.
    """
    found = re.search(r"-(\d+)x(\d+)x\d+", candidate) or re.search(r"_(\d+)x(\d+)x?(?:_)?\d+_", candidate)
    return (int(found[1]), int(found[2])) if found else None


def draw(path: Path, actual: torch.Tensor, interval: Interval, title: str, candidate: str = "") -> None:
    """Write the picture of a wrong result as PNG: of a batch the matrix with the most wrong elements.

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
    from matplotlib.ticker import MaxNLocator

    found = verdict.ratios(actual.detach().double().to(interval.expected.device), interval).cpu()
    while found.dim() < 2:
        found = found.unsqueeze(0)
    matrices = found.reshape(-1, *found.shape[-2:])
    counts = (matrices > 1).sum((1, 2))
    which = int(counts.argmax())
    matrix = matrices[which]
    row, column = (int(i) for i in torch.unravel_index(matrix.argmax(), matrix.shape))
    rows, columns = matrix.shape
    finite = matrix[matrix.isfinite()]
    # Where the bound is 0 or nearly so a ratio means no more than "far".
    top = min(max(10.0, float(finite.max()) if finite.numel() else 10.0), _FAR)
    no_number = ~actual.detach().double().cpu().reshape(matrices.shape)[which].isfinite() & (matrix > 1)
    # A wrong element is never of the colour of a right one; what is beyond the top is no number.
    colour = torch.where(matrix > 1, matrix.clamp(1.2, top), matrix.clamp(_NEAR, 1.0))
    shown, cell = _pooled(colour.masked_fill(no_number, 2 * top))
    height = 6.5 if rows > _FEW else 3
    figure = Figure(figsize=(8, height), dpi=100)  # matplotlib's layouts draw all text several times, for 0.3 s
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.55 / height, top=1 - 0.5 / height)
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    image = axes.imshow(
        shown.numpy(),
        norm=LogNorm(vmin=_NEAR, vmax=top),
        cmap=_colours(top),
        # The last cell may have fewer rows or columns than the others.
        extent=(-0.5, shown.shape[1] * cell[1] - 0.5, shown.shape[0] * cell[0] - 0.5, -0.5),
        interpolation="nearest",
        aspect="auto",
    )
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    for axis in (axes.xaxis, axes.yaxis):  # with few ticks, for each takes a millisecond
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    figure.colorbar(image, ax=axes, label="error / bound (above 1: wrong)", format="%g").minorticks_off()
    if found_tile := tile(candidate):
        spans = (rows, columns, axes.hlines), (columns, rows, axes.vlines)
        for size, (extent, across, lines) in zip(found_tile, spans, strict=True):
            if extent / size <= _LINES:
                places = [place - 0.5 for place in range(size, extent, size)]
                lines(places, -0.5, across - 0.5, color="deepskyblue", linewidth=0.6)
    axes.plot([column], [row], marker="o", markersize=14, markerfacecolor="none", markeredgecolor="green", mew=2)
    batch = f"matrix {which} of {len(matrices)}, " if len(matrices) > 1 else ""
    wrong = f"{int(counts[which])} of {matrix.numel()} elements are wrong, the worst at ({row}, {column})"
    blue = "; blue: NaN or infinity" * bool(no_number.any())
    axes.set_xlabel(f"column; {batch}{wrong}{blue}", fontsize=9)
    axes.set_ylabel("row")
    axes.set_title("\n".join(filter(None, (title, candidate))), fontsize=9, y=1.0)
    figure.savefig(path, metadata={"Software": None})


def _colours(top: float) -> Any:
    """Greys up to 1, and from there yellow to red; blue beyond the top."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    greys = round(_SHADES * math.log(1 / _NEAR) / math.log(top / _NEAR))
    right = colormaps["Greys"](np.linspace(0.02, 0.4, greys))
    wrong = colormaps["YlOrRd"](np.linspace(0.35, 1.0, _SHADES - greys))
    return ListedColormap(np.vstack([right, wrong])).with_extremes(over="blue")


def _pooled(matrix: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The matrix with no more than :data:`_CELLS` cells a side, each the largest of its elements; size of a cell."""
    cell = [-(-n // _CELLS) for n in matrix.shape]
    return torch.nn.functional.max_pool2d(matrix[None, None], cell, ceil_mode=True)[0, 0], cell
