"""Bindings of linear.h, experts.h, router.h and head.h on torch CUDA tensors, with guarded and poisoned memory.

Every call gets its workspace and outputs between guard bytes, filled with NaN bits before, and the guards are checked
after. What may go wrong: a refusal or CUDA error raises KernelError with the library's words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import abi
import torch

_GUARD_BYTES = 256
_GUARD_VALUE = 0xA5


class KernelError(RuntimeError):
    """A kernel call returned a status other than 0."""

    def __init__(self, entry: str, status: int) -> None:
        words = abi.load().glm_kernels_last_error()
        super().__init__(f"{entry}: status {status}: {words.decode() if words else ''}")
        self.status = status


class GuardedBuffer:
    """Device memory of `shape` and `dtype` between two guards, filled with 0xFF bytes (NaN in every float format)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        element_bytes = torch.empty(0, dtype=dtype).element_size()
        num_bytes = element_bytes
        for size in shape:
            num_bytes *= size
        self._raw = torch.full((num_bytes + 2 * _GUARD_BYTES,), _GUARD_VALUE, dtype=torch.uint8, device="cuda")
        inner = self._raw[_GUARD_BYTES : _GUARD_BYTES + num_bytes]
        inner.fill_(0xFF)
        self.tensor = inner.view(dtype).view(*shape)

    def check(self, name: str) -> None:
        """AssertionError when a byte outside the buffer changed."""
        for side, guard in (("before", self._raw[:_GUARD_BYTES]), ("behind", self._raw[-_GUARD_BYTES:])):
            assert bool((guard == _GUARD_VALUE).all()), f"bytes {side} {name} were overwritten"


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_int(value)  # type: ignore[arg-type]


def workspace_bytes(entry: str, *sizes: int) -> int:
    """Result of `<entry>_workspace_bytes(sizes)`."""
    function = getattr(abi.load(), f"{entry}_workspace_bytes")
    function.restype = ctypes.c_size_t
    return int(function(*[ctypes.c_int(size) for size in sizes]))


def call(entry: str, *arguments: object, workspace: GuardedBuffer) -> None:
    """Runs an entry whose last arguments are workspace, workspace_bytes, stream, on torch's current stream."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    size = ctypes.c_size_t(workspace.tensor.numel())
    status = getattr(abi.load(), entry)(*[_argument(a) for a in arguments], _argument(workspace.tensor), size, stream)
    if status != 0:
        raise KernelError(entry, status)


def _run(entry: str, sizes: Sequence[int], outputs: dict[str, GuardedBuffer], *arguments: object) -> None:
    workspace = GuardedBuffer((workspace_bytes(entry_of_workspace(entry), *sizes),), torch.uint8)
    call(entry, *arguments, workspace=workspace)
    torch.cuda.synchronize()
    workspace.check("workspace")
    for name, buffer in outputs.items():
        buffer.check(name)


def entry_of_workspace(entry: str) -> str:
    """The three expert entries share one workspace function."""
    return "glm_experts" if entry.startswith("glm_experts") else entry


def linear(x: torch.Tensor, weight: torch.Tensor, to_f32: bool = False) -> torch.Tensor:
    """glm_linear: x bf16 [T,I], weight bf16 [O,I] -> bf16 or f32 [T,O]."""
    (rows, k), features = x.shape, weight.shape[0]
    out = GuardedBuffer((rows, features), torch.float32 if to_f32 else torch.bfloat16)
    _run("glm_linear", (rows, k, features), {"out": out}, x, weight, out.tensor, rows, k, features, int(to_f32))
    return out.tensor


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, to_f32: bool = False) -> torch.Tensor:
    """glm_linear_fp8: x bf16 [T,I], weight e4m3 [O,I], scale f32 [ceil(O/128), ceil(I/128)] -> bf16 or f32 [T,O]."""
    (rows, k), features = x.shape, weight.shape[0]
    out = GuardedBuffer((rows, features), torch.float32 if to_f32 else torch.bfloat16)
    _run(
        "glm_linear_fp8", (rows, k, features), {"out": out},
        x, weight, scale, out.tensor, rows, k, features, int(to_f32),
    )  # fmt: skip
    return out.tensor


def experts(
    entry: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tensors: Sequence[torch.Tensor],
    intermediate: int, num_experts: int,
) -> torch.Tensor:  # fmt: skip
    """glm_experts / _fp8 / _nvfp4 with `tensors` = the weight arguments in the header's order -> bf16 [T, hidden]."""
    rows, hidden = x.shape
    sizes = (rows, hidden, intermediate, num_experts, ids.shape[1])
    out = GuardedBuffer((rows, hidden), torch.bfloat16)
    _run(entry, sizes, {"out": out}, x, ids, weights, *tensors, out.tensor, *sizes)
    return out.tensor


def router(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, n_group: int = 1, topk_group: int = 1,
    norm_topk_prob: bool = True, routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """glm_router: (expert_ids i32 [T,k], expert_weights f32 [T,k])."""
    (rows, hidden), num_experts = x.shape, weight.shape[0]
    ids, weights = GuardedBuffer((rows, top_k), torch.int32), GuardedBuffer((rows, top_k), torch.float32)
    _run(
        "glm_router", (rows, hidden, num_experts), {"expert_ids": ids, "expert_weights": weights},
        x, weight, bias, ids.tensor, weights.tensor, rows, hidden, num_experts, top_k, n_group, topk_group,
        int(norm_topk_prob), float(routed_scaling_factor),
    )  # fmt: skip
    return ids.tensor, weights.tensor


def head_logits(x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, valid_vocab: int) -> torch.Tensor:
    """glm_head_logits: f32 [M, V]."""
    (num_x_rows, hidden), vocab, num_rows = x.shape, weight.shape[0], rows.shape[0]
    out = GuardedBuffer((num_rows, vocab), torch.float32)
    _run(
        "glm_head_logits", (num_rows, hidden, vocab), {"out": out},
        x, rows, weight, out.tensor, num_x_rows, num_rows, hidden, vocab, valid_vocab,
    )  # fmt: skip
    return out.tensor


def head_argmax(x: torch.Tensor, weight: torch.Tensor, valid_vocab: int) -> torch.Tensor:
    """glm_head_argmax: i32 [B]."""
    (rows, hidden), vocab = x.shape, weight.shape[0]
    out = GuardedBuffer((rows,), torch.int32)
    _run(
        "glm_head_argmax", (rows, hidden, vocab), {"out": out}, x, weight, out.tensor, rows, hidden, vocab, valid_vocab
    )
    return out.tensor
