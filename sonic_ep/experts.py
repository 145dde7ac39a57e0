"""`Experts`: the weights of the local experts, equal for every ep_size from one seed.

Legend: E experts, e local experts, d hidden size, n expert width, J pre-activation columns (2I if gated else I).
"""

from typing import Any, Self, final

import torch
from torch import Tensor, nn

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup
from sonic_ep.initialization import fill, fill_normal, rng_for
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights


@final
class Experts(nn.Module):
    """w1 (e, J, d), gate and up rows interleaved; w2 (e, d, n); with config.bias also b1 (e, J), b2 (e, d).

    Rank r of the group holds experts r * e to (r + 1) * e - 1. All parameters carry `allreduce = False`, the mark that
    Megatron-Core and DeepSpeed know: their gradient is complete over the EP group and must not be averaged over it.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: EPGroup,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_local = config.E // group.size
        self.first = group.rank * self.num_local
        J = 2 * config.n if activation_named(config.activation).gated else config.n

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(self.num_local, *shape, device=device, dtype=dtype))

        self.w1, self.w2 = parameter(J, config.d), parameter(config.d, config.n)
        self.b1 = parameter(J) if config.bias else None
        self.b2 = parameter(config.d) if config.bias else None
        _mark(self)
        self.register_load_state_dict_post_hook(_mark)

    # What makes new parameters (to_empty, deepcopy, load_state_dict with assign=True) loses the mark of the old ones.

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _mark(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _mark(self)

    def forward(self, dtype: torch.dtype | None = None) -> ExpertWeights:
        """The parameters as the kernels take them; in `dtype` if given (a differentiable cast)."""

        def cast(weight: Tensor) -> Tensor:
            return weight if dtype is None else weight.to(dtype)

        b1, b2 = self.b1, self.b2
        return ExpertWeights(
            cast(self.w1), cast(self.w2), None if b1 is None else cast(b1), None if b2 is None else cast(b2)
        )

    def problem_with_sharding(self, *, shared: bool = False) -> str | None:
        """Has a wrapper put parameters of its own in place of these, as FSDP does, which gathers each as if all ranks
        had parts of one? They are not marked, or DTensors. shared: all ranks have the same experts, as with one rank a
        group; then a DTensor is what somebody was to gather before the layer runs, and has not."""
        for name, value in self.named_parameters(recurse=bool(self._modules)):
            sharded = hasattr(value, "placements")
            if shared and sharded:
                return (
                    f"experts.{name} is sharded while the layer computes: give fully_shard the layer or its block, "
                    "not its experts alone"
                )
            if not shared and (sharded or getattr(value, "allreduce", True)):
                return (
                    f"experts.{name} is managed as if it were the same on all ranks, but each rank of the EP group has "
                    "experts of its own: leave them out of fully_shard (docs/data_parallel.md), and set allreduce = "
                    "False on a parameter of yours"
                )
        return None

    @torch.no_grad()
    def initialize(self, seed: int, std: float) -> None:
        """normal(0, std) weights, zero biases; expert number and seed alone decide an expert's values."""
        if self.w1.is_meta:
            return
        weights = self.w1, self.w2
        # A DTensor is filled as a whole: an expert of it is none that could be written to.
        wholes = [torch.empty(w.shape, device="cpu") if hasattr(w, "placements") else w for w in weights]
        for local in range(self.num_local):
            generator = rng_for(seed, self.first + local)
            for whole in wholes:
                fill_normal(whole[local], std, generator)
        for weight, whole in zip(weights, wholes, strict=True):
            if whole is not weight:
                fill(weight, whole)
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()


def _mark(experts: nn.Module, *_: object) -> None:
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
