"""`RecordedExperts`: the experts of a framework's layer, by recorded launches where that is possible.

The framework has a router of its own. Recorded is all that follows it: counts, dispatch, experts and combine, forward
and backward (docs/gpu_kernels.md). Elsewhere the same code runs without a recording.

Legend: T tokens on this rank, H hidden size, K experts per token.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.bounded_steps import LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.functional import gradient_placeholder, moe
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.launch_sequence.recorded_calls import Code, RecordedCalls
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.routers.count_exchange import decided_counts
from sonic_ep.routers.replay import in_region
from sonic_ep.routing import GroupCounts, Routing, SplitSizes
from sonic_ep.transports import GroupTransport, bounded_transport, steps_of

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCall:
    """One call of a layer's experts.

    x_TH: rows. routed: what the framework's router returned. weights, lora: of this rank's experts, as `moe` takes
    them: w1, w2, b1, b2, and updates of w1 and w2. All may require gradients.
    route: returns the routing of `routed`, by operations that depend on nothing else. A collective.
    training: of the layer. settings: arguments of `moe`, the same in every call of a layer.
    problem: why the launches depend on more than these tensors, or None.
    """

    x_TH: Tensor
    routed: Sequence[Tensor]
    weights: Weights
    route: Callable[..., Routing]
    training: bool
    lora: ExpertsLoRA | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def adds_to_main_grad(self) -> bool:
        return self.settings.get("accumulate_into_main_grad", False)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors: x, `routed`, and the weights and updates that exist."""
        weights = [weight for weight in self.weights if weight is not None]
        updates = [] if self.lora is None else [each.contiguous() for each in self.lora.tensors() if each is not None]
        return [self.x_TH, *(each.contiguous() for each in self.routed), *weights, *updates]

    def on(self, tensors: Sequence[Tensor]) -> Self:
        """Returns the call with other tensors in these places."""
        x_TH, *rest = tensors
        w1, w2, *others = rest[len(self.routed) :]

        def instead_of(*old: Tensor | None) -> list[Tensor | None]:
            return [None if each is None else others.pop(0) for each in old]

        b1, b2 = instead_of(*self.weights[2:])
        lora = None if self.lora is None else ExpertsLoRA(*instead_of(*self.lora.tensors()))
        return replace(self, x_TH=x_TH, routed=rest[: len(self.routed)], weights=(w1, w2, b1, b2), lora=lora)

    def with_weights(self, w1: Tensor, w2: Tensor) -> Self:
        """Returns the call with these weights and the same biases."""
        return replace(self, weights=(w1, w2, *self.weights[2:]))


@final
class RecordedExperts:
    """The calls of one layer's experts. A copy of it starts without recordings.

    K: experts per token.
    """

    def __init__(self, group: EPGroup, transport: LocalTransport | GroupTransport, K: int) -> None:
        self.training = False  # of the present call
        self._group, self.transport, self._K = group, transport, K
        self._calls = RecordedCalls(_CODE, steps_of(group, transport, K, _transport_of))
        self._call: ExpertsCall | None = None
        # The main_grad of both weights, if backward adds to it; while a recording is made, memory that stands for it.
        self._params: list[Tensor] = []
        self._stand_in: list[Tensor] = []

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._group, self.transport, self._K)

    @property
    def num_recorded(self) -> int:
        """The number of signatures with a recording."""
        return self._calls.num_recorded

    def __call__(self, call: ExpertsCall) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the group.

        Raises what `moe` and `call.route` raise.
        """
        x_TH = call.x_TH
        if torch.compiler.is_compiling() or in_region() or not host_may_wait(x_TH):
            return self.compute(call)
        self.training, self._call = call.training, call
        self._params = [*call.weights[:2]] if call.adds_to_main_grad else []
        try:
            problem = call.problem or self._problem_with_main_grads()
            recorded = self._recordable(call) if problem is None else call
            outputs = self._calls.outputs(self, recorded.tensors(), x_TH.shape[0], problem)
            if outputs is not None:
                return outputs[0]
        finally:
            self._call, self._stand_in = None, []
        out_TH, routing = self._compute(call)
        self._calls.observe(routing.split_sizes)
        return out_TH

    def _recordable(self, call: ExpertsCall) -> ExpertsCall:
        """Returns the call as it is recorded: gradients that backward adds to main_grad do not pass through autograd.

        Those of both weights then end in x, so that autograd still accumulates them after backward, and calls hooks.
        """
        if not call.adds_to_main_grad:
            return call
        x_TH: Any = _AddedToMainGrad.apply(call.x_TH, *self._params)
        return replace(call.with_weights(*(param.detach() for param in self._params)), x_TH=x_TH)

    def _problem_with_main_grads(self) -> str | None:
        if all(param.requires_grad and getattr(param, "main_grad", None) is not None for param in self._params):
            return None
        return "a weight has no main_grad"

    def compute(self, call: ExpertsCall) -> Tensor:
        """Returns the same by the layer's code."""
        return self._compute(call)[0]

    def _compute(self, call: ExpertsCall) -> tuple[Tensor, Routing]:
        routing, where = call.route(*call.routed), {"transport": self.transport, "group": self._group}
        return moe(call.x_TH, routing, *call.weights, lora=call.lora, **where, **call.settings), routing

    def outputs_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the output and the counts, by the code of the present call on these tensors."""
        assert self._call is not None
        call = self._call.on(tensors)
        if call.adds_to_main_grad:
            leaves = [weight.detach().requires_grad_() for weight in call.weights[:2]]
            for leaf, main_grad in zip(leaves, self.main_grads(), strict=True):
                leaf.main_grad = main_grad  # type: ignore[attr-defined]
            call = call.with_weights(*leaves)
        out_TH, routing = self._compute(call)
        return [out_TH, *routing.counts]

    def main_grads(self) -> list[Tensor]:
        """Returns the tensors that backward adds gradients of weights to."""
        return self._stand_in or [param.main_grad for param in self._params]  # type: ignore[attr-defined]

    def problem_with_recording(self, tensors: list[Tensor]) -> str | None:
        """Returns why no recording of these tensors can be made, or None. Allocates what stands for main_grad."""
        if not tensors[0].numel():
            return "x is empty"
        try:
            self._stand_in = self._like_main_grads()
            self._like_main_grads()  # there must be memory for the recording's copy of it, too
        except torch.OutOfMemoryError:
            return "there is no memory for two more main_grads"
        return None

    def _like_main_grads(self) -> list[Tensor]:
        return [torch.empty_like(main_grad) for main_grad in self.main_grads()]

    @contextmanager
    def undone(self) -> Generator[None]:
        """A context in which backward adds to memory of its own, which is zero at the start."""
        if not self._stand_in:  # another rank records what this one has recorded
            self._stand_in = self._like_main_grads()
        for each in self._stand_in:
            each.zero_()
        yield


class _AddedToMainGrad(torch.autograd.Function):
    """Passes x on. Its backward, which runs after that of the experts, gives autograd placeholders for the weights."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, *params: Tensor) -> Tensor:
        ctx.params = params
        return x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0], *(gradient_placeholder(param) for param in ctx.params)


def _again(experts: RecordedExperts, tensors: list[Tensor], outputs: list[Tensor], sizes: SplitSizes) -> list[Tensor]:
    """Computes with the counts of these outputs, which were launched with buffers that are too small."""
    with decided_counts(GroupCounts(*outputs[1:]), sizes):
        return experts.outputs_of(tensors)


_CODE = Code(
    RecordedExperts.outputs_of,
    RecordedExperts.main_grads,
    RecordedExperts.undone,
    RecordedExperts.problem_with_recording,
    _again,
)


def _transport_of(experts: RecordedExperts) -> LayerTransport | None:
    assert experts._call is not None
    x_TH = experts._call.x_TH
    return bounded_transport(experts.transport, x_TH, x_TH.shape[1] * x_TH.element_size())
