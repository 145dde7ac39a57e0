"""`Experts`: the weights of the local experts. Their initial values depend on the seed only, not on ep_size.

Legend: E experts, e local experts, d hidden size, n expert width, J pre-activation columns (2I if gated else I).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sonic_ep.checkpoint.optimizers import register
from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup
from sonic_ep.initialization import draw, drawn_in_threads, fill, rng_for
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights

_HELD = "experts"  # in the metadata of a state dict: the first expert, their number, and the number of all


@final
class Experts(nn.Module):
    """The parameters of this rank's experts, r * e to (r + 1) * e - 1 on rank r of the group.

    w1: (e, J, d), gate and up rows interleaved if gated. w2: (e, d, n). b1: (e, J), b2: (e, d), with config.bias.

    All parameters have the attribute `allreduce = False`, which Megatron-Core and DeepSpeed read: their gradients are
    complete over the EP group and must not be averaged over it. `ep_group_name` names that group, for clip_grad_norm_
    (optim.py).

    A state dict holds DTensors of all experts, on the memory of the parameters (checkpoint/expert_states.py), if there
    are several ranks. load_state_dict takes them, plain tensors of all experts, and plain tensors of this rank's. The
    metadata of a state dict says whose experts it holds, so that the state of one rank is not loaded on another.
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
        self.group, self.E = group, config.E
        self.num_local = config.E // group.size
        self.ep_group_name = group.name
        self.first = group.rank * self.num_local
        # The ranks of the EP groups over which FSDP shards these experts (fsdp.py), a list for each group.
        self.sharded_over: list[list[int]] = []
        self.sharded_parameters: list[nn.Parameter] = []  # while FSDP has gathered them, the module has others
        self._known_ddp = 0  # the id of a DistributedDataParallel that leaves these experts alone
        self._held = self.first, self.num_local, config.E
        J = 2 * config.n if activation_named(config.activation).gated else config.n

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(self.num_local, *shape, device=device, dtype=dtype))

        self.w1, self.w2 = parameter(J, config.d), parameter(config.d, config.n)
        self.b1 = parameter(J) if config.bias else None
        self.b2 = parameter(config.d) if config.bias else None
        mark_experts(self)
        register(self)
        self.register_state_dict_post_hook(_hand_out)
        self.register_load_state_dict_post_hook(mark_experts)

    # to_empty, deepcopy and load_state_dict with assign=True make new parameters without the attributes.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        mark_experts(self)
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        register(self)
        mark_experts(self)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads this rank's part, or nothing and says why in error_msgs."""
        arguments = prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():  # now, because FSDP's shards the parameters that it has gathered
            hook(state_dict, *arguments)
        saved = state_dict.pop(f"{prefix}_extra_state", None)  # an older state dict says there whose experts it holds
        held = local_metadata.get(_HELD) if saved is None else saved
        if isinstance(held, Tensor) and not held.is_meta:
            held = held.tolist()
        problem = _problem_with_held(prefix, held) or self._problem_with_state(
            state_dict, prefix, held, assign="assign_to_params_buffers" in local_metadata
        )
        if problem is not None:
            error_msgs.append(problem)
            return
        self._load_state_dict_pre_hooks = OrderedDict()
        try:
            super()._load_from_state_dict(state_dict, *arguments)
        finally:
            self._load_state_dict_pre_hooks = hooks

    def _problem_with_state(
        self, state_dict: dict[str, object], prefix: str, held: object, *, assign: bool
    ) -> str | None:
        """Replaces tensors by this rank's part of them. Returns a problem, or None.

        held: what `_held` was on the rank that saved, if that is known. assign: the tensors become parameters.
        """
        another = held if isinstance(held, Sequence) and tuple(held) != self._held else None
        if self.group.size == 1 and another is None:
            return None
        from sonic_ep.checkpoint.expert_states import is_part, of_rank

        own = {f"{prefix}{name}": value for name, value in (*self.named_parameters(), *self.named_buffers())}
        values = {key: value for key, value in state_dict.items() if key in own and isinstance(value, Tensor)}
        if another is not None and any(is_part(self, value, own[key]) for key, value in values.items()):
            return (
                f"{prefix.removesuffix('.')} holds {_described(*another)}, this rank has {_described(*self._held)}: "
                "load on each rank what the same rank saved, or use sonic_ep.checkpoint, which any ep_size can read"
            )
        if self.group.size == 1:
            return None
        try:
            parts = {key: of_rank(self, key, value, own[key]) for key, value in values.items()}
        except ValueError as error:
            return str(error)
        # A view would keep the tensor of all experts.
        state_dict.update({key: part.clone() if assign and part._is_view() else part for key, part in parts.items()})
        return None

    def forward(self, dtype: torch.dtype | None = None) -> ExpertWeights:
        """Returns the parameters for the kernels, cast to `dtype` if given. Differentiable."""

        def cast(weight: Tensor) -> Tensor:
            return weight if dtype is None else weight.to(dtype)

        b1, b2 = self.b1, self.b2
        return ExpertWeights(
            cast(self.w1), cast(self.w2), None if b1 is None else cast(b1), None if b2 is None else cast(b2)
        )

    @property
    def is_sharded(self) -> bool:
        """True while FSDP holds shards of the parameters."""
        return hasattr(self.w1, "placements")

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


def mark_experts(experts: Experts, *_: object) -> None:
    """Sets the attributes of parameters of `Experts`, which whoever replaces them must call."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
        parameter.ep_group_name = experts.ep_group_name  # pyright: ignore[reportAttributeAccessIssue]
    if experts.sharded_over:
        experts.sharded_parameters = [*experts.parameters()]


def _hand_out(experts: Experts, state_dict: dict[str, object], prefix: str, local_metadata: dict[str, object]) -> None:
    """Replaces tensors of a state dict by DTensors of all experts. Parameters, with keep_vars=True, remain."""
    local_metadata[_HELD] = experts._held
    if experts.group.size == 1:
        return
    from sonic_ep.checkpoint.expert_states import of_all

    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state_dict[key] = of_all(experts, key, value)


def _problem_with_held(prefix: str, held: object) -> str | None:
    is_sequence = isinstance(held, list | tuple) and len(held) == 3 and all(type(number) is int for number in held)
    if held is None or is_sequence:
        return None
    return (
        f"{prefix}_extra_state or its metadata says {str(held):.60} of whose experts the state dict holds, wanted the "
        "first expert, their number and the number of all: use another state dict, or remove the entry"
    )


def _described(first: int, number: int, E: int) -> str:
    return f"experts {first}..{first + number - 1} of {E}"
