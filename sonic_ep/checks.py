"""Checks of a caller's tensors. Each returns None, or a sentence that names the value, its limit and the fix.

They do not raise, because a rank with bad input must first send its status to the other ranks.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# Of ids. For wider unsigned integers torch has few operations.
ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ROW_ALIGNMENT = 16  # bytes: for GPU kernels, rows and weights must start at a multiple of it


def problem_with_input(
    x: object,
    *,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    sequences: bool,
    parameters: Callable[[], Iterable[Tensor]] = tuple,
) -> str | None:
    """Checks x (T, d) or (B, L, d) for experts of `dtype` on `device`. sequences: whether x must be (B, L, d).
    parameters: returns what x is multiplied by.
    """
    if (problem := problem_with_tensor("x", x, parameters)) is not None:
        return problem
    assert isinstance(x, Tensor)
    if not x.is_floating_point():
        return f"x has dtype {x.dtype}, wanted {dtype}: hidden states, not token ids"
    if x.is_meta and device.type == "meta":
        return "x and the layer's weights are on meta, where nothing is computed; use layer.to_empty(device=...)"
    shapes = "(B, L, d)" if sequences else "(T, d) or (B, L, d)"
    if x.dim() not in ((3,) if sequences else (2, 3)):
        why = ", because router.balance='sequence' counts per sequence" if sequences else ""
        return f"x has shape {_shape_of(x)}, wanted {shapes}{why}"
    if x.shape[-1] != d:
        return f"x has hidden size {x.shape[-1]} (shape {_shape_of(x)}), the layer has d={d}"
    if x.device != device:
        return f"x is on {x.device}, the layer's weights on {device}; move one of them"
    if x.dtype != dtype:
        return f"x has dtype {x.dtype}, the experts compute in {dtype}; cast x or use layer.to({x.dtype}) or autocast"
    return _problem_with_device(x)


def problem_with_tensor(name: str, values: object, parameters: Callable[[], Iterable[Tensor]] = tuple) -> str | None:
    """Checks that an argument is a dense tensor of no kind with which torch raises on this rank alone, within a step.

    parameters: returns tensors; if one needs a gradient, autograd saves `values`.
    """
    if not isinstance(values, Tensor):
        return f"{name} must be a torch.Tensor, got {type(values).__name__}"
    if values.is_nested or values.layout != torch.strided:
        layout = "nested" if values.is_nested else values.layout
        return f"{name} has layout {layout}, wanted a dense tensor; use {name}.to_dense() or pad it"
    if torch.compiler.is_dynamo_compiling():
        return None
    kind, plain, own = type(values), "give a plain torch.Tensor", "__torch_dispatch__"
    # Of torch's own subclasses that dispatch, AsyncCollectiveTensor alone turns into a plain tensor where it is used.
    if getattr(kind, own) is not getattr(Tensor, own) and kind.__name__ != "AsyncCollectiveTensor":
        if hasattr(values, "to_local"):
            return f"{name} is a {kind.__name__}; give this rank's own part, {name}.to_local(), or {name}.full_tensor()"
        return f"{name} is a {kind.__name__}, with operations of its own; {plain}"
    if is_lazy(values):
        return f"{name} is a {kind.__name__} without a shape; {plain}"
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if torch._is_functional_tensor(values) or functorch.is_functorch_wrapped_tensor(values):
        return f"{name} is held by a transform of torch.func that has ended; {plain}"
    if any(names := getattr(values, "names", ())):  # of torch before 2.13
        return f"{name} has named dimensions {names}; use {name}.rename(None)"
    if values.is_inference() and torch.is_grad_enabled() and any(each.requires_grad for each in parameters()):
        return (
            f"{name} is an inference tensor, which autograd cannot save; use {name}.clone(), or call this under "
            "torch.inference_mode too"
        )
    return None


def _problem_with_device(x: Tensor) -> str | None:
    """Checks that x is on the current device. Triton and quack launch there, on whatever device their arguments are."""
    if not x.is_cuda:
        return None
    current = torch.cuda.current_device()
    if x.device.index == current:
        return None
    return (
        f"x is on {x.device}, but the current device, on which kernels are launched, is cuda:{current}; "
        f"call torch.cuda.set_device({x.device.index}), or the layer under torch.cuda.device({x.device.index})"
    )


def _shape_of(x: Tensor) -> str:
    return str(tuple(x.shape))


def problem_with_rows(x_TH: Tensor, num_tokens: int) -> str | None:
    """Checks rows x (T, H) for a routing of `num_tokens` tokens."""
    if x_TH.dim() != 2:
        return f"x has shape {_shape_of(x_TH)}, wanted (T, d)"
    if num_tokens != x_TH.shape[0]:
        return f"the routing is of {num_tokens} tokens, x has {x_TH.shape[0]}"
    return _problem_with_device(x_TH)


def problem_with_weights(
    x_TH: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    *,
    gated: bool,
    local_experts: int,
    transposed: bool = False,
) -> str | None:
    """Checks shapes, dtypes, devices and memory of the local experts' weights for rows x (T, H).

    transposed: w1 is (e, H, J) and w2 (e, I, H).
    """
    if w1.dim() != 3 or w2.dim() != 3:
        shapes = f"{tuple(w1.shape)} and {tuple(w2.shape)}"
        order = "in, out" if transposed else "out, in"
        return f"w1 and w2 must have three dimensions (experts, {order}), got {shapes}; stack the experts' weights"
    J, H = (w1.mT if transposed else w1).shape[1:]
    width = J // 2 if gated else J
    w1_shape, w2_shape = (J, x_TH.shape[1]), (H, width)
    if transposed:
        w1_shape, w2_shape = w1_shape[::-1], w2_shape[::-1]
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "w1": (w1, (local_experts, *w1_shape)),
        "w2": (w2, (local_experts, *w2_shape)),
        "b1": (b1, (local_experts, J)),
        "b2": (b2, (local_experts, H)),
    }
    if gated and J % 2:
        return f"w1 has {J} rows an expert; a gated activation needs an even number (gate and up interleaved)"
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {tuple(tensor.shape)}, wanted {shape}"
        if tensor.dtype != x_TH.dtype or tensor.device != x_TH.device:
            return f"{name} is {tensor.dtype} on {tensor.device}, x is {x_TH.dtype} on {x_TH.device}; they must agree"
        if (problem := problem_with_memory(name, tensor)) is not None:
            return problem
    return None


def problem_with_up(gate: Tensor, up: Tensor, *, gated: bool, b1: Tensor | None, accumulates: bool) -> str | None:
    """Checks `up` of split gate/up weights. accumulates: whether gradients are added to main_grad."""
    if not gated or b1 is not None or accumulates:
        return (
            "up goes with a gated activation, without b1 and without accumulate_into_main_grad; "
            "pass w1 with gate and up interleaved"
        )
    if up.shape != gate.shape or up.dtype != gate.dtype or up.device != gate.device:
        return (
            f"up is {tuple(up.shape)} {up.dtype} on {up.device}, w1 (the gate) is {tuple(gate.shape)} {gate.dtype} on "
            f"{gate.device}; they must agree"
        )
    return problem_with_memory("up", up)


def problem_with_low_rank(x_TH: Tensor, J: int, w2_shape: torch.Size, lora: tuple[Tensor | None, ...]) -> str | None:
    """Checks A1, B1, A2 and B2 of low-rank updates, for rows x (T, H) and weights w1 (e, J, H) and w2 (e, H, I)."""
    e, H, width = w2_shape
    for number, (a, b), (rows, columns) in zip("12", (lora[:2], lora[2:]), ((J, H), (H, width)), strict=True):
        if (a is None) != (b is None):
            return f"lora has one of A{number} and B{number}; pass both, or none for no update of w{number}"
        if a is None or b is None:
            continue
        r = a.shape[1] if a.dim() > 1 else 0
        for name, tensor, shape in ((f"A{number}", a, (e, r, columns)), (f"B{number}", b, (e, rows, r))):
            if tuple(tensor.shape) != shape or r == 0:
                return f"lora's {name} has shape {tuple(tensor.shape)}, wanted {shape} with a rank of at least 1"
            if tensor.dtype != x_TH.dtype or tensor.device != x_TH.device:
                return (
                    f"lora's {name} is {tensor.dtype} on {tensor.device}, x is {x_TH.dtype} on {x_TH.device}; they "
                    "must agree"
                )
    return None


def problem_with_memory(name: str, weight: Tensor) -> str | None:
    """Checks that a weight is contiguous and, on a GPU, aligned."""
    if not weight.is_contiguous():
        return f"{name} is not contiguous (strides {weight.stride()}); set it to {name}.contiguous()"
    if not weight.is_cuda:
        return None
    if starts_aligned(weight):
        return None
    return (
        f"{name} starts at byte {weight.storage_offset() * weight.itemsize} of its storage, which is no multiple of "
        f"{ROW_ALIGNMENT}; set it to {name}.clone()"
    )


def starts_aligned(values: Tensor) -> bool:
    """Returns True if the offset in their storage is a multiple of ROW_ALIGNMENT. Storages themselves are aligned."""
    return values.storage_offset() * values.itemsize % ROW_ALIGNMENT == 0
