"""Every activation against torch.nn.functional in float64, its derivative against autograd, and the gate/up layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep.kernels.experts.activations import ACTIVATIONS, activation_named, concatenate, interleave
from tests.kernels import oracle

NAMES = [*oracle.GATED, *oracle.PLAIN]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Kinks and clamps exactly, next to them, and far beyond them.
SPECIAL = [0.0, 1e-3, 1.0, 6.999, 7.0, 7.001, 9.0, 9.999, 10.0, 10.001, 30.0, 1e3]


def pre_activations(P: int, I: int, *, gated: bool) -> Tensor:  # noqa: E741
    return 4 * torch.randn(P, 2 * I if gated else I, dtype=torch.float64)


def special_pre_activations(*, gated: bool) -> Tensor:
    """Every pair of special values (gate, up), of either sign; for plain activations each value."""
    values = torch.tensor([sign * v for v in SPECIAL for sign in (1, -1)], dtype=torch.float64)
    return torch.cartesian_prod(values, values) if gated else values[:, None]


def test_names_are_all_there() -> None:
    assert sorted(ACTIVATIONS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_gated_says_how_many_columns_it_reads(name: str) -> None:
    activation = activation_named(name)
    assert activation.gated == (name in oracle.GATED)
    h_PJ = pre_activations(3, 5, gated=activation.gated)
    assert activation.forward(h_PJ).shape == (3, 5)
    assert activation.backward(torch.ones(3, 5), h_PJ).shape == h_PJ.shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(63, 64), (5, 1), (1, 7), (0, 4)], ids=lambda shape: "P{}-I{}".format(*shape))
def test_value_and_derivative(name: str, shape: tuple[int, int]) -> None:
    check(name, pre_activations(*shape, gated=name in oracle.GATED))


@pytest.mark.parametrize("name", NAMES)
def test_value_and_derivative_at_kinks_clamps_and_far_out(name: str) -> None:
    check(name, special_pre_activations(gated=name in oracle.GATED))


def check(name: str, h_PJ: Tensor) -> None:
    activation = activation_named(name)
    h_PJ = h_PJ.requires_grad_()
    expected = oracle.activate(name, h_PJ)
    da_PI = torch.randn(expected.shape, dtype=torch.float64)
    (expected_dh,) = torch.autograd.grad(expected, h_PJ, da_PI)
    with torch.no_grad():
        torch.testing.assert_close(activation.forward(h_PJ), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(activation.backward(da_PI, h_PJ), expected_dh, rtol=1e-12, atol=1e-12)


def test_gpt_oss_beyond_the_clamp_by_hand() -> None:
    """gate is cut at 7 from above only, up on both sides; up counts from -1; nothing flows back through a cut value."""
    activation = activation_named("swiglu_oai")
    h = torch.tensor([[9.0, 2.0], [9.0, 30.0], [1.0, -30.0], [-30.0, 2.0], [1.0, -1.0]], dtype=torch.float64)
    seven, one = 7 / (1 + torch.tensor(-1.702 * 7).exp()), 1 / (1 + torch.tensor(-1.702).exp())
    expected = torch.tensor([[3 * seven], [8 * seven], [-6 * one], [0.0], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(activation.forward(h), expected, rtol=1e-6, atol=1e-12)
    passes = activation.backward(torch.ones(5, 1, dtype=torch.float64), h) != 0
    assert passes.tolist() == [[False, True], [False, False], [True, False], [True, True], [False, True]]


def test_deepseek_v4_beyond_the_clamp_by_hand() -> None:
    """gate is cut at 10 from above only, up on both sides; nothing flows back through a cut value."""
    activation = activation_named("swiglu_clamped")
    h = torch.tensor([[11.0, 2.0], [11.0, 30.0], [1.0, -30.0], [-30.0, 2.0]], dtype=torch.float64)
    ten, one, low = (x / (1 + torch.tensor(-x, dtype=torch.float64).exp()) for x in (10.0, 1.0, -30.0))
    torch.testing.assert_close(activation.forward(h)[:, 0], torch.stack([2 * ten, 10 * ten, -10 * one, 2 * low]))
    passes = activation.backward(torch.ones(4, 1, dtype=torch.float64), h) != 0
    assert passes.tolist() == [[False, True], [False, False], [True, False], [True, True]]


def test_step_35_beyond_the_clamp_by_hand() -> None:
    activation = activation_named("swiglu_clamped_7")
    h = torch.tensor([[8.0, 2.0], [8.0, 30.0], [1.0, -8.0]], dtype=torch.float64)
    seven, one = (x / (1 + torch.tensor(-x, dtype=torch.float64).exp()) for x in (7.0, 1.0))
    torch.testing.assert_close(activation.forward(h)[:, 0], torch.stack([2 * seven, 7 * seven, -7 * one]))
    passes = activation.backward(torch.ones(3, 1, dtype=torch.float64), h) != 0
    assert passes.tolist() == [[False, True], [False, False], [True, False]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_has_the_dtype_of_the_input(name: str, dtype: torch.dtype) -> None:
    activation = activation_named(name)
    h_PJ = pre_activations(6, 4, gated=activation.gated).to(dtype)
    a_PI = activation.forward(h_PJ)
    assert a_PI.dtype == dtype
    assert activation.backward(a_PI, h_PJ).dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_left_alone(name: str) -> None:
    activation = activation_named(name)
    h_PJ = pre_activations(6, 4, gated=activation.gated)
    da_PI = torch.randn(6, 4, dtype=torch.float64)
    before = h_PJ.clone(), da_PI.clone()
    activation.forward(h_PJ)
    activation.backward(da_PI, h_PJ)
    assert torch.equal(h_PJ, before[0])
    assert torch.equal(da_PI, before[1])


@pytest.mark.parametrize("name", ["reglu", "relu2"])
def test_relu_of_an_overflowed_negative_is_zero(name: str) -> None:
    h_PJ = torch.tensor([[float("-inf"), 2.0]])
    assert activation_named(name).forward(h_PJ)[0, 0] == 0


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="activation='swish'") as caught:
        activation_named("swish")
    assert all(name in str(caught.value) for name in NAMES)


def test_interleaved_means_gate_first_in_turn() -> None:
    split_gate_up = torch.tensor([[10, 11, 12, 20, 21, 22]])  # gates 10.., ups 20..
    turns = torch.tensor([[10, 20, 11, 21, 12, 22]])
    assert torch.equal(interleave(split_gate_up), turns)
    assert torch.equal(concatenate(turns), split_gate_up)


@pytest.mark.parametrize(
    "shape", [(3, 8, 5), (1, 2, 7), (2, 6, 1), (4, 0, 3), (0, 4, 2)], ids=lambda s: "e{}-J{}-H{}".format(*s)
)
def test_layouts_are_each_others_inverse(shape: tuple[int, int, int]) -> None:
    w1_eJH = torch.randn(shape)
    assert torch.equal(concatenate(interleave(w1_eJH)), w1_eJH)
    assert torch.equal(interleave(concatenate(w1_eJH)), w1_eJH)


@pytest.mark.parametrize("convert", [interleave, concatenate])
@pytest.mark.parametrize("I", [1, 2, 3], ids="I{}".format)
def test_layout_conversion_is_a_copy(convert, I: int) -> None:  # type: ignore[no-untyped-def]  # noqa: E741
    w1_eJH = torch.zeros(2, 2 * I, 3)
    convert(w1_eJH).fill_(1)
    assert not w1_eJH.any()


def test_layout_conversion_is_differentiable() -> None:
    split_gate_up = torch.randn(2, 6, 3, requires_grad=True)
    weight = torch.randn(2, 6, 3)
    (interleave(split_gate_up) * weight).sum().backward()
    assert split_gate_up.grad is not None
    assert torch.equal(split_gate_up.grad, concatenate(weight))


def test_interleaved_weights_give_the_glu_of_the_two_halves() -> None:
    x_TH, gate_IH, up_IH = torch.randn(5, 7), torch.randn(4, 7), torch.randn(4, 7)
    w1_JH = interleave(torch.cat([gate_IH, up_IH])[None])[0]
    expected = F.silu(x_TH @ gate_IH.T) * (x_TH @ up_IH.T)
    torch.testing.assert_close(activation_named("swiglu").forward(x_TH @ w1_JH.T), expected)
