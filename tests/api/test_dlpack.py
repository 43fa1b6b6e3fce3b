"""Operands reach another framework in the same memory, and what cannot is named with its remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pytest_gemm.api.dlpack import hand_over, take_back


def test_operands_and_result_share_their_memory() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    array = hand_over(a.mT, np.from_dlpack)
    assert (array.shape, array.strides) == ((4, 3), (4, 16))
    result = take_back(array, a)
    assert result.data_ptr() == a.data_ptr()
    assert torch.equal(result, a.mT)


def test_a_strided_tensor_is_copied_for_a_framework_that_asks_for_it() -> None:
    given = torch.arange(12.0).reshape(3, 4)[:, :2]
    array = hand_over(given, np.from_dlpack, compact=True)
    assert array.strides == (8, 4)
    assert array.tolist() == given.tolist()


def test_a_tensor_at_another_address_is_copied_for_a_framework_that_needs_an_aligned_one() -> None:
    memory = torch.arange(33.0)
    assert hand_over(memory, np.from_dlpack, align=64).ctypes.data == memory.data_ptr()
    array = hand_over(memory[1:], np.from_dlpack, align=64)
    assert array.ctypes.data % 64 == 0
    assert array.tolist() == memory[1:].tolist()


class _Called(np.ndarray):
    """An array whose framework calls its dtype as no other one does."""

    called = ""

    @property
    def dtype(self) -> Any:
        return type("DType", (), {"name": self.called})()


@pytest.mark.parametrize("name", ["FLOAT32", "float32", "Float32", "FP32", "float", "VarType.FP32"])
def test_a_dtype_is_what_it_is_whatever_the_framework_calls_it(name: str) -> None:
    def handed(x: Any) -> Any:
        array = np.asarray(x).view(_Called)
        array.called = name
        return array

    assert isinstance(hand_over(torch.zeros(2), handed), _Called)
    with pytest.raises(BufferError, match=f"float64 .* becomes an array of {name}: leave float64 out of dtypes"):
        hand_over(torch.zeros(2).double(), lambda x: handed(x.float()))


def _nowhere(_: Any) -> Any:
    raise RuntimeError("no such type")


class _Elsewhere(np.ndarray):
    def __dlpack_device__(self) -> Any:
        return 2, 0


@pytest.mark.parametrize(
    ("tensor", "from_dlpack", "message"),
    [
        (torch.zeros(2, 2).bfloat16(), np.from_dlpack, r"bfloat16 .* cannot be handed over .*: leave bfloat16 out of"),
        (
            torch.zeros(2, 2, dtype=vars(torch)["uint4"]),
            np.from_dlpack,
            "uint4 .* becomes an array of uint8: leave uint4 out",
        ),
        (torch.zeros(2, 2).double(), lambda x: x.numpy().astype("f4"), "float64 .* becomes an array of float32: "),
        (torch.zeros(2, 4)[:, :2], _nowhere, r"strides \(4, 1\) .*\(RuntimeError: no such type\): compact=True copies"),
        (torch.zeros(2), lambda x: x.numpy().view(_Elsewhere), r"on cpu becomes an array on another device, \(2, 0\)"),
        (torch.zeros(2, requires_grad=True), np.from_dlpack, "BufferError: .*gradient"),
    ],
)
def test_what_cannot_be_handed_over_is_named(tensor: torch.Tensor, from_dlpack: Any, message: str) -> None:
    with pytest.raises(BufferError, match=message):
        hand_over(tensor, from_dlpack)


def test_a_result_is_waited_for_and_what_went_wrong_is_raised() -> None:
    array, like = np.zeros(2, np.float32), torch.zeros(2)

    def computed(given: Any) -> None:
        given += 1

    assert take_back(array, like, wait=computed).tolist() == [1, 1]

    def failed(_: Any) -> None:
        raise FloatingPointError("the kernel failed")

    with pytest.raises(FloatingPointError, match="the kernel failed"):
        take_back(array, like, wait=failed)


def test_a_result_that_pytorch_cannot_hold_is_named() -> None:
    with pytest.raises(BufferError, match="a result of ndarray cannot be taken back"):
        take_back(np.zeros(2, np.longdouble), torch.zeros(2))
    with pytest.raises(BufferError, match="the result is on cpu, the operands on meta"):
        take_back(np.zeros(2), torch.zeros(2, device="meta"))


def test_jax_takes_no_f64_and_no_gaps() -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(BufferError, match=r"float64 .* becomes an array of float32: leave float64 out of dtypes"):
        hand_over(torch.zeros(2, 2).double(), jnp.from_dlpack)
    with pytest.raises(BufferError, match=r"strides \(4, 1\) .*: compact=True copies it first"):
        hand_over(torch.zeros(2, 4)[:, :2], jnp.from_dlpack)
    fp8 = torch.ones(2, 2).to(torch.float8_e4m3fn)
    assert take_back(hand_over(fp8, jnp.from_dlpack), fp8).dtype is torch.float8_e4m3fn
