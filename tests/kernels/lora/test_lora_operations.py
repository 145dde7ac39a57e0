"""What low-rank updates add to gradients of activations, plain and in Triton, against autograd in float64."""

import pytest
import torch

from sonic_ep.kernels.experts.activations import ACTIVATIONS, activation_named
from tests.helpers.implementations import Implementation, of_all
from tests.helpers.oracle import activate
from tests.helpers.tolerances import assert_near

SIZES = [(0, 8), (3, 1), (5, 24), (2, 1030)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    roundings = 2 if got.dtype is torch.bfloat16 else 8
    assert_near(got.double().cpu(), wanted, share=roundings * torch.finfo(got.dtype).eps)


@of_all
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("P", "I"), SIZES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_add_hidden_grads(name: str, P: int, I: int, dtype: torch.dtype, implementation: Implementation) -> None:  # noqa: E741
    activation = activation_named(name)
    J, wide = (2 * I if activation.gated else I), torch.promote_types(dtype, torch.float32)
    h, dh = ((8 * torch.randn(P, J, dtype=torch.float64)).to(dtype) for _ in range(2))
    da, ds, pair_weights = torch.randn(P, I).to(dtype), torch.randn(P, 3).to(wide), torch.rand(P).to(wide)
    leaf = h.double().clone().requires_grad_()
    a = activate(name, leaf)
    (added,) = torch.autograd.grad((a * da.double() * pair_weights.double()[:, None]).sum(), leaf)
    wanted_dh, wanted_ds = dh.double() + added, ds.double().clone()
    wanted_ds[:, 0] += (a.detach() * da.double()).sum(1)
    dh, ds, *others = (each.to(implementation.device) for each in (dh, ds, h, da, pair_weights))
    implementation.module("lora").add_hidden_grads(dh, ds, *others, activation)
    close(dh, wanted_dh)
    torch.testing.assert_close(
        ds.double().cpu(), wanted_ds, rtol=1e-5, atol=1e-4 * float(wanted_ds.abs().max()) if P else 0.0
    )
