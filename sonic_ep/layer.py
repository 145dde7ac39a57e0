"""`MoE`: the layer. It routes, dispatches, computes and combines, and adds a shared expert.

Legend: T tokens on this rank, H hidden size.
"""

import json
import math
import operator
from collections import Counter
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.autocast import autocast_dtype
from sonic_ep.checks import problem_with_input, problem_with_memory, problem_with_tensor
from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.bounded_steps import LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.experts import Experts
from sonic_ep.functional import moe
from sonic_ep.graph.modules import new_key
from sonic_ep.groups import EPGroup
from sonic_ep.initialization import rng_for
from sonic_ep.kernels.backend import start_compiling
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.route.status.reference import MAX_LAYER
from sonic_ep.routers.count_exchange import DTYPES
from sonic_ep.routers.given_routing import NOTHING_GIVEN, GivenRouting, add_to_records, recording
from sonic_ep.routers.replay import refuse_new_numbers, repeated_pairs
from sonic_ep.routers.rounding import max_received, max_rows
from sonic_ep.routers.router import Router
from sonic_ep.routers.stats import RoutingStats
from sonic_ep.routing import AsyncSplitSizes, BalanceCounts, GroupCounts, RoutedPairs, SplitSizes
from sonic_ep.shared_expert import SharedExpert
from sonic_ep.steps.experts_step import RunsAs
from sonic_ep.steps.layer_in_graph import moe_layer
from sonic_ep.steps.program_steps import ProgramSteps
from sonic_ep.transports import bounded_transport, steps_of, transport_for

_ROUTER_RNG, _SHARED_RNG = -1, -2
# For y, in place of a view: a caller who changes a view in place loses the hooks that FSDP has put on it.
_unsafe_view = torch.ops.aten._unsafe_view
_NUM_BUILT: Counter[str] = Counter()  # layers, by the name of their group
_NO_TRANSFORMS = (
    "an MoE layer does not run under transforms of torch.func (grad, vmap, jvp and what is built on them); "
    "use torch.autograd.grad, and a batch as (B, L, d)"
)
_MAX_NUMBER = MAX_LAYER // 2 - 1  # a status word has twice the number, plus 1 with a backward


class MoEOutput(NamedTuple):
    """The result of `MoE`.

    y: like x. aux_loss: (), the weighted sum of load-balancing loss and z-loss; add it to the model's loss. stats: see
    RoutingStats.
    """

    y: Tensor
    aux_loss: Tensor
    stats: RoutingStats


_Computed = tuple[MoEOutput, RoutedPairs]


@final
class MoE(nn.Module):
    """An expert-parallel Mixture-of-Experts layer with distributed token rounding.

    config: see MoEConfig. group: the EP group; default: this rank alone. Every rank of the group must construct the
    layer with the same config.
    seed: determines the initial weights, for every ep_size alike. Default: drawn from torch's default generator on the
    group's first rank.
    device: of all weights. dtype: of the weights of experts and shared expert, and the dtype that x must have. The
    router's weights are fp32.

    In training mode the layer rounds counts as config.rounding says. In eval mode it is plain top-K.

    Raises ValueError, on every rank, if E is not a multiple of ep_size, if the router may give a token experts on more
    than router.hosts_per_token hosts, if config, seed or dtype differ between ranks, or if a rank does not have the
    device or support the dtype; TypeError, on every rank, for a config, seed, device or dtype of another type.
    TypeError for another group. LostRankError if a rank does not come. Sets group.timeout.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: EPGroup | None = None,
        *,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (group is None or isinstance(group, EPGroup)):
            raise TypeError(f"group is a {type(group).__name__}, wanted an EPGroup: EPGroup(process_group) wraps one")
        self.config = config
        self.group = group or EPGroup.alone()
        if isinstance(config, MoEConfig):
            self.group.timeout = config.transport.timeout
        self.group.enter_layer(_NUM_BUILT[self.group.name] + 1)
        problem = _problem_with_types(config, seed, device, dtype)
        self.group.raise_together(problem, error=TypeError, stage="construction")
        problem = _problem_with_device(device) or _problem_with_dtype(dtype)
        self.group.raise_together(problem, stage="construction")
        seed, self._number = _agreed_seed_and_number(config, self.group, seed, dtype)
        _check_hosts(config, self.group)
        self.router = Router(config, device=device)
        self.experts = Experts(config, self.group, device=device, dtype=dtype)
        start_compiling(self.experts.w2, config.activation, bias=config.bias)
        self.shared = SharedExpert(config, device=device, dtype=dtype) if config.shared_n else None
        self.transport = transport_for(self.group, config.transport)
        self._programs = ProgramSteps(_again, steps_of(self.group, self.transport, _layer_transport), config.K)
        self._shapes = {name: weight.shape for name, weight in (*self.named_parameters(), *self.named_buffers())}
        self._key = new_key(self)
        self.initialize(seed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = new_key(self)

    @property
    def num_programs(self) -> int:
        """The number of programs that steps run as."""
        return self._programs.num_programs

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fills every weight from `seed`. The values do not depend on ep_size or device."""
        std = self.config.init_std
        self.experts.initialize(seed, std)
        self.router.initialize(std, rng_for(seed, _ROUTER_RNG))
        if self.shared is not None:
            self.shared.initialize(std, rng_for(seed, _SHARED_RNG))

    def forward(self, x: Tensor, routed_experts: Tensor | None = None, padding_mask: Tensor | None = None) -> MoEOutput:
        """Applies the layer. A collective: every rank of the group calls it, in the same order and the same mode.

        Shapes:  x (T, d) or (B, L, d) in the dtype of the expert weights, or any floating dtype under autocast. y has
                 the shape of x. T may be 0. It may differ between ranks, except in training with static buffers.
        Given:   routed_experts (T, K) or (B, L, K) and padding_mask (T,) or (B, L), see `GivenRouting`.
        Raises:  ValueError, on every rank, if on any rank x or a weight has a wrong shape, dtype, device or strides,
                 routed_experts or padding_mask a wrong shape, dtype or value, FSDP has sharded the experts, padding
                 meets router.balance="sequence", or (router.check_logits) logits are not finite; if training mode, the
                 use of routed_experts in it, dtype or order of backwards differ between ranks; under a transform of
                 torch.func, which on one rank is a RuntimeError. RuntimeError if a rank is lost (docs/failures.md).
        """
        if torch.compiler.is_dynamo_compiling():
            if routed_experts is None and padding_mask is None and not self.experts.is_sharded:
                return self._in_graph(x)
            return self._in_eager_mode(x, routed_experts, padding_mask)
        if _is_transformed():
            self._refuse_transforms()
        if routed_experts is None and padding_mask is None:
            return self._counted(self._output(x))
        return self._output_of_given(x, routed_experts, padding_mask)

    @_disable_dynamo
    def _in_eager_mode(self, x: Tensor, *given: Tensor | None) -> MoEOutput:
        return self.forward(x, *given)

    def _in_graph(self, x: Tensor) -> MoEOutput:
        """Calls the layer as one operation of a compiled graph."""
        problem = problem_with_tensor("x", x)
        c, x = self.config, x if problem is None else self.experts.w1.new_empty(0, self.config.d)
        T, ep_size = math.prod(x.shape[:-1]), self.group.size
        most = max_rows(c.rounding, T, c.K, c.E, ep_size, training=self.training)
        sizes = ep_size, c.E, T * c.K if most is None else most
        constants = self._key, [*self.buffers()], self._autocast_dtype(), problem
        return _output_of(moe_layer([x, *self.parameters()], sizes, *constants))

    def _of_graph(self, x: Tensor, problem: str | None) -> MoEOutput:
        """Computes an operation of a compiled graph."""
        if self.training and (self.config.rounding.draws_numbers or self.config.router.jitter):
            refuse_new_numbers()
        return self._counted(self._output(x, NOTHING_GIVEN if problem is None else GivenRouting(problem=problem)))

    @_disable_dynamo
    def _output_of_given(self, x: Tensor, routed_experts: Tensor | None, padding_mask: Tensor | None) -> MoEOutput:
        config, given = self.config, NOTHING_GIVEN
        if _has_rows(x):  # else the layer raises
            ragged = config.router.balance != "sequence"
            given = GivenRouting.of(x, routed_experts, padding_mask, E=config.E, K=config.K, ragged=ragged)
        output = self._output(x if given.rows_T is None else given.take(_rows_of(x)), given)
        if given.rows_T is not None:
            output = output._replace(y=_unsafe_view(given.put(output.y), x.shape))
        return self._counted(output)

    def _counted(self, output: MoEOutput) -> MoEOutput:
        self.router.count_in_backward(output.y, output.stats.counts)
        return output

    def _output(self, x: Tensor, given: GivenRouting = NOTHING_GIVEN) -> MoEOutput:
        """Returns the output for the rows of x that are no padding."""
        if not self._may_run_programs(x):
            output, routed_pairs = self._compute(x, None, given)
        else:
            self.group.enter_layer(self._number)
            only_code = given.expert_ids_TK is not None or given.problem is not None or recording()
            outputs = self._programs.outputs(self, x, only_code=only_code)
            if outputs is not None:
                return _output_of(outputs)
            output, routed_pairs = self._compute(x, self._programs.runs_as(self), given)
            self._programs.observe(routed_pairs.split_sizes)
        if recording():
            shape = x.shape[:-1] if given is NOTHING_GIVEN else given.shape
            add_to_records(self, routed_pairs.topk_ids_TK, shape, given)
        return output

    def _refuse_transforms(self) -> None:
        """Raises RuntimeError on one rank; else ValueError on every rank, as for bad input."""
        if self.group.size == 1:
            raise RuntimeError(_NO_TRANSFORMS)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            self.forward(cast(Tensor, _Transformed()))

    def _may_run_programs(self, x: Tensor) -> bool:
        """Returns the same on every rank."""
        if not self.config.record_launches:
            return False
        return not isinstance(x, Tensor) or host_may_wait(x)

    def _compute(self, x: Tensor, runs_as: RunsAs | None, given: GivenRouting = NOTHING_GIVEN) -> _Computed:
        """Routes, dispatches, computes and combines. The last three are `moe`, which has one backward for them."""
        x, weights, problem = self._checked(x, given.problem)
        x_TH, shared = _rows_of(x), self.shared
        shared_TH: list[Tensor] = []
        routed = self.router(
            x_TH,
            group=self.group,
            sequence_length=x.shape[1] if x.dim() == 3 else x.shape[0],
            problem=problem,
            exchange=self.transport,
            meanwhile=None if shared is None or problem is not None else lambda: shared_TH.append(shared(x_TH)),
            layer=self._number,
            needs_backward=self._needs_backward(x_TH),
            expert_ids_TK=given.expert_ids_TK,
        )
        y_TH = moe(
            routed.x_TH,
            routed.routing,
            *(weights.w1, weights.w2_eHI, weights.b1_eJ, weights.b2_eH),
            transport=self.transport,
            group=self.group,
            activation=self.config.activation,
            save_dispatched=self.config.save_dispatched,
            runs_as=runs_as,
        )
        if shared_TH:
            y_TH = y_TH + shared_TH[0]
        return MoEOutput(_unsafe_view(y_TH, x.shape), routed.aux_loss, routed.stats()), routed.routed_pairs

    def _checked(self, x: Tensor, problem: str | None = None) -> tuple[Tensor, ExpertWeights, str | None]:
        """Returns x and the expert weights, in the dtype of autocast if it is on, and this rank's problem, or None.

        problem: of this rank, if one is known already. With a problem, x is empty: the router sends the problem to all
        ranks, and every rank raises it.
        """
        dtype = self._autocast_dtype()
        problem = problem or self.experts.problem_with_sharding(shared=self.group.size == 1)
        problem = problem or self.experts.problem_with_ddp(self.group)
        weights = self.experts(dtype)
        start_compiling(weights.w2_eHI, self.config.activation, bias=self.config.bias)
        if dtype is not None and isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(dtype)
        if isinstance(x, _Transformed):
            problem = _NO_TRANSFORMS
        problem = problem or problem_with_input(
            x,
            d=self.config.d,
            dtype=weights.w1.dtype,
            device=weights.w1.device,
            sequences=self.config.router.balance == "sequence",
            parameters=self.parameters,
        )
        if problem is None and self.group.size > 1:
            problem = self._problem_with_weights(cast=dtype is not None)
        if problem is not None:
            device = x.device if weights.w1.is_meta and isinstance(x, Tensor) else weights.w1.device
            device = torch.device("cpu") if device.type == "meta" else device
            device = device if isinstance(self.transport, LocalTransport) else self.transport.known_device(device)
            x = torch.empty(0, self.config.d, dtype=weights.w1.dtype, device=device)
        return x, weights, problem

    def _needs_backward(self, x_TH: Tensor) -> bool:
        """Returns True if this is a training step with a backward, in which ranks wait for each other."""
        if self.group.size == 1 or not self.training:
            return False
        modules = self.experts, self.router
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        return torch.is_grad_enabled() and (x_TH.requires_grad or any(p.requires_grad for p in parameters))

    def update_expert_bias(self, group: EPGroup | None = None) -> None:
        """Updates the bias of auxiliary-loss-free balancing from the counts since the last update.

        A token counts once, when backward reaches the layer's output: not in evaluation, nor again if a checkpoint, of
        either kind, recomputes the layer.
        Call it after the optimizer step. group: the ranks with the same experts in other EP groups (expert data
        parallelism), if there are any. Raises ValueError without router.expert_bias.
        """
        self.router.update_expert_bias(group)

    def extra_repr(self) -> str:
        c = self.config
        return f"d={c.d}, n={c.n}, E={c.E}, K={c.K}, {c.activation}, ep_size={self.group.size}, {c.rounding}"

    def _problem_with_weights(self, *, cast: bool) -> str | None:
        """Returns what is wrong with this rank's weights, or None.

        A load or a move on one rank alone can break them. Without this check only that rank would raise, and the others
        would wait for it.
        """
        w1 = self.experts.w1
        for name, weight in (*self.named_parameters(), ("router.expert_bias", self.router.expert_bias)):
            if weight is None or hasattr(weight, "placements"):  # a DTensor: FSDP gathers and moves it before use
                continue
            if weight.device != w1.device:
                return f"{name} is on {weight.device}, experts.w1 on {w1.device}; move one of them"
            if weight.dtype != w1.dtype and not cast and not name.startswith("router."):
                return f"{name} is {weight.dtype}, experts.w1 {w1.dtype}; cast one of them"
            if weight.shape != self._shapes.get(name, weight.shape) and not _is_gathered_later(weight):
                return f"{name} has shape {tuple(weight.shape)}, wanted {tuple(self._shapes[name])}; load it again"
            if name.startswith("experts.") and (problem := problem_with_memory(name, weight)) is not None:
                return problem
        return None

    def _autocast_dtype(self) -> torch.dtype | None:
        device_type = self.experts.w1.device.type
        if device_type == "meta":  # autocast does not support it
            return None
        return autocast_dtype(device_type)


def _is_gathered_later(weight: Tensor) -> bool:
    """Returns True for a shard of DeepSpeed's ZeRO 3 or torch's first FSDP, which gather it before it is used."""
    return weight.shape == (0,) and (hasattr(weight, "ds_id") or hasattr(weight, "_fsdp_flattened"))


def _has_rows(x: object) -> bool:
    return problem_with_tensor("x", x) is None and isinstance(x, Tensor) and x.dim() in (2, 3)


def _rows_of(x: Tensor) -> Tensor:
    """Returns x as (T, d), contiguous: GEMMs on other strides sum in another order, and give other bits."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _Transformed:
    """In place of an x that a transform of torch.func holds: a problem of this rank."""


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


# Programs need to know this of a layer. Module level, because layers are pickled.


def _output_of(outputs: list[Tensor]) -> MoEOutput:
    y, aux_loss, entropy_T, token_ids_N, *counts = outputs
    return MoEOutput(y, aux_loss, RoutingStats(entropy_T, token_ids_N, GroupCounts(*counts)))


def _again(layer: MoE, x: Tensor, outputs: list[Tensor], lists: list[Tensor], sizes: SplitSizes) -> list[Tensor]:
    """Computes with the pairs of these outputs, which were launched with buffers that are too small.

    lists: of its pairs.
    """
    c, S, T = layer.config, layer.group.size, x.numel() // layer.config.d
    stats = _output_of(outputs).stats
    topk_ids_TK, expert_ids_N, chosen_N, *balance_counts = lists
    pairs = RoutedPairs(
        topk_ids_TK,
        stats.token_ids_N,
        expert_ids_N,
        chosen_N,
        stats.counts,
        max_rows(c.rounding, T, c.K, c.E, S, training=layer.training),
        max_received(c.rounding, T, c.K, training=layer.training),
        AsyncSplitSizes(stats.counts.rows_SE, S, known=sizes, exchange=layer.group.order.exchange),
        BalanceCounts(*balance_counts) if balance_counts else None,
    )
    with repeated_pairs(layer.router, pairs):
        y, aux_loss, stats = layer._compute(x, None)[0]
    return [y, aux_loss, stats.entropy_T, stats.token_ids_N, *stats.counts]


def _layer_transport(layer: MoE) -> LayerTransport | None:
    w1, config = layer.experts.w1, layer.config
    row_bytes = config.d * (layer._autocast_dtype() or w1.dtype).itemsize
    may_be_static = layer.training and config.rounding.capacity_factor is not None
    return bounded_transport(layer.transport, w1, row_bytes, may_be_static=may_be_static)


def _check_hosts(config: MoEConfig, group: EPGroup) -> None:
    """Raises ValueError, on every rank, if tokens may have experts on too many hosts."""
    if config.router.hosts_per_token is None or group.size == 1:
        return
    hosts = group.hosts(config.transport.ranks_per_host)
    if hosts.problem is not None:
        raise ValueError(f"router.hosts_per_token={config.router.hosts_per_token} needs equal hosts: {hosts.problem}")
    problem = config.problem_with_hosts(hosts.num_hosts)
    if problem is not None:
        raise ValueError(problem)


def _problem_with_types(config: object, seed: object, device: object, dtype: object) -> str | None:
    """Returns which argument of the constructor has another type, or None."""
    if not isinstance(config, MoEConfig):
        return f"config is a {type(config).__name__}, wanted a MoEConfig: load_config or MoEConfig.from_dict"
    if seed is not None and not hasattr(seed, "__index__"):
        return f"seed={seed!r} is a {type(seed).__name__}, wanted an integer"
    if not (device is None or isinstance(device, str | int | torch.device)):
        return f"device={device!r} is a {type(device).__name__}, wanted a torch.device or its name"
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        return f"dtype={dtype!r} is no floating-point torch.dtype; use for example torch.bfloat16"
    return None


def _problem_with_device(device: torch.device | str | int | None) -> str | None:
    """Returns why this rank can have no tensors on `device`, or None."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # noqa: BLE001 - each device type raises its own
        reason = str(error).partition("\n")[0]
        return f"device={device!r} cannot be used on this rank ({reason}); name one that torch has here"
    return None


def _problem_with_dtype(dtype: torch.dtype | None) -> str | None:
    if dtype in (None, *DTYPES):
        return None
    return f"dtype={dtype} is not supported; use one of {', '.join(map(str, DTYPES))}"


def _agreed_seed_and_number(
    config: MoEConfig, group: EPGroup, seed: int | None, dtype: torch.dtype | None
) -> tuple[int, int]:
    """Returns the seed that all ranks use, and the number of this layer, which is 0 on one rank.

    Raises ValueError, on every rank, unless all ranks build the same layer.
    """
    _NUM_BUILT[group.name] += 1
    seed = None if seed is None else operator.index(seed)  # json cannot write numpy integers
    own_seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
    described = json.dumps({**config.to_dict(), "dtype": str(dtype), "seed": seed}, sort_keys=True)
    number = (_NUM_BUILT[group.name] - 1) % _MAX_NUMBER + 1
    reports = group.all_gather_object((described, (own_seed, number)), stage="construction")
    if config.E % group.size:
        raise ValueError(
            f"E={config.E} experts cannot be divided over ep_size={group.size} ranks; "
            f"use an EP group of a size that divides {config.E}"
        )
    first = json.loads(reports[0][0])
    for rank, (other, _) in enumerate(reports):
        if other != reports[0][0]:
            values = json.loads(other)
            differing = {key: (first.get(key), values.get(key)) for key in first if first.get(key) != values.get(key)}
            shown = ", ".join(f"{key}: {a!r} on rank 0, {b!r} on rank {rank}" for key, (a, b) in differing.items())
            raise ValueError(
                f"the ranks of the EP group disagree about the layer ({shown}); build it alike on every rank"
            )
    agreed_seed, number = reports[0][1]
    return agreed_seed, number if group.size > 1 else 0
