"""`LinearInBlocks`: the router's linear layer with the same bits for a token whatever other tokens there are.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import functools
from dataclasses import dataclass
from typing import final

from torch import Tensor

from sonic_ep.kernels.batch_invariant.blocks import by_blocks
from sonic_ep.kernels.program.trace import by_torch
from sonic_ep.kernels.route.interface import RouterLinear
from sonic_ep.kernels.route.linear import reference


@final
@dataclass(frozen=True, slots=True)
class LinearInBlocks:
    """A RouterLinear whose logits and gradient of x are those of `operations` on blocks of rows.

    operations: the kernels, whose logits need no blocks, or the reference. The gradient of the weight is theirs: a sum
    over tokens. Other than in the reference, dx_others_TH may have another dtype than the weight.
    """

    operations: RouterLinear

    def logits(self, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
        """See RouterLinear."""
        if self.operations is not reference:
            return self.operations.logits(x_TH, weight_EH, bias_E)
        return by_blocks(lambda x_TH: reference.logits(x_TH, weight_EH, bias_E), x_TH)

    def gradients(
        self,
        dlogits_TE: Tensor,
        x_TH: Tensor,
        weight_EH: Tensor,
        *,
        of_x: bool,
        of_weight: bool,
        dx_others_TH: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See RouterLinear."""
        _, dweight_EH = self.operations.gradients(dlogits_TE, x_TH, weight_EH, of_x=False, of_weight=of_weight)
        if not of_x:
            return None, dweight_EH
        operands = dlogits_TE, x_TH, weight_EH, *([] if dx_others_TH is None else [dx_others_TH])
        compute = functools.partial(_gradient_of_x, self.operations)
        return by_torch(compute, tuple(x_TH.shape), x_TH.dtype, *operands), dweight_EH


def _gradient_of_x(
    operations: RouterLinear, dlogits_TE: Tensor, x_TH: Tensor, weight_EH: Tensor, *others_TH: Tensor
) -> Tensor:
    adds = operations is not reference or weight_EH.dtype == x_TH.dtype

    def compute(dlogits_TE: Tensor, x_TH: Tensor, *others_TH: Tensor) -> Tensor:
        into = others_TH[0] if others_TH and adds else None
        dx_TH, _ = operations.gradients(dlogits_TE, x_TH, weight_EH, of_x=True, of_weight=False, dx_others_TH=into)
        assert dx_TH is not None
        return others_TH[0] + dx_TH if others_TH and not adds else dx_TH

    return by_blocks(compute, dlogits_TE, x_TH, *others_TH)
