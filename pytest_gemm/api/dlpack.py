"""Operands as arrays of another framework, and its result as a tensor, in the same memory: DLPack.

A function that is registered for tensors calls a framework in three lines::

    def matmul(a, b):
        x, y = (hand_over(one, jnp.from_dlpack, compact=True) for one in (a, b))
        return take_back(jnp.matmul(x, y), a, wait=jax.block_until_ready)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gemm.core.text import described

if TYPE_CHECKING:
    import torch


def dtype_of(array: Any) -> str:
    """The dtype of a tensor or an array, as PyTorch, numpy and what follows it call it: ``bfloat16``."""
    name = getattr(array.dtype, "name", None)  # str() of TensorFlow's is "<dtype: 'bfloat16'>"
    return name if isinstance(name, str) else str(array.dtype).rpartition(".")[2]


def _is_of(array: Any, tensor: torch.Tensor) -> bool:
    """Whether an array has a tensor's dtype: by its name in any case, or by what it is to PyTorch."""
    if dtype_of(array).lower() == dtype_of(tensor):
        return True
    from torch.utils.dlpack import from_dlpack

    try:
        return bool(from_dlpack(array).dtype == tensor.dtype)
    except Exception:  # of the framework's own classes: a dtype that PyTorch has not
        return False


def hand_over(tensor: torch.Tensor, from_dlpack: Callable[[Any], Any], *, compact: bool = False, align: int = 1) -> Any:
    """A tensor as an array of another framework, in the same memory.

    Args:
        tensor: an operand.
        from_dlpack: the framework's own function, ``jax.numpy.from_dlpack`` for instance.
        compact: the framework takes contiguous arrays alone: a strided tensor is copied first.
        align: the framework takes addresses that are multiples of this many bytes alone, and does not check it: another
            tensor is copied first.  PyTorch's own memory is aligned to 64 bytes on a CPU.

    Raises:
        BufferError: when the framework does not take its dtype, strides or device, or makes others of them.
    """
    given = tensor.contiguous() if compact else tensor
    given = given.clone() if given.data_ptr() % align else given

    def refusal(why: str) -> BufferError:
        what = f"a tensor of {dtype_of(given)} with strides {given.stride()} on {given.device}"
        remedy = f"leave {dtype_of(given)} out of dtypes" if given.is_contiguous() else "compact=True copies it first"
        return BufferError(f"{what} {why}: {remedy}")

    try:
        array = from_dlpack(given)
        place = array.__dlpack_device__()
    except Exception as error:  # of its own classes
        raise refusal(f"cannot be handed over ({described(error)})") from error
    # A framework may have no such type (f64 becomes f32), and 4-bit integers leave PyTorch as bytes.
    if not _is_of(array, given):
        raise refusal(f"becomes an array of {dtype_of(array)}")
    if place != given.__dlpack_device__():
        found = tuple(map(int, place))
        raise BufferError(f"a tensor on {given.device} becomes an array on another device, {found} in DLPack's numbers")
    return array


def take_back(array: Any, like: torch.Tensor, *, wait: Callable[[Any], object] | None = None) -> torch.Tensor:
    """A result as a tensor, in the same memory, when it is computed.

    On CUDA every stream of the device is waited for: what the framework reads must not be given to others before, and
    an error of its kernels has to be that of this call.

    Args:
        array: the result.
        like: an operand, on whose device the result has to be.
        wait: the framework's function that waits for an array and raises what went wrong, of one that computes while
            Python goes on: ``jax.block_until_ready`` for instance.

    Raises:
        BufferError: when PyTorch does not take its dtype or device, and when it is on another device.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    if wait is not None:
        wait(array)
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    try:
        result = from_dlpack(array)
    except Exception as error:  # of the framework's own classes
        raise BufferError(f"a result of {type(array).__name__} cannot be taken back ({described(error)})") from error
    if result.device != like.device:
        raise BufferError(f"the result is on {result.device}, the operands on {like.device}")
    return result
