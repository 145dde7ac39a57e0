"""Split gate and up weights in a recording: the gradient of a stand-in without memory is that of both."""

import torch
from torch import Tensor

from sonic_ep.integrations.split_weights import distance_in_shape, stand_in, where_they_lie

E, N, D = 3, 4, 8


def two_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up, with something between them, and the memory of all."""
    memory = torch.randn(3 * E * N * D, generator=torch.Generator().manual_seed(0))
    gate, _, up = memory.view(3, E, N, D)
    return gate.detach().requires_grad_(), up.detach().requires_grad_(), memory


def test_it_has_no_memory_and_moves_nothing() -> None:
    gate, up, memory = two_weights()
    given = stand_in(gate, up)
    assert given.shape == (E, 2 * N, D)
    assert given.is_contiguous()
    assert given.untyped_storage().nbytes() == 0
    moved = torch.full_like(gate, float("nan")).repeat(1, 2, 1)
    for tensor in (given, moved):
        found = where_they_lie(tensor, gate, up)
        assert [each.data_ptr() for each in found] == [gate.data_ptr(), up.data_ptr()]
    assert memory.isfinite().all()


def test_gradients_of_both() -> None:
    gate, up, _ = two_weights()
    wanted = torch.autograd.grad((gate * 2 + up.exp()).sum(), [gate, up])
    found_gate, found_up = where_they_lie(stand_in(gate, up), gate, up)
    (found_gate * 2 + found_up.exp()).sum().backward()
    assert torch.equal(torch.stack([gate.grad, up.grad]), torch.stack(wanted))  # type: ignore[list-item]


class Halves(torch.autograd.Function):
    """Its gradients are halves of one tensor, as those of `moe`."""

    @staticmethod
    def forward(ctx: object, gate: Tensor, up: Tensor, both: Tensor) -> Tensor:
        ctx.both = both  # type: ignore[attr-defined]
        return gate.sum() + up.sum()

    @staticmethod
    def backward(ctx: object, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *ctx.both.chunk(2, 1), None  # type: ignore[attr-defined]


def test_gradients_that_are_halves_of_one_tensor_are_not_copied() -> None:
    gate, up, _ = two_weights()
    both = torch.randn(E, 2 * N, D)
    given = stand_in(gate, up).detach().requires_grad_()
    (grad,) = torch.autograd.grad(Halves.apply(*where_they_lie(given, gate, up), both), [given])
    assert grad.data_ptr() == both.data_ptr()
    assert torch.equal(grad, both)


def test_frozen_weights_need_no_gradient() -> None:
    gate, up, _ = two_weights()
    assert not stand_in(gate.detach(), up.detach()).requires_grad


def test_the_distance_is_a_shape() -> None:
    gate, up, _ = two_weights()
    assert distance_in_shape(gate, up).shape == (0, 2 * E * N * D * 4)
    assert distance_in_shape(up, gate).shape == (0, 0)
