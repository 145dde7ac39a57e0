"""Each operation against a dense float64 formula, with NaN in every output before it is written.

float64 agrees to 1e-12. Half-precision results are the exact ones rounded once, and by quack's rule no worse than
twice the error of plain torch in that dtype.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.experts import reference as ops
from sonic_ep.kernels.experts.activations import activation_named, interleave
from tests.kernels import oracle
from tests.kernels.oracle import (
    SHAPES,
    SPLIT_GATE_UP,
    Operands,
    Shape,
    assert_no_worse_than_low_precision,
    assert_rounded_once,
)

pytestmark = pytest.mark.usefixtures("poison")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
of_every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_and_without_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
RAGGED = SHAPES[0]

Formula = Callable[[Operands], dict[str, Tensor]]


def check(actual: dict[str, Tensor], formula: Formula, operands: Operands) -> None:
    """`actual`, of `operands`, against the formula in float64 and, for halves, in fp32 and the dtype itself."""
    dtype = operands.x_RH.dtype
    for name, exact in formula(operands.to(torch.float64)).items():
        assert_rounded_once(actual[name], exact, name)
    if dtype in SPLIT_GATE_UP:
        exact32, low = formula(operands.to(torch.float32)), formula(operands)
        for name in exact32:
            assert_no_worse_than_low_precision(actual[name], exact32[name], low[name], name)


@of_every_dtype
@with_and_without_bias
@of_every_shape
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_up_projection(activation: str, shape: Shape, bias: bool, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, activation, dtype)
    b1 = o.b1_eJ if bias else None
    act = activation_named(activation)
    h_PJ, a_PI = ops.up_projection(o.x_RH, o.w1_eJH, b1, o.row_of_pair_P, o.expert_starts_e, act)
    assert {h_PJ.dtype, a_PI.dtype} == {dtype}

    def formula(o: Operands) -> dict[str, Tensor]:
        h_PJ = oracle.up(o, bias=bias)
        return {"H": h_PJ, "A": oracle.activate(activation, h_PJ)}

    check({"H": h_PJ, "A": a_PI}, formula, o)


@of_every_shape
def test_gate_and_up_apart_are_as_good_as_interleaved(shape: Shape) -> None:
    o = Operands.draw(shape, "swiglu", torch.float64)
    act = activation_named("swiglu")
    gate, up = o.w1_eJH.unflatten(1, (-1, 2)).unbind(2)
    lists = o.row_of_pair_P, o.expert_starts_e
    wanted = ops.up_projection(o.x_RH, o.w1_eJH, None, *lists, act)
    assert all(map(torch.equal, ops.up_projection(o.x_RH, gate, None, *lists, act, up), wanted))
    wanted_dx = ops.up_projection_backward(o.dh_PJ, o.w1_eJH, o.expert_starts_e)
    assert torch.equal(ops.up_projection_backward(o.dh_PJ, gate, o.expert_starts_e, up), wanted_dx)
    split_gate_up = ops.weight_grad(o.dh_PJ, o.x_RH, *lists, split_gate_up=True)
    torch.testing.assert_close(
        interleave(split_gate_up), ops.weight_grad(o.dh_PJ, o.x_RH, *lists), rtol=1e-12, atol=1e-12
    )


@of_every_dtype
@with_and_without_bias
@of_every_shape
def test_down_projection(shape: Shape, bias: bool, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, "silu", dtype)
    y_PH = ops.down_projection(o.a_PI, o.w2_eHI, o.b2_eH if bias else None, o.expert_starts_e)
    assert y_PH.dtype == dtype
    check({"Y": y_PH}, lambda o: {"Y": oracle.down(o, o.a_PI, bias=bias)}, o)


@of_every_dtype
@of_every_shape
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_products_are_added_in_place(activation: str, shape: Shape, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, activation, dtype)
    act = activation_named(activation)
    h_PJ, dx_PH = o.h_PJ.clone(), torch.ones(shape.num_pairs, shape.H, dtype=dtype)
    a_PI = ops.accumulate_up_projection(h_PJ, o.a_PI[:, :1], o.w1_eJH[:, :, :1].mT, o.expert_starts_e, act)
    ops.accumulate_product(dx_PH, o.dh_PJ, o.w1_eJH, o.expert_starts_e)
    assert {h_PJ.dtype, a_PI.dtype, dx_PH.dtype} == {dtype}

    def formula(o: Operands) -> dict[str, Tensor]:
        h_PJ = o.h_PJ + o.a_PI[:, :1] * (o.pair_by_expert @ o.w1_eJH[:, :, 0])
        dx_PH = 1 + up_backward_formula(o)["dX"]
        return {"H": h_PJ, "A": oracle.activate(activation, h_PJ), "dX": dx_PH}

    check({"H": h_PJ, "A": a_PI, "dX": dx_PH}, formula, o)


def down_backward(o: Operands, activation: str, *, bias: bool) -> dict[str, Tensor]:
    b2 = o.b2_eH if bias else None
    act = activation_named(activation)
    dh_PJ, scaled_a_PI, ds_PZ = ops.down_projection_backward(
        o.do_RH, o.w2_eHI, b2, o.h_PJ, o.weights_P, o.row_of_pair_P, o.expert_starts_e, act
    )
    return {"dH": dh_PJ, "A'": scaled_a_PI, "dS": ds_PZ.sum(1)}


def check_down_backward(o: Operands, activation: str, *, bias: bool) -> None:
    def formula(o: Operands) -> dict[str, Tensor]:
        return dict(zip(("dH", "A'", "dS"), oracle.down_backward(o, activation, bias=bias), strict=True))

    check(down_backward(o, activation, bias=bias), formula, o)


@of_every_dtype
@with_and_without_bias
@of_every_shape
def test_down_projection_backward(shape: Shape, bias: bool, dtype: torch.dtype) -> None:
    check_down_backward(Operands.draw(shape, "swiglu", dtype), "swiglu", bias=bias)


@of_every_dtype
@pytest.mark.parametrize("activation", [*oracle.GATED, *oracle.PLAIN])
def test_down_projection_backward_of_every_activation(activation: str, dtype: torch.dtype) -> None:
    check_down_backward(Operands.draw(RAGGED, activation, dtype), activation, bias=True)


def up_backward_formula(o: Operands) -> dict[str, Tensor]:
    return {"dX": torch.einsum("pj,pe,ejh->ph", o.dh_PJ, o.pair_by_expert, o.w1_eJH)}


@of_every_dtype
@of_every_shape
def test_up_projection_backward(shape: Shape, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, "swiglu", dtype)
    dx_PH = ops.up_projection_backward(o.dh_PJ, o.w1_eJH, o.expert_starts_e)
    assert dx_PH.dtype == dtype
    check({"dX": dx_PH}, up_backward_formula, o)


def weight_grad_formula(o: Operands) -> dict[str, Tensor]:
    return {"dW": torch.einsum("pe,pj,ph->ejh", o.pair_by_expert, o.dh_PJ, o.pair_by_row @ o.x_RH)}


@of_every_dtype
@of_every_shape
def test_weight_grad(shape: Shape, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, "swiglu", dtype)
    dw = ops.weight_grad(o.dh_PJ, o.x_RH, o.row_of_pair_P, o.expert_starts_e)
    transposed = ops.weight_grad(o.dh_PJ, o.x_RH, o.row_of_pair_P, o.expert_starts_e, transposed=True)
    assert {dw.dtype, transposed.dtype} == {dtype}
    check({"dW": dw}, weight_grad_formula, o)
    check({"dW": transposed.mT}, weight_grad_formula, o)


@of_every_dtype
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_weight_grad_accumulates_into_a_wider_buffer(transposed: bool, dtype: torch.dtype) -> None:
    """Two micro-batches into one fp32 main_grad: never rounded to the operands' dtype, empty experts untouched."""
    wide = torch.promote_types(dtype, torch.float32)
    o = Operands.draw(RAGGED, "swiglu", dtype)
    exact = weight_grad_formula(o.to(torch.float64))["dW"]
    exact = exact.mT if transposed else exact
    start = torch.randn(exact.shape, dtype=wide)
    buffer = start.clone()
    for _ in range(2):
        returned = ops.weight_grad(
            o.dh_PJ, o.x_RH, o.row_of_pair_P, o.expert_starts_e, transposed=transposed, out_eAB=buffer
        )
        assert returned is buffer
    assert_rounded_once(buffer, start.double() + 2 * exact, f"accumulated in {wide}")
    empty = [expert for expert, count in enumerate(RAGGED.counts) if count == 0]
    assert empty
    assert torch.equal(buffer[empty], start[empty])


@of_every_dtype
@of_every_shape
def test_bias_grad(shape: Shape, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, "swiglu", dtype)
    db1 = ops.bias_grad(o.dh_PJ, o.expert_starts_e)
    assert db1.dtype == dtype
    check({"db1": db1}, lambda o: {"db1": o.pair_by_expert.T @ o.dh_PJ}, o)


def gathered_bias_formula(o: Operands) -> dict[str, Tensor]:
    return {"db2": o.pair_by_expert.T @ (o.weights_P[:, None] * (o.pair_by_row @ o.do_RH))}


@of_every_dtype
@of_every_shape
def test_gathered_bias_grad(shape: Shape, dtype: torch.dtype) -> None:
    o = Operands.draw(shape, "swiglu", dtype)
    db2 = ops.gathered_bias_grad(o.do_RH, o.weights_P, o.row_of_pair_P, o.expert_starts_e)
    assert db2.dtype == dtype
    check({"db2": db2}, gathered_bias_formula, o)


of_mixed_dtypes = pytest.mark.parametrize(
    ("rows", "pair_weights"),
    [
        pytest.param(rows, pair_weights, id=f"rows-{rows}-gates-{pair_weights}")
        for rows in DTYPES
        for pair_weights in DTYPES
        if rows != pair_weights
    ],
)


def mixed(rows: torch.dtype, pair_weights: torch.dtype) -> Operands:
    """What routers give: combine weights in a dtype of their own, such as fp32 weights for bf16 rows."""
    o = Operands.draw(RAGGED, "swiglu", rows)
    return replace(o, weights_P=o.weights_P.to(pair_weights))


@of_mixed_dtypes
def test_ds_has_the_dtype_of_the_gates_and_the_rest_that_of_the_rows(
    rows: torch.dtype, pair_weights: torch.dtype
) -> None:
    o = mixed(rows, pair_weights)
    actual = down_backward(o, "swiglu", bias=True)
    assert {name: values.dtype for name, values in actual.items()} == {"dH": rows, "A'": rows, "dS": pair_weights}
    for name, exact in zip(actual, oracle.down_backward(o.to(torch.float64), "swiglu", bias=True), strict=True):
        assert_rounded_once(actual[name], exact, name, computed=torch.float32)


@of_mixed_dtypes
def test_gathered_bias_grad_takes_gates_of_any_dtype(rows: torch.dtype, pair_weights: torch.dtype) -> None:
    o = mixed(rows, pair_weights)
    db2 = ops.gathered_bias_grad(o.do_RH, o.weights_P, o.row_of_pair_P, o.expert_starts_e)
    assert db2.dtype == rows
    assert_rounded_once(db2, gathered_bias_formula(o.to(torch.float64))["db2"], computed=torch.float32)


@pytest.fixture
def holed() -> tuple[Operands, Operands]:
    """Operands with NaN in the weights of empty experts and in rows that no pair reads; the same with zeros there."""
    o = Operands.draw(Shape(6, 4, 2, (0, 3, 0, 2)), "swiglu")
    o = replace(o, row_of_pair_P=torch.tensor([1, 4, 1, 4, 5], dtype=torch.int32))
    holes = {"x_RH": [0, 2, 3], "do_RH": [0, 2, 3], **dict.fromkeys(("w1_eJH", "b1_eJ", "w2_eHI", "b2_eH"), [0, 2])}
    for name, indices in holes.items():
        getattr(o, name)[indices] = torch.nan
    return o, replace(o, **{name: getattr(o, name).nan_to_num() for name in holes})


def test_forward_reads_only_what_pairs_need(holed: tuple[Operands, Operands]) -> None:
    o, clean = holed
    act = activation_named("swiglu")
    h_PJ, _ = ops.up_projection(o.x_RH, o.w1_eJH, o.b1_eJ, o.row_of_pair_P, o.expert_starts_e, act)
    assert_rounded_once(h_PJ, oracle.up(clean, bias=True), "H")
    y_PH = ops.down_projection(o.a_PI, o.w2_eHI, o.b2_eH, o.expert_starts_e)
    assert_rounded_once(y_PH, oracle.down(clean, clean.a_PI, bias=True), "Y")


def test_backward_reads_only_what_pairs_need(holed: tuple[Operands, Operands]) -> None:
    o, clean = holed
    actual = down_backward(o, "swiglu", bias=True)
    for name, exact in zip(actual, oracle.down_backward(clean, "swiglu", bias=True), strict=True):
        assert_rounded_once(actual[name], exact, name)
    dx_PH = ops.up_projection_backward(o.dh_PJ, o.w1_eJH, o.expert_starts_e)
    assert_rounded_once(dx_PH, up_backward_formula(clean)["dX"], "dX")
    dw = ops.weight_grad(o.dh_PJ, o.x_RH, o.row_of_pair_P, o.expert_starts_e)
    assert_rounded_once(dw, weight_grad_formula(clean)["dW"], "dW")
    db2 = ops.gathered_bias_grad(o.do_RH, o.weights_P, o.row_of_pair_P, o.expert_starts_e)
    assert_rounded_once(db2, gathered_bias_formula(clean)["db2"], "db2")


@pytest.mark.parametrize(
    ("dtype", "computed"), [*zip(DTYPES, [torch.float64, *3 * [torch.float32]], strict=True)], ids=str
)
def test_compute_dtype(dtype: torch.dtype, computed: torch.dtype) -> None:
    assert ops.compute_dtype(dtype) == computed
