"""The experts' operations in plain torch with the same bits for a pair whatever other pairs there are.

Those of kernels/experts/reference.py, on blocks of the rows of one expert. Sums over rows, the gradients of weights and
biases, depend on the batch.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I).
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from sonic_ep.kernels.batch_invariant.blocks import padded, rows_of_block
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.tile_table import ReserveFor

accumulate_product = reference.accumulate_product
accumulate_up_projection = reference.accumulate_up_projection
weight_grad = reference.weight_grad
bias_grad = reference.bias_grad
gathered_bias_grad = reference.gathered_bias_grad


def up_projection(
    x_RH: Tensor,
    w1: Tensor,
    b1_eJ: Tensor | None,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    up_eIH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.py."""

    def compute(e: slice, starts_e: Tensor, rows_P: Tensor) -> tuple[Tensor, ...]:
        return reference.up_projection(x_RH, w1[e], _of(b1_eJ, e), rows_P, starts_e, activation, _of(up_eIH, e))

    h_PJ, a_PI = _by_blocks(compute, expert_starts_e, row_of_pair_P)
    return h_PJ, a_PI


def down_projection(
    a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
) -> Tensor:
    """See reference.py."""

    def compute(e: slice, starts_e: Tensor, a_PI: Tensor) -> tuple[Tensor, ...]:
        return (reference.down_projection(a_PI, w2_eHI[e], _of(b2_eH, e), starts_e),)

    return _by_blocks(compute, expert_starts_e, a_PI)[0]


def down_projection_backward(
    do_RH: Tensor,
    w2_eHI: Tensor,
    b2_eH: Tensor | None,
    h_PJ: Tensor,
    weights_P: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    *,
    reserve_for: ReserveFor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See reference.py."""

    def compute(e: slice, starts_e: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        return reference.down_projection_backward(do_RH, w2_eHI[e], _of(b2_eH, e), *rows, starts_e, activation)

    dh_PJ, scaled_a_PI, ds_PZ = _by_blocks(compute, expert_starts_e, h_PJ, weights_P, row_of_pair_P)
    return dh_PJ, scaled_a_PI, ds_PZ


def up_projection_backward(
    dh_PJ: Tensor,
    w1: Tensor,
    expert_starts_e: Tensor,
    up_eIH: Tensor | None = None,
    *,
    tile_aligned: bool = False,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """See reference.py."""

    def compute(e: slice, starts_e: Tensor, dh_PJ: Tensor) -> tuple[Tensor, ...]:
        return (reference.up_projection_backward(dh_PJ, w1[e], starts_e, _of(up_eIH, e)),)

    return _by_blocks(compute, expert_starts_e, dh_PJ)[0]


def _of(values: Tensor | None, e: slice) -> Tensor | None:
    return None if values is None else values[e]


def _by_blocks(
    compute: Callable[..., tuple[Tensor, ...]], expert_starts_e: Tensor, *rows_P: Tensor
) -> tuple[Tensor, ...]:
    """Returns the joined results of `compute(e, starts_e, *block)` for each block: of the expert that `e` selects."""
    block, starts = rows_of_block(rows_P[0]), expert_starts_e.tolist()
    whole, found = expert_starts_e.new_tensor([0, block]), []
    for expert, (first, last) in enumerate(itertools.pairwise(starts)):
        for start in range(first, last, block):
            end = min(start + block, last)
            results = compute(slice(expert, expert + 1), whole, *(padded(each[start:end]) for each in rows_P))
            found.append([each[: end - start] for each in results])
    if not found:
        return compute(slice(0, 1), whole.zero_(), *rows_P)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
