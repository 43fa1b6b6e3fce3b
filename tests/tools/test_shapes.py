"""``pytest-gemm shapes``: the products that a model executes, as a file that the suites take."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

import pytest_gemm.tools.products  # noqa: F401  # pytester forgets what is imported later
from pytest_gemm.tools import cli

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
"""

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, n, bias=False) for n in (64, 32, 32, 64))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((64, 160), (64, 160), (160, 64)))
        self.norms = nn.ModuleList([nn.RMSNorm(64), nn.RMSNorm(64)])
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        weights = (q @ k.mT * 0.25).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return x + self.narrow(F.gelu(self.wide(x)))

def model():
    print("the factory may print")
    blocks = nn.Sequential(Block(), torch.compile(Block(), fullgraph=True)).bfloat16()
    return blocks, (torch.zeros(1, 15, 64, dtype=torch.bfloat16),), {"input": torch.zeros(1, 1, 64).bfloat16()}
"""

ROUTED = """
def model():
    router, experts = nn.Linear(8, 3, bias=False), torch.ones(3, 16, 8)
    router.weight.data = torch.eye(3, 8)
    def run(x):
        chosen, y = router(x).argmax(-1), x.new_zeros(len(x), 16)
        for expert in range(3):
            rows = (chosen == expert).nonzero()[:, 0]
            if rows.numel():
                y[rows] = F.linear(x[rows], experts[expert]).relu()
        return y
    return run, (torch.eye(8)[[0, 0, 0, 2, 2]],)
"""

# What follows "return", and the one line that comes of it.
LINES = {
    "nn.Linear(8, 1, bias=False), (X,)": "linear:f32:nt:4x1x8",
    "lambda x: x @ W.T, (X,)": "linear:f32:nt:4x16x8",
    "lambda x, y: x @ y, (X, Z)": "mm:f32:nn:4x6x8:b.argument",
    "lambda x, y: x.T @ y, (torch.ones(8, 4), Z)": "mm:f32:tn:4x6x8:b.argument",
    "lambda x: torch.addmm(C, x, W.T, alpha=0.5), (X,)": "addmm:f32:nt:4x16x8:bias-m1+alpha-0.5",
    "lambda x: torch.baddbmm(x, x, x, beta=2), (torch.ones(2, 4, 4),)": "baddbmm:f32:nn:2x4x4x4:bias-mn+beta-2",
    "lambda x: torch.bmm(x, W.expand(2, 16, 8)), (torch.ones(2, 4, 16),)": "bmm:f32:nn:2x4x8x16:b.broadcast+constant",
    "lambda x: x @ x.mT, (HEADS,)": "bmm:f32:nt:2x4x4x8:a.batch_middle:b.batch_middle",
    "lambda x: F.linear(x[:, :8], W), (Y,)": "linear:f32:nt:4x16x8:a.padded",
    "lambda x: F.linear(x[:, 8:16], W), (Y,)": "linear:f32:nt:4x16x8:a.sliced",
    "lambda x: F.linear(x, W), (torch.ones(33)[1:].view(4, 8),)": "linear:f32:nt:4x16x8:a.offset",
    "lambda x: F.linear(x, W[4:]), (X,)": "linear:f32:nt:4x12x8:b.tail",
    "torch.autocast('cpu', BF16)(lambda x: L(x)), (X,)": "linear:f32-f32-bf16:nt:4x16x8:bias",
    "lambda x: x @ I.T.to(x.dtype) + C[0, 0], (X,)": "mixed_mm:f32-i8-f32:nt:4x16x8",
    "lambda x: torch._int_mm(x, I.T), (torch.ones(32, 8).char(),)": "int_mm:i8-i8-i32:nt:32x16x8",
    "lambda x: torch._weight_int8pack_mm(x, I, torch.ones(16)) + L.bias, (X,)": "woq_int8:f32-i8-f32:nt:4x16x8:bias",
    "lambda x: INT4(x, P, 32, torch.ones(2, 16, 2)), (K64,)": "woq_int4:f32-i4-f32:nt:4x16x64:quant.group-32",
    "lambda x: SCALED(x, E.T, ONE, ONE), (E.clone(),)": "scaled_mm:f8e4m3fn:nt:16x16x16:quant.tensorwise:b.constant",
    "lambda x: F.grouped_mm(x, G, offs=ENDS), (G[0],)": "grouped_mm:bf16:nn:2x8x16x16:b.constant",
    "lambda x: F.relu6(L(x)).mul_(0.5).double(), (X,)": "linear:f32:nt:4x16x8:bias+clamp-0_6+scale+cast-f64",
    "lambda x: L(x).double().sum(), (X,)": "linear:f32:nt:4x16x8:bias",
    "lambda x: torch.stack([y := L(x), y.relu()]), (X,)": "linear:f32:nt:4x16x8:bias",
    "lambda x: L(x) + x.sum(1, keepdim=True), (X,)": "linear:f32:nt:4x16x8:bias",
    "lambda x, r: L(x) * r - r[:1], (torch.ones(1, 4, 8), torch.ones(4, 1))": "linear:f32:nt:4x16x8:bias+mul-m1",
    "lambda x: F.linear(x, W[:8]).view(2, 2, 8) + x, (torch.ones(2, 2, 8),)": "linear:f32:nt:4x8x8:add:r0.alias",
    "lambda x: torch.mm(x, W.T, out=O).relu(), (X,)": "mm:f32:nt:4x16x8:out.given",
    "lambda x: L(x), (TwoTensor(X, X),)": "linear:f32:nt:4x16x8:bias",
}
WEIGHTS = """
from torch.testing._internal.two_tensor import TwoTensor
L, W, C, I = nn.Linear(8, 16), torch.ones(16, 8), torch.ones(4, 1), torch.ones(16, 8).char()
P = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.ones(16, 64).int(), 1)
E, ONE, G = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(()), torch.ones(2, 16, 16).bfloat16()
ENDS, BF16 = torch.tensor([3, 16], dtype=torch.int32), torch.bfloat16
INT4, SCALED = torch.ops.aten._weight_int4pack_mm_for_cpu, torch._scaled_mm
HEADS, X = torch.ones(4, 2, 8).transpose(0, 1), torch.ones(4, 8)
O, Y, Z, K64 = torch.empty(4, 16), torch.ones(4, 24), torch.ones(8, 6), torch.ones(4, 64)
"""


@pytest.fixture(autouse=True)
def paths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def written(folder: Path, source: str) -> Path:
    """A module of its own name: Python imports one of a name once."""
    path = folder / f"{folder.name.replace('.', '_')}.py"
    path.write_text(HEAD + source)
    return path


def counts(text: str) -> dict[str, int]:
    """How often each line of a shapes file was executed."""
    return {line: int(count) for line, count in re.findall(r'^    "(.*)",  # (\d+) times, [\d.]+% of ', text, re.M)}


def test_a_transformer_is_listed_with_its_steps_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, BLOCK)
    assert cli.main(["shapes", f"{path}:model"]) == 0
    out, err = capsys.readouterr()
    once = {
        "linear:bf16:nt:{}x256x64:bias+gelu": 2,
        "linear:bf16:nt:{}x64x256:bias+add": 2,
        "linear:bf16:nt:{}x160x64:silu": 2,
        "linear:bf16:nt:{}x160x64:mul": 2,
        "linear:bf16:nt:{}x64x160:add": 2,
        "linear:bf16:nt:{}x64x64": 2,
        "linear:bf16:nt:{}x64x64:add": 2,
        "linear:bf16:nt:{}x32x64": 4,
    }
    attention = {
        "bmm:bf16:nt:4x15x15x16:scale-0.25:a.batch_middle": 2, "bmm:bf16:nn:4x15x16x15": 2,
        "bmm:bf16:nt:4x1x1x16:scale-0.25": 2, "bmm:bf16:nn:4x1x16x1": 2,
    }  # fmt: skip
    assert counts(out) == {line.format(m): count for m in (15, 1) for line, count in once.items()} | attention
    assert next(iter(counts(out))) == "linear:bf16:nt:15x256x64:bias+gelu", "the largest share is first"
    assert "44 products, 20 lines, 100.0% of the multiplications" in err
    assert "the factory may print" in err


def test_routing_goes_by_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shapes", f"{written(tmp_path, ROUTED)}:model"]) == 0
    assert counts(capsys.readouterr().out) == {
        "linear:f32:nt:3x16x8:relu": 1, "linear:f32:nt:2x16x8:relu:b.tail": 1, "linear:f32:nt:5x3x8": 1,
    }  # fmt: skip


def multiplies_fp8() -> bool:
    """Whether PyTorch does here; where oneDNN is capped on a processor with AMX it raises: aten-scaled-mm-no-kernel."""
    import torch

    x, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    with contextlib.suppress(RuntimeError):
        return torch._scaled_mm(x, x.t(), one, one) is not None
    return False


@pytest.mark.parametrize(("returned", "line"), LINES.items(), ids=range(len(LINES)))
def test_each_product_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], returned: str, line: str
) -> None:
    if "SCALED" in returned and not multiplies_fp8():
        pytest.skip("a model with an fp8 product cannot run here")
    path = written(tmp_path, f"{WEIGHTS}\ndef model():\n    return {returned}\n")
    assert cli.main(["shapes", f"{path}:model"]) == 0
    once = 1 + ("TwoTensor" in returned)  # each of its products is two
    assert counts(capsys.readouterr().out) == {line: once}


def test_what_has_no_line_is_counted_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
@torch.library.custom_op("shapes_test::mine", mutates_args=())
def mine(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

def model():
    q, w = torch.ones(1, 2, 8, 16), torch.ones(16, 16)
    return lambda: [F.scaled_dot_product_attention(q, q, q) for _ in "12"] + [
        mine(q), q[0, 0] @ w[0], w.cfloat() @ w.cfloat(), F.conv1d(q[0], torch.ones(4, 8, 3)), q[0, 0] @ w
    ]
"""
    path = written(tmp_path, source)
    assert cli.main(["shapes", f"{path}:model"]) == 0
    out, err = capsys.readouterr()
    assert list(counts(out)) == ["mm:f32:nn:8x16x16"]
    assert re.search(
        r"left out: 2 times aten\._scaled_dot_product_\S*attention\S* \(\d+\.\d%\): no op of a problem", err
    )
    assert re.search(r"left out: 1 times aten\.convolution\S* \(\d+\.\d%\)", err)
    assert re.search(r"left out: 1 times aten\.mv\S* \(not counted\)", err)
    assert re.search(r"left out: 1 times shapes_test\.mine\S* \(not counted\): what it computes is not known", err)
    assert re.search(r"left out: 1 times aten\.mm\S* \(\d+\.\d%\): a problem line has no complex64", err)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{}", "write MODULE:FACTORY"),
        ("{}:", "write MODULE:FACTORY"),
        ("missing.py:model", "there is no file missing.py"),
        ("no_such_module:model", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("{}:modle", "has no attribute 'modle'"),
        ("{}:NUMBER", "'int' object is not callable"),
        ("{}:wrong", "wrong returned Linear, Tensor; return the model, or a tuple"),
        ("{}:raises", r"raises raised RuntimeError: not today \(.*\.py:\d+\)"),
        ("{}:empty", "executes no product that a problem line has"),
    ],
)
def test_a_wrong_model_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, says: str
) -> None:
    source = """
NUMBER = 3
def wrong(): return nn.Linear(2, 2), torch.ones(2)
def raises(): return nn.Linear(2, 2), (stop(),)
def stop(): raise RuntimeError("not today")
def empty(): return lambda: torch.ones(2)
"""
    with pytest.raises(SystemExit) as ended:
        cli.main(["shapes", given.format(written(tmp_path, source))])
    assert ended.value.code == cli.USAGE_ERROR
    err = capsys.readouterr().err
    assert re.search(says, err)
    assert "Traceback" not in err


@pytest.mark.parametrize("suite", ["conformance.test_products --gemm-problem", "perf.test_speed --gemm-shapes"])
def test_the_suites_take_the_file(pytester: pytest.Pytester, suite: str) -> None:
    path = written(pytester.path, BLOCK)
    assert cli.main(["shapes", f"{path}:model", "--output", "made/model.toml"]) == 0
    module, option = suite.split()
    words = ("--pyargs", f"pytest_gemm.{module}", f"{option}=made/model.toml", "--gemm-backends=aten")
    result = pytester.runpytest(*words, "--collect-only", "-q", "-p", "no:cacheprovider")
    collected = re.findall(r"\[aten-(.*)\]$", result.stdout.str(), re.M)
    assert collected == list(counts((pytester.path / "made" / "model.toml").read_text()))
    assert len(collected) == 20
