"""The GPU operations against the reference in fp32, by quack's rule, with NaN-poisoned outputs.

An element may be off by at most twice what torch's own half-precision arithmetic is off, plus 1e-5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.backend import Operations, gather_sum, operations_for
from sonic_ep.kernels.combine.gather_sum import reference as sums
from sonic_ep.kernels.experts import mlp, reference
from sonic_ep.kernels.experts.activations import activation_named, concatenate
from sonic_ep.kernels.experts.mlp import ExpertWeights, RowLists
from tests.helpers.waiting import assert_nothing_waits

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    """counts: pair-buffer rows of each expert. R: received rows."""

    counts: tuple[int, ...]
    R: int
    H: int
    I: int  # noqa: E741
    activation: str = "swiglu"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        P = sum(self.counts)
        kind = f"{self.activation}-{'bias-' if self.bias else ''}{str(self.dtype).removeprefix('torch.')}"
        return f"P{P}-R{self.R}-H{self.H}-I{self.I}-e{len(self.counts)}-{kind}"


CASES = [
    Case((128, 256, 384, 128), 300, 256, 128),
    Case((77, 0, 391, 1, 130), 300, 256, 128),
    Case((0, 0, 900, 0), 500, 512, 192),
    Case((513,), 513, 1536, 256),
    Case((64, 200, 72), 200, 2304, 512, dtype=torch.float16),
    Case((40, 260), 150, 2880, 2880),
    Case((300, 20), 250, 7168, 2048),
    Case(tuple(range(0, 512, 4)), 4000, 512, 128),
    Case((100, 28, 300), 200, 256, 128, bias=True),
    Case((*range(1, 512, 2), *range(256)), 9818, 256, 128),  # E=512, K=10
    Case((100, 28, 300), 200, 256, 128, activation="swiglu_oai"),
    Case((100, 28, 300), 200, 2880, 256, activation="swiglu_oai", bias=True),
    Case((100, 28, 300), 200, 256, 128, activation="swiglu_clamped"),
    Case((100, 28, 300), 200, 256, 192, activation="swiglu_clamped", bias=True),
    Case((100, 28, 300), 200, 256, 192, activation="swiglu_clamped_7"),
    Case((100, 28, 300), 200, 256, 128, activation="swiglu_clamped_7", bias=True),
    Case((100, 28, 300), 200, 256, 128, activation="geglu"),
    Case((100, 28, 300), 200, 256, 128, activation="geglu_erf"),
    Case((100, 28, 300), 200, 256, 192, activation="geglu_erf", bias=True),
    Case((100, 28, 300), 200, 256, 128, activation="reglu"),
    Case((100, 28, 300), 200, 256, 128, activation="relu"),
    Case((100, 28, 300), 200, 256, 128, activation="relu2"),
    Case((100, 28, 300), 200, 256, 128, activation="gelu", bias=True),
    Case((100, 28, 300), 200, 256, 128, activation="gelu_erf"),
    Case((100, 28, 300), 200, 256, 192, activation="gelu_erf", bias=True),
    Case((100, 28, 300), 200, 256, 128, activation="silu"),
]
of_cases = pytest.mark.parametrize("case", CASES, ids=str)


class Operands:
    """Unit-scale rows, weights that keep the scale, gates, lists; on the GPU in the case's dtype."""

    def __init__(self, case: Case) -> None:
        e, P = len(case.counts), sum(case.counts)
        self.activation = activation_named(case.activation)
        J = 2 * case.I if self.activation.gated else case.I

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device="cuda") * scale).to(case.dtype)

        self.x, self.do = draw(case.R, case.H), draw(case.R, case.H)
        self.w1, self.w2 = draw(e, J, case.H, scale=case.H**-0.5), draw(e, case.H, case.I, scale=case.I**-0.5)
        self.b1 = draw(e, J, scale=0.5) if case.bias else None
        self.b2 = draw(e, case.H, scale=0.5) if case.bias else None
        self.h = draw(P, J)
        self.a, self.dh = draw(P, case.I), draw(P, J)
        self.pair_weights = torch.rand(P, device="cuda")
        self.rows = torch.randint(case.R, (P,), device="cuda", dtype=torch.int32)
        self.starts = torch.tensor([0, *case.counts], device="cuda").cumsum(0).int()

    def exact(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.float()


def gpu_operations(o: Operands) -> Operations:
    operations = operations_for(o.x, o.w2, o.activation)
    assert operations.__name__ == "sonic_ep.kernels.experts.grouped_gemm"  # type: ignore[attr-defined]
    return operations


def assert_quack_rule(name: str, got: Tensor, exact: Tensor, torch_half: Tensor) -> None:
    limit = 2 * (torch_half.float() - exact).abs().max() + 1e-5
    error = (got.float() - exact).abs().max()
    assert error <= limit, f"{name}: max error {error:.3g} above {limit:.3g}"
    assert got.shape == exact.shape


def per_expert(o: Operands, compute: Callable[[int, slice], Tensor], like: Tensor) -> Tensor:
    """torch's own half-precision arithmetic, expert by expert."""
    out = torch.zeros_like(like)
    starts = o.starts.tolist()
    for expert in range(len(starts) - 1):
        rows = slice(starts[expert], starts[expert + 1])
        out[rows] = compute(expert, rows)
    return out


@of_cases
def test_up_projection(case: Case, poison: None) -> None:
    o = Operands(case)
    h, a = gpu_operations(o).up_projection(o.x, o.w1, o.b1, o.rows, o.starts, o.activation)
    exact = reference.up_projection(o.x.float(), o.w1.float(), o.exact(o.b1), o.rows, o.starts, o.activation)

    def half(expert: int, rows: slice) -> Tensor:
        out = o.x[o.rows[rows].long()] @ o.w1[expert].T
        return out if o.b1 is None else out + o.b1[expert]

    half_h = per_expert(o, half, h)
    assert_quack_rule("H", h, exact[0], half_h)
    assert_quack_rule("A", a, exact[1], o.activation.forward(half_h))


@pytest.mark.parametrize("name", ["gelu_erf", "geglu_erf"])
def test_exact_gelu_is_not_its_approximation(name: str, poison: None) -> None:
    """In fp16, which is fine enough to show the difference, with weights that copy."""
    activation, R, J = activation_named(name), 256, 128
    I = J // 2 if activation.gated else J  # noqa: E741
    x = torch.linspace(-5, 5, R * J, device="cuda").view(R, J).half()
    w1, w2 = torch.eye(J, device="cuda").half()[None], torch.eye(J, I, device="cuda").half()[None]
    rows = torch.arange(R, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, R], device="cuda", dtype=torch.int32)
    ones = torch.ones(R, device="cuda")
    operations = operations_for(x, w2, activation)
    h, a = operations.up_projection(x, w1, None, rows, starts, activation)
    dh, _, _ = operations.down_projection_backward(torch.ones_like(x), w2, None, h, ones, rows, starts, activation)
    exact = h.double()
    close = {"rtol": 2**-10, "atol": 1e-5}
    torch.testing.assert_close(a.double(), activation.forward(exact), **close)
    torch.testing.assert_close(dh.double(), activation.backward(torch.ones_like(a).double(), exact), **close)


# Tiles must compute any number of rows, whatever is promised.
@pytest.mark.parametrize("tile_aligned", [False, True], ids=["ragged", "rounded"])
@of_cases
def test_down_projection_and_up_backward(case: Case, tile_aligned: bool, poison: None) -> None:
    o = Operands(case)
    operations = gpu_operations(o)
    y = operations.down_projection(o.a, o.w2, o.b2, o.starts, tile_aligned=tile_aligned)
    exact = reference.down_projection(o.a.float(), o.w2.float(), o.exact(o.b2), o.starts)
    bias = o.b2
    half = per_expert(o, lambda e, r: o.a[r] @ o.w2[e].T + (0 if bias is None else bias[e]), y)
    assert_quack_rule("Y", y, exact, half)
    dx = operations.up_projection_backward(o.dh, o.w1, o.starts, tile_aligned=tile_aligned)
    exact = reference.up_projection_backward(o.dh.float(), o.w1.float(), o.starts)
    assert_quack_rule("dX", dx, exact, per_expert(o, lambda e, r: o.dh[r] @ o.w1[e], dx))


@of_cases
def test_products_are_added_in_place(case: Case, poison: None) -> None:
    """Of 16 summands, as low-rank updates have. Rows behind the last expert's are left alone."""
    o = Operands(case)
    operations = gpu_operations(o)
    end, t = int(o.starts[-1]), o.dh[:, :16].contiguous()
    b1, a1 = o.w1[:, :, :16].contiguous(), (o.w1[:, :16, :] * case.H**0.5 / 4).contiguous()
    h, exact_h = torch.cat((o.h, o.h[:3])), o.h.float()
    t_and_more = torch.cat((t, t[:3]))
    a = operations.accumulate_up_projection(h, t_and_more, b1.mT, o.starts, o.activation)
    exact_a = reference.accumulate_up_projection(exact_h, t.float(), b1.mT.float(), o.starts, o.activation)
    half_h = o.h + per_expert(o, lambda e, r: t[r] @ b1[e].T, o.h)
    assert_quack_rule("H", h[:end], exact_h, half_h)
    assert_quack_rule("A", a[:end], exact_a, o.activation.forward(half_h))
    assert torch.equal(h[end:], o.h[:3])
    for start, weights in ((o.x, a1), (o.do, a1.mT.contiguous().mT)):  # as dX and Y, with either dim contiguous
        out = start[o.rows.long()]
        exact, half = out.float(), out + per_expert(o, lambda e, r: t[r] @ a1[e], out)
        operations.accumulate_product(out, t, weights, o.starts)
        reference.accumulate_product(exact, t.float(), a1.float(), o.starts)
        assert_quack_rule("sums", out, exact, half)


@of_cases
def test_down_projection_backward(case: Case, poison: None) -> None:
    o = Operands(case)
    arguments = (o.rows, o.starts, o.activation)
    dh, scaled_a, ds = gpu_operations(o).down_projection_backward(o.do, o.w2, o.b2, o.h, o.pair_weights, *arguments)
    exact = reference.down_projection_backward(
        o.do.float(), o.w2.float(), o.exact(o.b2), o.h.float(), o.pair_weights, *arguments
    )
    da = per_expert(o, lambda e, r: o.do[o.rows[r].long()] @ o.w2[e], o.a)
    a = o.activation.forward(o.h)
    s = o.pair_weights[:, None].to(case.dtype)
    assert_quack_rule("dH", dh, exact[0], o.activation.backward(s * da, o.h))
    assert_quack_rule("A'", scaled_a, exact[1], s * a)
    relative = (ds.sum(1) - exact[2].sum(1)).norm() / exact[2].norm()
    assert relative < 2e-3, f"dS: relative error {relative:.3g}"
    assert ds.dtype == torch.float32
    again = gpu_operations(o).down_projection_backward(o.do, o.w2, o.b2, o.h, o.pair_weights.double(), *arguments)
    assert torch.equal(again[0], dh)
    assert again[2].dtype == torch.float64


@of_cases
def test_weight_and_bias_grads(case: Case, poison: None) -> None:
    o = Operands(case)
    operations = gpu_operations(o)
    for name, left, right, transposed in (("dW1", o.dh, o.x, False), ("dW2", o.a, o.do, True)):
        got = operations.weight_grad(left, right, o.rows, o.starts, transposed=transposed)
        exact = reference.weight_grad(left.float(), right.float(), o.rows, o.starts, transposed=transposed)
        assert_quack_rule(name, got, exact, exact.to(case.dtype))
        main_grad = torch.ones_like(exact)
        same = operations.weight_grad(left, right, o.rows, o.starts, transposed=transposed, out_eAB=main_grad)
        assert same is main_grad
        assert ((main_grad - 1 - exact).norm() / exact.norm()) < 1e-3, name
    for name, got, exact in (
        ("db1", operations.bias_grad(o.dh, o.starts), reference.bias_grad(o.dh.float(), o.starts)),
        (
            "db2",
            operations.gathered_bias_grad(o.do, o.pair_weights, o.rows, o.starts),
            reference.gathered_bias_grad(o.do.float(), o.pair_weights, o.rows, o.starts),
        ),
    ):
        assert_quack_rule(name, got, exact, exact.to(case.dtype))


# Values before gate, and from its end to up; None: up comes first. What TMA cannot read so is copied.
NUM_SLOTS = {"behind": (0, 0), "far behind": (8, 1 << 20), "odd": (0, 4), "both odd": (4, 8), "first": (0, None)}


def laid_out(gate: Tensor, up: Tensor, before: int, gap: int | None) -> tuple[Tensor, Tensor]:
    """Both in one allocation."""
    size = gate.numel()
    memory = gate.new_zeros(before + 2 * size + (gap or 0))
    first, last = memory[before : before + size].view(gate.shape), memory[-size:].view(gate.shape)
    at_gate, at_up = (last, first) if gap is None else (first, last)
    return at_gate.copy_(gate), at_up.copy_(up)


@pytest.mark.parametrize("place", NUM_SLOTS)
@of_cases
def test_gate_and_up_apart_give_the_same_bits(case: Case, place: str, poison: None) -> None:
    o = Operands(case)
    if not o.activation.gated or case.bias:
        pytest.skip("apart are the weights of gated activations without bias")
    operations = gpu_operations(o)
    gate, up = o.w1.unflatten(1, (-1, 2)).unbind(2)
    gate, up = laid_out(gate, up, *NUM_SLOTS[place])
    lists = o.rows, o.starts
    wanted = operations.up_projection(o.x, o.w1, None, *lists, o.activation)
    assert all(map(torch.equal, operations.up_projection(o.x, gate, None, *lists, o.activation, up), wanted))
    wanted_dx = operations.up_projection_backward(o.dh, o.w1, o.starts)
    assert torch.equal(operations.up_projection_backward(o.dh, gate, o.starts, up), wanted_dx)
    if place == "behind":
        split_gate_up = operations.weight_grad(o.dh, o.x, *lists, split_gate_up=True)
        assert torch.equal(split_gate_up, concatenate(operations.weight_grad(o.dh, o.x, *lists)))


@of_cases
def test_transposed_weights_give_the_same_bits(case: Case, poison: None) -> None:
    o = Operands(case)
    operations, lists = gpu_operations(o), (o.rows, o.starts)
    w1, w2 = (weight.mT.contiguous().mT for weight in (o.w1, o.w2))
    wanted = operations.up_projection(o.x, o.w1, o.b1, *lists, o.activation)
    assert all(map(torch.equal, operations.up_projection(o.x, w1, o.b1, *lists, o.activation), wanted))
    wanted_y = operations.down_projection(o.a, o.w2, o.b2, o.starts)
    assert torch.equal(operations.down_projection(o.a, w2, o.b2, o.starts), wanted_y)
    given = o.h, o.pair_weights, *lists, o.activation
    wanted = operations.down_projection_backward(o.do, o.w2, o.b2, *given)
    assert all(map(torch.equal, operations.down_projection_backward(o.do, w2, o.b2, *given), wanted))
    wanted_dx = operations.up_projection_backward(o.dh, o.w1, o.starts)
    assert torch.equal(operations.up_projection_backward(o.dh, w1, o.starts), wanted_dx)


@of_cases
def test_halves_of_one_tensor_give_the_same_bits(case: Case, poison: None) -> None:
    o = Operands(case)
    if not o.activation.gated or case.bias:
        pytest.skip("halves are the weights of gated activations without bias")
    operations = gpu_operations(o)
    halves, lists = concatenate(o.w1), (o.rows, o.starts)
    gate, up = halves.chunk(2, 1)
    assert import_module("sonic_ep.kernels.experts.split_gate_up").interleaved_view(gate, up) is not None
    wanted = operations.up_projection(o.x, o.w1, None, *lists, o.activation)
    assert all(map(torch.equal, operations.up_projection(o.x, gate, None, *lists, o.activation, up), wanted))
    wanted_dx = operations.up_projection_backward(o.dh, o.w1, o.starts)
    assert torch.equal(operations.up_projection_backward(o.dh, gate, o.starts, up), wanted_dx)


def test_what_can_be_read_where_it_lies() -> None:
    view = import_module("sonic_ep.kernels.experts.split_gate_up").interleaved_view
    gate, up = torch.zeros(2, 3, 8, 16, device="cuda", dtype=torch.bfloat16).unbind(0)
    operand = view(gate, up)
    assert operand is not None
    assert (operand.shape, operand.stride(), operand.data_ptr()) == ((3, 16, 16), (128, 384, 1), gate.data_ptr())
    assert view(up, gate) is None
    values = gate.flatten()
    assert view(values[:128].view(1, 8, 16), values[132:260].view(1, 8, 16)) is None
    assert view(values[4:132].view(1, 8, 16), values[132:260].view(1, 8, 16)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("H", [1, 7, 256, 2880, 7168])
@pytest.mark.parametrize("weighted", [False, True])
def test_gather_sum(dtype: torch.dtype, H: int, weighted: bool, poison: None) -> None:
    values = torch.randn(300, H, device="cuda").to(dtype)
    counts = torch.randint(0, 9, (200,), device="cuda")
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    items = torch.randint(300, (int(starts[-1]),), device="cuda", dtype=torch.int32)
    weights = torch.rand(300, device="cuda") if weighted else None
    exact = sums.gather_sum(values.double(), items, starts, None if weights is None else weights.double())
    got = gather_sum(values, items, starts, weights)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact.to(dtype).double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_no_rows_at_all() -> None:
    gate, up = torch.zeros(2, 2, 32, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    o = Operands(Case((0, 0), 4, 64, 32))
    operations = gpu_operations(o)
    h, a = operations.up_projection(o.x, o.w1, o.b1, o.rows, o.starts, o.activation)
    assert (h.shape, a.shape) == ((0, 64), (0, 32))
    h, a = operations.up_projection(o.x, gate, None, o.rows, o.starts, o.activation, up)
    assert (h.shape, a.shape) == ((0, 64), (0, 32))
    assert operations.up_projection_backward(o.dh, gate, o.starts, up).shape == (0, 64)
    assert operations.weight_grad(o.dh, o.x, o.rows, o.starts).abs().max() == 0


def test_rows_that_nobody_needs_may_hold_anything() -> None:
    """As the gaps between received rows do."""
    o = Operands(Case((100, 28), 600, 64, 32, bias=True))
    expected = gpu_operations(o).gathered_bias_grad(o.do, o.pair_weights, o.rows, o.starts)
    pending_sizes = torch.ones(600, dtype=torch.bool, device="cuda")
    pending_sizes[o.rows.long()] = False
    assert pending_sizes.any()
    o.do[pending_sizes] = torch.inf
    assert torch.equal(gpu_operations(o).gathered_bias_grad(o.do, o.pair_weights, o.rows, o.starts), expected)


def test_nothing_waits_for_the_device() -> None:
    o = Operands(CASES[0])
    operations = gpu_operations(o)
    lists, weights = RowLists(o.rows, o.starts), ExpertWeights(o.w1, o.w2)
    rows_by_pair = o.rows.long().sort(stable=True)
    row_starts = torch.searchsorted(rows_by_pair.values, torch.arange(CASES[0].R + 1, device="cuda")).int()
    pairs = rows_by_pair.indices.int()

    def forward_and_backward() -> None:
        a, h = mlp.forward_hidden(operations, o.x, weights, lists, o.activation)
        y = mlp.forward_output(operations, a, weights, lists)
        gather_sum(y, pairs, row_starts, o.pair_weights)
        grads = mlp.backward_hidden(operations, o.do, h, o.pair_weights, weights, lists, o.activation)
        mlp.backward_pairs(operations, grads.dh_PJ, weights, lists)
        mlp.backward_up_weights(operations, o.x, grads.dh_PJ, lists)
        mlp.backward_down_weights(operations, o.do, grads.scaled_a_PI, lists)

    assert_nothing_waits(forward_and_backward)


def test_more_elements_than_31_bits_count() -> None:
    case = Case((262_144 + 128, 128), 300, 8192, 64)  # P * H just above 2^31
    o = Operands(case)
    operations = gpu_operations(o)
    y = operations.down_projection(o.a, o.w2, None, o.starts)
    assert y.numel() > 2**31
    for rows in (slice(0, 64), slice(-256, None)):
        expert = torch.zeros(y.shape[0], dtype=torch.int64, device="cuda")
        expert[262_272:] = 1
        exact = torch.stack(
            [o.w2[e].float() @ a for e, a in zip(expert[rows].tolist(), o.a[rows].float(), strict=True)]
        )
        half = torch.stack([o.w2[e] @ a for e, a in zip(expert[rows].tolist(), o.a[rows], strict=True)])
        assert_quack_rule("Y", y[rows], exact, half)
    last = torch.tensor([y.shape[0] - 1, 0], device="cuda", dtype=torch.int32)
    total = gather_sum(y, last, torch.tensor([0, 2], device="cuda", dtype=torch.int32))
    torch.testing.assert_close(total[0].float(), y[-1].float() + y[0].float(), rtol=1e-2, atol=1e-2)
