"""`ProgramSteps`: the calls of a layer that run as programs. Elsewhere the layer's code runs. Both give the same bits.

A program computes a whole step (layer_step.py), or where the host needs its sizes one the router, and one the rest
(routed_step.py). Where only the router's code does what the user asks for, a program computes what follows the router
(experts_step.py).

Every rank decides for itself whether a call runs as a program: either way it sends the same, in the same stages.

Legend: T tokens on this rank, H hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sonic_ep.checks import ROW_ALIGNMENT
from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.bounded_steps import BoundedSteps, Step
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.groups.order import NO_ORDER
from sonic_ep.routers.replay import in_region, replaying
from sonic_ep.routing import AsyncSplitSizes, SplitSizes
from sonic_ep.steps.experts_step import ExpertsPrograms, RunsAs
from sonic_ep.steps.layer_step import MAX_TOKENS, StepCall, run, traced
from sonic_ep.steps.programs import Programs, Ranks, Sizes, StepPrograms, may_run
from sonic_ep.steps.routed_step import RoutedStep, traced_router
from sonic_ep.steps.router_trace import Kind, LayerWeights, kernels_compute
from sonic_ep.transports import GroupTransport

if TYPE_CHECKING:
    from sonic_ep.layer import MoE

_Steps = BoundedSteps["MoE"]
_Again = Callable[["MoE", Tensor, list[Tensor], list[Tensor], SplitSizes], list[Tensor]]
_unsafe_view = torch.ops.aten._unsafe_view


@final
class ProgramSteps:
    """The programs of one layer. A copy of it, as of its layer, starts without any.

    again: computes a step whose sizes were too large for it, from the layer, x, the outputs and the lists of its pairs.
    steps: what the ranks know of their steps; None on one rank. K: experts per token.
    """

    def __init__(self, again: _Again, steps: _Steps | None, K: int) -> None:
        self._again, self._steps, self._K = again, steps, K
        self._programs, self._kinds = StepPrograms(_traced), dict[tuple[object, ...], Kind]()
        self._experts = ExpertsPrograms(K)
        self._config: MoEConfig | None = None  # of the programs
        self._step: Step | None = None  # of this call, across ranks
        # `_depends_on` of this call, and of the last one that passed the checks.
        self._present: tuple[object, ...] | None = None
        self._passed: tuple[object, ...] | None = None
        self._generation = 0

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self._again, self._steps, self._K)

    @property
    def num_programs(self) -> int:
        """The number of programs for forward, of whole steps and of experts alone."""
        return self._programs.num_programs + self._experts.num_programs

    def outputs(self, layer: "MoE", x: Tensor, *, only_code: bool = False) -> list[Tensor] | None:
        """Returns y, the loss and the fields of the statistics; or None where the layer's code has to run.

        only_code: the code has to, whatever x is.
        A collective of the layer's ranks. Not while a CUDA graph is captured.
        """
        config = layer.config
        if config is not self._config:
            self._config = config
            self._forget()
        if self._steps is not None:
            return self._outputs_of_ranks(layer, x, self._steps, only_code=only_code)
        kind = None if only_code else self._kind_of_call(layer, x)
        if kind is None:
            return None
        sizes = x.numel() // layer.config.d, x.shape[-2]
        programs = self._programs.find(kind, sizes)
        if programs is None:
            return None
        return _outputs_of(layer, x, kind, partial(run, programs, kind, sizes, _call_of(layer)))

    def runs_as(self, layer: "MoE") -> RunsAs:
        """Returns how what follows the router may run, if `outputs` has returned None."""
        return RunsAs.of(self._experts, layer.group, layer.transport, self._step)

    def observe(self, split_sizes: AsyncSplitSizes | None) -> None:
        """Is called after the layer's code has run because `outputs` returned None. split_sizes: of its routing."""
        self._passed = self._present
        if self._steps is not None:
            self._steps.observe(split_sizes)

    def _outputs_of_ranks(self, layer: "MoE", x: Tensor, steps: _Steps, *, only_code: bool) -> list[Tensor] | None:
        step = self._step = steps.begin(layer, is_replayed=replaying())
        kind = None if only_code or steps.repeats_code else self._kind_of_call(layer, x, step)
        steps.decided(as_code=kind is None)
        if kind is None:
            return None
        sizes = x.numel() // layer.config.d, x.shape[-2], *(() if step is None else step.bound or ())
        programs = self._programs.find(kind, (*sizes, NO_ORDER))
        if programs is None:
            return None
        call = _call_of(layer)
        if layer.router.expert_bias is not None:
            call.extra["updates"] = layer.router._updates()
        if step is None:
            steps.start()
            routed = RoutedStep(programs, kind, (*sizes, steps.order_of_step), call, self._experts, steps.arriving)
            return _outputs_of(layer, x, kind, routed.run, routed)
        symmetric = step.via.transport
        symmetric.raise_if_lost()
        call.begin_backward = steps.start()
        call.extra["regions"] = symmetric.starts_of_regions(step.tokens, x.device)
        outputs = _outputs_of(layer, x, kind, partial(run, programs, kind, (*sizes, steps.order_of_step), call))
        exceeding: SplitSizes | None = steps.finish(step)
        if exceeding is None:
            return outputs
        assert call.lists is not None
        return self._again(layer, x, outputs, call.lists(), exceeding)

    def _kind_of_call(self, layer: "MoE", x: Tensor, step: Step | None = None) -> Kind | None:
        """Returns what a call is, or None where the code has to run. step: across ranks, if there is a bound."""
        self._present = None
        if not _may_run(x, layer.config.d) or _has_any_global_hook() or in_region():
            return None
        modules: dict[str, nn.Module] = layer._modules  # pyright: ignore[reportAssignmentType]
        training = layer.training
        router, experts = modules["router"], modules["experts"]
        for m in (router, experts):
            if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
                return None
            if "forward" in m.__dict__ or m._modules or m.training != training:
                return None
        weights = _weights_of(layer)
        present = weights.present
        if any(type(p) not in (nn.Parameter, Tensor) for p in present):
            return None
        self._present = _depends_on(layer, x, present)
        if self._present != self._passed and not self._pass_checks(layer, x):
            return None
        if self._steps is not None and not _may_launch(layer, x, step):
            return None
        needs = (False,) * (1 + len(present))
        if torch.is_grad_enabled():
            needs = x.requires_grad, *[p.requires_grad for p in present]
        symmetric = None if step is None else step.via.transport
        if symmetric is not None and symmetric.generation != self._generation:
            self._forget()
            self._generation = symmetric.generation
        dtype, bias = layer._autocast_dtype() or x.dtype, weights.router_bias
        of_router = (weights.router.dtype,) if bias is None else (weights.router.dtype, bias.dtype)
        is_present = tuple([each is not None for each in weights])
        is_static = step is not None and step.via.is_static
        key = training, needs, is_present, dtype, of_router, x.device, is_static
        if key not in self._kinds:
            if not _allows_programs(layer.config, training=training):
                return None
            if not kernels_compute(dtype, weights.router.dtype, x.device, layer.config):
                return None
            ranks = None
            if self._steps is not None:
                where = layer.group, cast(GroupTransport, layer.transport), symmetric, is_static
                ranks = Ranks(*where, layer._number, self._steps.mailbox)
            self._kinds[key] = Kind(layer.config, *key[:-1], ranks)
        return self._kinds[key]

    def _pass_checks(self, layer: "MoE", x: Tensor) -> bool:
        """Returns True if a call passes the checks of the code, which raises what they find.

        Across ranks a call has passed them if the code has run, because ranks check together.
        """
        if layer.group.size > 1 or layer._checked(x)[2] is not None:
            return False
        if layer._problem_with_weights(cast=layer._autocast_dtype() is not None) is not None:
            return False
        self._passed = self._present
        return True

    def _forget(self) -> None:
        self._programs, self._kinds = StepPrograms(_traced), {}


def _traced(kind: Kind, sizes: Sizes) -> Programs:
    needs_sizes = kind.ranks is not None and kind.ranks.symmetric is None
    return (traced_router if needs_sizes else traced)(kind, sizes)


def _outputs_of(
    layer: "MoE",
    x: Tensor,
    kind: Kind,
    run: Callable[..., tuple[Tensor, Tensor, list[Tensor]]],
    routed: RoutedStep | None = None,
) -> list[Tensor]:
    """Returns what `ProgramSteps.outputs` does. run: of x and the weights. routed: of which it is, if of any."""
    x_TH, weights, shared = x, _weights_of(layer), layer._modules.get("shared")
    # Beside a shared expert always a view, as in the code: both gradients of x add up before others of x are added.
    if x.dim() == 3 or not x.is_contiguous() or shared is not None:
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
    if x.dtype != kind.dtype or weights.w1.dtype != kind.dtype:
        x_TH, weights = x_TH.to(kind.dtype), weights.with_experts_in(kind.dtype)
    shared_TH: list[Tensor] = []
    if shared is not None and routed is not None:
        with_grad = torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()
        routed.meanwhile = with_grad(lambda: shared_TH.append(shared(x_TH)))
    y_TH, loss, statistics = run(x_TH, *weights.present)
    if shared is not None:
        y_TH = y_TH + (shared_TH or [shared(x_TH)])[0]
    return [y_TH if x.dim() == 2 else _unsafe_view(y_TH, x.shape), loss, *statistics]


def _may_launch(layer: "MoE", x: Tensor, step: Step | None) -> bool:
    """Returns True if a step of several ranks is within its bound, or needs none, because the host waits for sizes."""
    if step is not None:
        return x.numel() <= step.tokens * layer.config.d
    return isinstance(cast(GroupTransport, layer.transport).chosen(x.device), CollectiveTransport)


def _may_run(x: Tensor, d: int) -> bool:
    """Returns False if x is of another kind, or something watches what the code does. x: whatever a user passed."""
    if type(x) is not Tensor or x.is_nested or x.dim() not in (2, 3) or x.numel() > MAX_TOKENS * d:
        return False
    return may_run(x)


def _allows_programs(config: MoEConfig, *, training: bool) -> bool:
    """Returns False for layers that read numbers on the host, or draw them."""
    draws = training and (config.rounding.draws_numbers or config.router.jitter)
    return not (draws or config.router.check_logits)


def _weights_of(layer: "MoE") -> LayerWeights:
    modules: dict[str, nn.Module] = layer._modules  # pyright: ignore[reportAssignmentType]  # faster than attributes
    router, experts = (modules[name]._parameters for name in ("router", "experts"))
    others = router.get("bias"), experts["w1"], experts["w2"], experts.get("b1"), experts.get("b2")
    return LayerWeights._make((router["weight"], *others))


def _depends_on(layer: "MoE", x: Tensor, weights: list[Tensor]) -> tuple[object, ...]:
    """Returns what the checks of x and of the weights depend on."""
    described = [
        (
            getattr(p, "allreduce", True),
            p.shape,
            p.dtype,
            p.get_device(),
            p.data_ptr() % ROW_ALIGNMENT,
            p.is_contiguous(),
        )
        for p in weights
    ]
    return x.shape[-1], x.dim(), x.dtype, x.layout, layer._autocast_dtype(), *described


def _call_of(layer: "MoE") -> StepCall:
    modules: dict[str, nn.Module] = layer._modules  # pyright: ignore[reportAssignmentType]
    return StepCall(modules["router"]._buffers["expert_bias"])
