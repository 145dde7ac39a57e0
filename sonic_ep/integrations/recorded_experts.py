"""`RecordedExperts`: the experts of a framework's layer, by recorded launches where that is possible.

The framework has a router of its own. Recorded is all that follows it: counts, dispatch, experts and combine, forward
and backward (docs/gpu_kernels.md). Of a router that is computed by ours, all that follows its logits is recorded.
Elsewhere the same code runs without a recording.

Legend: T tokens on this rank, H hidden size, K experts per token, e local experts, I expert width.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.bounded_steps import LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.functional import gradient_placeholder, main_grad_of, moe
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.split_weights import distance_in_shape, stand_in, where_they_lie
from sonic_ep.kernels.launch_sequence.recorded_calls import Code, RecordedCalls
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.routers.count_exchange import decided_counts
from sonic_ep.routers.replay import in_region
from sonic_ep.routing import GroupCounts, Routing, SplitSizes
from sonic_ep.transports import GroupTransport, bounded_transport, steps_of

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
_NUM_FIRST = 1 + len(GroupCounts._fields)  # outputs of a recording: rows and counts


class RouterTensors(NamedTuple):
    """What a router computed of its input, and how a routing is made of it.

    route: returns the routing of `tensors`, and a list of other tensors for the layer, by operations that depend on
    nothing else. A collective. problem: why its launches depend on more than these tensors, or None.
    """

    tensors: list[Tensor]
    route: Callable[..., tuple[Routing, list[Tensor]]]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCall:
    """One call of a layer's experts.

    x_TH: rows. routed: what the framework's router returned. weights, lora: of this rank's experts, as `moe` takes
    them: w1, w2, b1, b2, and updates of w1 and w2. up_eIH: the up weights, if w1 is the gate weights alone. All may
    require gradients.
    route: returns the routing of `routed`, or that and a list of other tensors to return, by operations that depend on
    nothing else. A collective.
    training: of the layer. is_bounded: whether `route` bounds the rows that arrive (`Routing.max_received`).
    settings: hashable arguments of `moe`, in the same order in every call of a layer.
    problem: why the launches depend on more than these tensors and `depends_on`, or None. depends_on: what `route`
    depends on besides the tensors.
    """

    x_TH: Tensor
    routed: Sequence[Tensor]
    weights: Weights
    route: Callable[..., Any]
    training: bool
    lora: ExpertsLoRA | None = None
    up_eIH: Tensor | None = None
    is_bounded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    depends_on: object = None

    @property
    def adds_to_main_grad(self) -> bool:
        return self.settings.get("accumulate_into_main_grad", False)

    @property
    def split(self) -> list[Tensor]:
        """Gate and up weights, if they are two tensors."""
        return [] if self.up_eIH is None else [self.weights[0], self.up_eIH]

    def problem_with_split(self) -> str | None:
        """Returns why launches that read gate and up cannot be repeated, or None."""
        return None if all(weight.is_leaf for weight in self.split) else "gate and up weights are made in every call"

    def tensors(self) -> list[Tensor]:
        """Returns all tensors: x, `routed`, and the weights and updates that exist. For up_eIH see split_weights.py."""
        w1, others = self.weights[0], [weight for weight in self.weights[1:] if weight is not None]
        if self.lora is not None:
            others += [each.contiguous() for each in self.lora.tensors() if each is not None]
        if self.up_eIH is not None:
            others.append(distance_in_shape(w1, self.up_eIH))
            w1 = stand_in(w1, self.up_eIH)
        return [self.x_TH, *(each.contiguous() for each in self.routed), w1, *others]

    def on(self, tensors: Sequence[Tensor]) -> Self:
        """Returns the call with other tensors in these places. Split gate and up are still read where they lie."""
        x_TH, *rest = tensors
        w1, w2, *others = rest[len(self.routed) :]

        def instead_of(*old: Tensor | None) -> list[Tensor | None]:
            return [None if each is None else others.pop(0) for each in old]

        b1, b2 = instead_of(*self.weights[2:])
        lora = None if self.lora is None else ExpertsLoRA(*instead_of(*self.lora.tensors()))
        up_eIH = None
        if self.up_eIH is not None:
            w1, up_eIH = where_they_lie(w1, self.weights[0], self.up_eIH)
        routed, weights = rest[: len(self.routed)], (w1, w2, b1, b2)
        return replace(self, x_TH=x_TH, routed=routed, weights=weights, lora=lora, up_eIH=up_eIH)

    def with_weights(self, w1: Tensor, w2: Tensor) -> Self:
        """Returns the call with these weights and the same biases."""
        return replace(self, weights=(w1, w2, *self.weights[2:]))


@final
class RecordedExperts:
    """The calls of one layer's experts. A copy of it starts without recordings.

    K: experts per token. records: False for the code alone.
    """

    def __init__(
        self, group: EPGroup, transport: LocalTransport | GroupTransport, K: int, *, records: bool = True
    ) -> None:
        self.training = False  # of the present call
        self.group, self.transport, self._K, self._records = group, transport, K, records
        self._calls = RecordedCalls(_CODE, steps_of(group, transport, K, _transport_of))
        self._call: ExpertsCall | None = None
        # The main_grad of both weights, if backward adds to it; while a recording is made, memory that stands for it.
        self._params: list[Tensor] = []
        self._stand_in: list[Tensor] = []
        self._split: list[Tensor] = []  # gate and up of the present call

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        return partial(type(self), records=self._records), (self.group, self.transport, self._K)

    @property
    def num_recorded(self) -> int:
        """The number of signatures with a recording."""
        return self._calls.num_recorded

    def __call__(self, call: ExpertsCall) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the group.

        Raises what `moe` and `call.route` raise.
        """
        return self.with_others(call)[0]

    def with_others(self, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
        """Returns that, and the other tensors of `call.route`."""
        x_TH = call.x_TH
        if not self._records or torch.compiler.is_compiling() or in_region() or not host_may_wait(x_TH):
            out_TH, _, others = self._compute(call)
            return out_TH, others
        self.training, self._call = call.training, call
        self._params, self._split = [*call.weights[:2]] if call.adds_to_main_grad else [], call.split
        try:
            problem = call.problem or self._problem_with_main_grads() or call.problem_with_split()
            recorded = self._recordable(call) if problem is None else call
            kinds = [(each.dtype, each.shape) for each in self.main_grads()] if problem is None else []
            settings = call.depends_on, *kinds, *call.settings.items()
            outputs = self._calls.outputs(self, recorded.tensors(), x_TH.shape[0], problem, settings=settings)
            if outputs is not None:
                return outputs[0], outputs[_NUM_FIRST:]
        finally:
            self._call, self._stand_in = None, []
        out_TH, routing, others = self._compute(call)
        self._calls.observe(routing.split_sizes)
        return out_TH, others

    def _recordable(self, call: ExpertsCall) -> ExpertsCall:
        """Returns the call as it is recorded: gradients that backward adds to main_grad do not pass through autograd.

        Those of both weights then end in x, so that autograd still accumulates them after backward, and calls hooks.
        """
        if not call.adds_to_main_grad:
            return call
        x_TH: Any = _AddedToMainGrad.apply(call.x_TH, *self._params)
        return replace(call.with_weights(*(param.detach() for param in self._params)), x_TH=x_TH)

    def _problem_with_main_grads(self) -> str | None:
        if all(param.requires_grad and main_grad_of(param) is not None for param in self._params):
            return None
        return "a weight has no main_grad that kernels can write to"

    def compute(self, call: ExpertsCall) -> Tensor:
        """Returns the same by the layer's code."""
        return self._compute(call)[0]

    def _compute(self, call: ExpertsCall) -> tuple[Tensor, Routing, list[Tensor]]:
        found, where = call.route(*call.routed), {"transport": self.transport, "group": self.group}
        routing, others = found if isinstance(found, tuple) else (found, [])
        weights = {"up_eIH": call.up_eIH, "lora": call.lora}
        return moe(call.x_TH, routing, *call.weights, **weights, **where, **call.settings), routing, others

    def outputs_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the output, the counts and the other tensors, by the code of the present call on these tensors."""
        assert self._call is not None
        call = self._call.on(tensors)
        if call.adds_to_main_grad:
            leaves = [weight.detach().requires_grad_() for weight in call.weights[:2]]
            for leaf, main_grad in zip(leaves, self.main_grads(), strict=True):
                leaf.main_grad = main_grad  # type: ignore[attr-defined]
            call = call.with_weights(*leaves)
        out_TH, routing, others = self._compute(call)
        return [out_TH, *routing.counts, *others]

    def main_grads(self) -> list[Tensor]:
        """Returns the tensors that backward adds gradients of weights to."""
        return self._stand_in or [param.main_grad for param in self._params]  # type: ignore[attr-defined]

    def state(self) -> list[Tensor]:
        """Returns the tensors that launches find without the call's tensors."""
        return [*self.main_grads(), *self._split]

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
    with decided_counts(GroupCounts(*outputs[1:_NUM_FIRST]), sizes):
        return experts.outputs_of(tensors)


_CODE = Code(
    compute=RecordedExperts.outputs_of,
    state=RecordedExperts.state,
    undone=RecordedExperts.undone,
    problem=RecordedExperts.problem_with_recording,
    again=_again,
)


def _transport_of(experts: RecordedExperts) -> LayerTransport | None:
    assert experts._call is not None
    x_TH, is_bounded = experts._call.x_TH, experts._call.is_bounded
    return bounded_transport(experts.transport, x_TH, x_TH.shape[1] * x_TH.element_size(), may_be_static=is_bounded)
