"""`ProgramSteps`: the calls of a layer that run as programs (layer_step.py). Elsewhere the layer's code runs.

Both give the same bits.

Every rank decides for itself whether a call runs as a program: either way it sends the same, in the same stages.
Whether a layer's config allows programs at all is the same on all ranks (`support`), since they count steps alike.

Legend: T tokens on this rank, H hidden size.
"""

from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from sonic_ep.checks import ROW_ALIGNMENT
from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.bounded_steps import BoundedSteps, Step
from sonic_ep.groups.order import NO_ORDER
from sonic_ep.kernels.launch_sequence.recorded_calls import Code, Steps
from sonic_ep.steps.layer_step import MAX_TOKENS, Kind, LayerStep, Programs, Ranks, StepCall, kernels_compute, run
from sonic_ep.transports import GroupTransport

_unsafe_view = torch.ops.aten._unsafe_view


@final
class ProgramSteps:
    """The programs of one layer. A copy of it, as of its layer, starts without any.

    code: its `again` computes a step whose sizes were too large for it. steps: what the ranks know of their steps.
    """

    def __init__(self, code: Code, steps: Steps) -> None:
        self._code, self._steps = code, steps
        self._programs, self._kinds = LayerStep(), dict[tuple[object, ...], Kind]()
        self._supported: tuple[MoEConfig | None, bool] = None, False
        # `_depends_on` of this call, and of the last one that passed the checks.
        self._present: tuple[object, ...] | None = None
        self._passed: tuple[object, ...] | None = None
        self._generation = 0

    def __reduce__(self) -> tuple[type[Self], tuple[Code, Steps]]:
        return type(self), (self._code, self._steps)

    @property
    def num_programs(self) -> int:
        """The number of programs for forward."""
        return self._programs.num_programs

    def support(self, layer: Any) -> bool:
        """Returns True, on every rank, if programs can compute layers with this config."""
        config = layer.config
        if config is not self._supported[0]:
            draws = config.rounding.draws_numbers or config.router.jitter
            reads = config.router.check_logits or (layer.group.size > 1 and config.transport.buffers != "exact")
            others = config.bias or config.save_dispatched or config.router.balance == "sequence"
            others = others or (config.router.balance == "global" and config.router.expert_bias)
            self._supported = config, not (draws or reads or others)
            self._forget()
        return self._supported[1]

    def outputs(self, layer: Any, x: Tensor) -> list[Tensor] | None:
        """Returns y, the loss and the fields of the statistics; or None where the layer's code has to run.

        A collective of the layer's ranks. Not while a CUDA graph is captured.
        """
        if layer.group.size > 1:
            return self._outputs_of_ranks(layer, x)
        kind = self._kind_of_call(layer, x)
        if kind is None:
            return None
        sizes = x.numel() // layer.config.d, x.shape[-2]
        programs = self._programs.find(kind, sizes)
        return None if programs is None else _outputs_of(layer, x, programs, kind, sizes, _call_of(layer))

    def observe(self, split_sizes: Any) -> None:
        """Is called after the layer's code has run because `outputs` returned None. split_sizes: of its routing."""
        self._passed = self._present
        self._steps.observe(split_sizes)

    def _outputs_of_ranks(self, layer: Any, x: Tensor) -> list[Tensor] | None:
        steps = cast(BoundedSteps, self._steps)
        step, self._present = steps.begin(layer), None
        if step is None or step.bound is None or step.via.device.type != "cuda":
            return None
        steps.bounded(step)  # its buffers: all ranks allocate them in this call, if any does
        kind = self._kind_of_call(layer, x, step)
        if kind is None:
            return None
        sizes = x.numel() // layer.config.d, x.shape[-2], *step.bound
        programs = self._programs.find(kind, (*sizes, NO_ORDER))
        if programs is None:
            return None
        symmetric = step.via.transport
        symmetric.raise_if_lost()
        call = _call_of(layer)
        call.begin_backward = steps.start()
        call.extra["regions"] = symmetric.starts_of_regions(step.bound.tokens, x.device)
        if layer.router.expert_bias is not None:
            call.extra["updates"] = layer.router._updates()
        outputs = _outputs_of(layer, x, programs, kind, (*sizes, steps.order_of_step), call)
        exceeding = steps.finish(step)
        if exceeding is None:
            return outputs
        assert call.lists is not None
        return self._code.again(layer, [x], [*outputs, *call.lists()], exceeding)

    def _kind_of_call(self, layer: Any, x: Tensor, step: Step | None = None) -> Kind | None:
        """Returns what a call is, or None where the code has to run. step: across ranks."""
        self._present = None
        if not _may_run(x, layer.config.d) or _has_any_global_hook():
            return None
        modules, training = layer._modules, layer.training
        router, experts = modules["router"], modules["experts"]
        for m in (router, experts):
            if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
                return None
            if "forward" in m.__dict__ or m._modules or m.training != training:
                return None
        w1, w2, weight = experts._parameters["w1"], experts._parameters["w2"], router._parameters["weight"]
        if any(type(p) not in (nn.Parameter, Tensor) for p in (w1, w2, weight)):
            return None
        self._present = _depends_on(layer, x)
        if self._present != self._passed and not self._pass_checks(layer, x):
            return None
        if step is not None and self._steps.problem_with_call(step, x.numel() // layer.config.d) is not None:
            return None
        needs = False, False, False, False
        if torch.is_grad_enabled():
            needs = x.requires_grad, weight.requires_grad, w1.requires_grad, w2.requires_grad
        if step is not None and step.via.transport.generation != self._generation:
            self._forget()
            self._generation = step.via.transport.generation
        dtype = layer._autocast_dtype() or x.dtype
        key = training, needs, dtype, weight.dtype, x.device
        if key not in self._kinds:
            if router.bias is not None or not kernels_compute(dtype, weight.dtype, x.device, layer.config):
                return None
            ranks = None
            if step is not None:
                sizes, transport = cast(BoundedSteps, self._steps).sizes, cast(GroupTransport, layer.transport)
                ranks = Ranks(layer.group, transport, step.via.transport, layer._number, sizes)
            self._kinds[key] = Kind(layer.config, *key, ranks)
        return self._kinds[key]

    def _pass_checks(self, layer: Any, x: Tensor) -> bool:
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
        self._programs, self._kinds = LayerStep(), {}


def _outputs_of(
    layer: Any, x: Tensor, programs: Programs, kind: Kind, sizes: tuple[int, ...], call: StepCall
) -> list[Tensor]:
    modules = layer._modules  # faster than attributes
    w1, w2, x_TH = modules["experts"]._parameters["w1"], modules["experts"]._parameters["w2"], x
    if x.dim() == 3 or not x.is_contiguous():
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
    if x.dtype != kind.dtype or w1.dtype != kind.dtype:
        x_TH, w1, w2 = x_TH.to(kind.dtype), w1.to(kind.dtype), w2.to(kind.dtype)
    router = modules["router"]._parameters["weight"]
    y_TH, loss, statistics = run(programs, kind, sizes, call, x_TH, router, w1, w2)
    shared = modules.get("shared")
    if shared is not None:
        y_TH = y_TH + shared(x_TH)
    return [y_TH if x.dim() == 2 else _unsafe_view(y_TH, x.shape), loss, *statistics]


def _may_run(x: Tensor, d: int) -> bool:
    """Returns False if x is of another kind, or something watches what the code does. x: whatever a user passed."""
    if type(x) is not Tensor or x.is_nested or not x.is_cuda or x.dim() not in (2, 3):
        return False
    if x.get_device() != torch.cuda.current_device() or not 0 < x.numel() <= MAX_TOKENS * d:
        return False
    return not torch.is_inference_mode_enabled() and torch._C._len_torch_dispatch_stack() == 0


def _depends_on(layer: Any, x: Tensor) -> tuple[object, ...]:
    """Returns what the checks of x and of the weights depend on."""
    weights = [
        (id(p), p.shape, p.dtype, p.get_device(), p.data_ptr() % ROW_ALIGNMENT, p.is_contiguous())
        for name in ("router", "experts")
        for p in layer._modules[name]._parameters.values()
        if p is not None
    ]
    return x.shape[-1], x.dim(), x.dtype, x.layout, layer._autocast_dtype(), *weights


def _call_of(layer: Any) -> StepCall:
    return StepCall(layer._modules["router"]._buffers["expert_bias"])
