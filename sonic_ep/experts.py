"""`Experts`: the weights of the local experts. Their initial values depend on the seed only, not on ep_size.

Legend: E experts, e local experts, d hidden size, n expert width, J pre-activation columns (2I if gated else I).
"""

from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup
from sonic_ep.initialization import draw, drawn_in_threads, fill, rng_for
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights


@final
class Experts(nn.Module):
    """The parameters of this rank's experts, r * e to (r + 1) * e - 1 on rank r of the group.

    w1: (e, J, d), gate and up rows interleaved if gated. w2: (e, d, n). b1: (e, J), b2: (e, d), with config.bias.

    All parameters have the attribute `allreduce = False`, which Megatron-Core and DeepSpeed read: their gradients are
    complete over the EP group and must not be averaged over it. `ep_group_name` names that group, for clip_grad_norm_
    (optim.py).

    A state dict also says which experts it holds, as `_extra_state`, so that the state of one rank is not loaded on
    another: names and shapes are the same on all ranks.
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
        self.ep_group_name = group.name
        self.first = group.rank * self.num_local
        # The ranks of the EP groups over which FSDP shards these experts (fsdp.py), a list for each group.
        self.sharded_over: list[list[int]] = []
        self._known_ddp = 0  # the id of a DistributedDataParallel that leaves these experts alone
        self._held = self.first, self.num_local, config.E
        J = 2 * config.n if activation_named(config.activation).gated else config.n

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(self.num_local, *shape, device=device, dtype=dtype))

        self.w1, self.w2 = parameter(J, config.d), parameter(config.d, config.n)
        self.b1 = parameter(J) if config.bias else None
        self.b2 = parameter(config.d) if config.bias else None
        mark_experts(self)
        self.register_load_state_dict_post_hook(mark_experts)

    # to_empty, deepcopy and load_state_dict with assign=True make new parameters without the attributes.

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        mark_experts(self)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        mark_experts(self)

    def get_extra_state(self) -> Tensor:
        """Returns the first expert of this rank, their number, and that of all experts."""
        return torch.tensor(self._held, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Accepts the state, which _load_from_state_dict has compared."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}_extra_state"
        held = state_dict.get(key)
        if held is not None and tuple(held.tolist()) != self._held:
            error_msgs.append(
                f"{prefix.removesuffix('.')} holds {_described(*held.tolist())}, this rank has "
                f"{_described(*self._held)}: load on each rank what the same rank saved, or use sonic_ep.checkpoint, "
                "which any ep_size can read"
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:  # an older state dict, without this entry
            missing_keys.remove(key)

    def forward(self, dtype: torch.dtype | None = None) -> ExpertWeights:
        """Returns the parameters for the kernels, cast to `dtype` if given. Differentiable."""

        def cast(weight: Tensor) -> Tensor:
            return weight if dtype is None else weight.to(dtype)

        b1, b2 = self.b1, self.b2
        return ExpertWeights(
            cast(self.w1), cast(self.w2), None if b1 is None else cast(b1), None if b2 is None else cast(b2)
        )

    def problem_with_sharding(self, *, shared: bool = False) -> str | None:
        """Returns a problem if a wrapper such as FSDP has replaced the parameters, or None.

        FSDP would shard and gather each parameter as if it were the same on all ranks. Its parameters are DTensors or
        lack `allreduce = False`. shared: True if all ranks have the same experts, as with ep_size = 1. Then, or if it
        knows which ranks do (sharded_over), FSDP may shard them. It must have gathered them before the layer runs, so
        only a DTensor is a problem.
        """
        shared = shared or bool(self.sharded_over)
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
                    "experts of its own: use sonic_ep.fsdp.fully_shard or leave them out of fully_shard "
                    "(docs/data_parallel.md), and set allreduce = False on a parameter of yours"
                )
        return None

    def problem_with_ddp(self, group: EPGroup) -> str | None:
        """Returns a problem if the DistributedDataParallel that is running treats these experts as its own, or None.

        It gave all its ranks the weights of its first one when it was constructed, and averages gradients over them.
        """
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is None or id(ddp) == self._known_ddp or group.size == 1:
            return None
        owned = {id(parameter) for parameter in ddp._module_parameters}
        ranks = set(dist.get_process_group_ranks(ddp.process_group))
        names = [f"experts.{name}" for name, value in self.named_parameters() if id(value) in owned]
        if not names or len(ranks & set(dist.get_process_group_ranks(group.process_group))) == 1:
            self._known_ddp = id(ddp)
            return None
        return (
            f"DistributedDataParallel over ranks {sorted(ranks)} manages {', '.join(names)}, and has given all of them "
            "the experts of one: build the model again, and exclude its experts before it is wrapped "
            "(docs/data_parallel.md)"
        )

    @torch.no_grad()
    def initialize(self, seed: int, std: float) -> None:
        """Sets weights to normal(0, std), biases to zero. The values depend only on seed and global expert index."""
        if self.w1.is_meta:
            return
        weights = self.w1, self.w2
        # A DTensor is filled as a whole, because a single expert of it cannot be written to.
        wholes = [torch.empty(w.shape, device="cpu") if hasattr(w, "placements") else w for w in weights]

        def draw_expert(local: int) -> list[Tensor]:
            generator = rng_for(seed, self.first + local)
            return [draw(whole.shape[1:], generator) for whole in wholes]

        for local, drawn in enumerate(drawn_in_threads(draw_expert, self.num_local)):
            for whole, values in zip(wholes, drawn, strict=True):
                whole[local].copy_(values * std)
        for weight, whole in zip(weights, wholes, strict=True):
            if whole is not weight:
                fill(weight, whole)
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()


def mark_experts(experts: nn.Module, *_: object) -> None:
    """Sets the attributes of parameters of `Experts`, which whoever replaces them must call."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.ep_group_name = experts.ep_group_name  # type: ignore[attr-defined]


def _described(first: int, number: int, E: int) -> str:
    return f"experts {first}..{first + number - 1} of {E}"
