"""`clip_grad_norm_`, `parameter_groups` and `Muon`: what an optimizer must know of experts.

Their weights are on other ranks, so a norm of the gradients that one rank has is no norm of the model's. Their biases
have two dimensions, so "weights of two dimensions decay" would be wrong of them. Their weights have three, and each
expert's is a matrix by itself.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple, TypedDict, Unpack, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from sonic_ep.experts import Experts
from sonic_ep.groups import EPGroup


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients, in place, so that their norm over all ranks is at most max_norm. Returns the norm before.

    torch's function of that name with the same arguments, for parameters of which some are experts, or DTensors of
    several meshes. Each weight counts once, wherever it is. Gradients must be what the optimizer takes: averaged by
    now, unless `fully_shard` does it. A collective of the ranks that have the model, with the same parameters on all.

    norm_type: any above 0, and inf. foreach: False for a kernel of its own for each gradient. Result: () on the first
    parameter's device, fp64 if a gradient is, else fp32; the same bits on all ranks.

    Raises, on every rank, ValueError for another norm_type, or for a parameter marked `allreduce = False` without an
    `ep_group_name`; RuntimeError if error_if_nonfinite and the norm is not finite.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not above 0: give 2.0, 1.0 or inf")
    if not parameters:
        return torch.tensor(0.0)
    lists = foreach is not False
    by_place: dict[_Place, list[Tensor]] = {}  # of all parameters: a rank without some gradient calls what others call
    for parameter in parameters:
        by_place.setdefault(_Place.of(parameter), []).append(parameter)
    device = parameters[0].device
    norms = [_norm_over_ranks(place, given, norm_type, lists).to(device) for place, given in by_place.items()]
    grads = [_local(each.grad) for each in parameters if each.grad is not None]
    fine = any(grad.dtype is torch.float64 for grad in grads)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(torch.float64 if fine else torch.float32)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of all gradients is {float(total)}, so they cannot be clipped: skip the "
            "step, or give error_if_nonfinite=False to scale by it anyway"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for tensors in _alike(grads):
        own = scale.to(tensors[0].device)
        if lists:
            torch._foreach_mul_(tensors, own)
        else:
            for tensor in tensors:
                tensor.mul_(own)
    return total


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the trained parameters of `module` in groups for an optimizer of torch.

    Weights of two and more dimensions get weight_decay. Others, and all biases, get 0: biases of experts have two
    dimensions, (e, J) and (e, d). A group is of one device mesh, as torch's fused and foreach optimizers want it.
    """
    layers = [each for each in module.modules() if isinstance(each, Experts)]
    of_experts = {id(bias) for experts in layers for bias in (experts.b1, experts.b2)}
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() > 1 and id(parameter) not in of_experts and not name.endswith("bias")
            groups.setdefault((decays, getattr(parameter, "device_mesh", None)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in groups.items()
    ]


class MuonOptions(TypedDict, total=False):
    """Of torch.optim.Muon."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None


@final
class Muon(torch.optim.Muon):
    """torch's Muon for weights (m, n), and for stacks (e, m, n): each matrix of a stack is a weight of its own.

    Each expert gets, to the bit, what torch.optim.Muon does with the expert's weight alone. Gate and up rows of an
    expert are one matrix. EP and FSDP2 give a rank whole experts, so a step sends nothing for them. For a DTensor
    (m, n) torch gathers what it multiplies.

    params: without embeddings, heads, routers, norms and biases, which belong to AdamW. options: of
    torch.optim.Muon. State: `momentum_buffer`, of the parameter's shape.

    Raises ValueError, on every rank, for a parameter of another number of dimensions, for a bias of `Experts`, and for
    a stack that is sharded along another dimension than its first, because the shards cut the matrices.
    """

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, object]], **options: Unpack[MuonOptions]
    ) -> None:
        super().__init__([{"params": []}], **options)  # torch refuses three dimensions there, and not when one adds
        self.param_groups.clear()
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        for group in cast(list[dict[str, object]], groups):
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        super().add_param_group(param_group)
        problems = (_problem_with_matrices(parameter) for parameter in self.param_groups[-1]["params"])
        if (problem := next(filter(None, problems), None)) is not None:
            self.param_groups.pop()
            raise ValueError(problem)

    def _init_group(
        self,
        group: MutableMapping,
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        muon_momentum_bufs: list[Tensor],
    ) -> bool:
        """Fills the lists of what torch's step updates in place, with the matrices of a stack one by one."""
        for parameter in group["params"]:
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:  # partial sums
                parameter.grad = grad.redistribute(placements=parameter.placements)
        found: tuple[list[Tensor], ...] = [], [], []
        is_complex = super()._init_group(group, *found)
        for tensors, matrices in zip(found, (params_with_grad, grads, muon_momentum_bufs), strict=True):
            for tensor in tensors:
                matrices.extend(_local(tensor).unbind() if tensor.dim() == 3 else [tensor])
        return is_complex


def _problem_with_matrices(parameter: Tensor) -> str | None:
    """Returns why Muon cannot take a parameter, or None."""
    shape = tuple(parameter.shape)
    if parameter.dim() not in (2, 3):
        return f"Muon takes weights (m, n) and stacks (e, m, n), not a parameter of shape {shape}: give it to AdamW"
    if parameter.dim() == 2 and hasattr(parameter, "ep_group_name"):
        return f"a parameter of shape {shape} has a bias of each expert, and Muon takes matrices: give it to AdamW"
    if isinstance(parameter, DTensor) and parameter.dim() == 3:
        sizes = parameter.device_mesh.shape
        dims = [getattr(each, "dim", 0) for each, size in zip(parameter.placements, sizes, strict=True) if size > 1]
        if any(dim % 3 for dim in dims):
            return (
                f"a stack of matrices of shape {shape} is sharded by {tuple(parameter.placements)}, which cuts the "
                "matrices, and Muon needs them whole: shard dim 0, or give it to AdamW"
            )
    return None


class _Place(NamedTuple):
    """Which ranks have parts of a weight. mesh, placements: of a DTensor. ep_group_name: of experts, else empty."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    ep_group_name: str

    @classmethod
    def of(cls, parameter: Tensor) -> "_Place":
        name = getattr(parameter, "ep_group_name", None)
        if name is None and not getattr(parameter, "allreduce", True):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has allreduce = False, so each rank has experts of its "
                "own, and no group that divides them: set its attribute ep_group_name to layer.group.name"
            )
        if isinstance(parameter, DTensor):
            return cls(parameter.device_mesh, tuple(parameter.placements), name or "")
        return cls(None, (), name or "")

    def groups(self) -> list[EPGroup]:
        """The groups over which a norm is summed up, one after the other."""
        sharded = [dim for dim, placement in enumerate(self.placements) if placement.is_shard()]
        own = [] if self.mesh is None else [EPGroup(self.mesh.get_group(dim)) for dim in sharded]
        return [*own, EPGroup.named(self.ep_group_name)]


def _norm_over_ranks(place: _Place, parameters: list[Tensor], norm_type: float, lists: bool) -> Tensor:
    """Returns the norm of the gradients over all ranks: () fp64.

    Every rank gathers and adds in rank order, so that all have the same bits.
    """
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != place.placements:  # partial sums, of tensor parallelism
            grad = grad.redistribute(placements=place.placements)
        if grad is not None:
            grads.append(_local(grad))
    device = parameters[0].device if place.mesh is None else torch.device(place.mesh.device_type)
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for tensors in _alike([grad for grad in grads if grad.numel()]):
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        if lists:
            of_each = torch._foreach_norm(tensors, norm_type, dtype=dtype)
        else:
            of_each = tuple(torch.linalg.vector_norm(tensor, norm_type, dtype=dtype) for tensor in tensors)
        norms.append(torch.stack(of_each).to(norms[0]))
    norm = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    for group in place.groups():
        norm = torch.linalg.vector_norm(group.all_gather(norm, stage="the norm of gradients"), norm_type)
    return norm


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _alike(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Returns the tensors in lists of one device and dtype each, which torch's kernels over lists take."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(lists.values())
