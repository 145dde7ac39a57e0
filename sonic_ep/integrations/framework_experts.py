"""`FrameworkExperts`: the experts of a framework's layer, as programs where that is possible.

The framework has a router of its own. Code makes a routing of its results; all that follows, dispatch, experts
and combine, forward and backward, is `moe`, which runs as a program (docs/how_a_step_runs.md).

Legend: T tokens on this rank, H hidden size, K experts per token, e local experts, I expert width.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.bounded_steps import LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.functional import moe
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import ExpertsPrograms, RunsAs
from sonic_ep.transports import GroupTransport, bounded_transport, steps_of, transport_for

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class RouterTensors(NamedTuple):
    """The results of a router, and how a routing is made of them.

    route: returns the routing of `tensors`, or that and a list of other tensors for the layer. A collective.
    is_bounded: whether `route` bounds the rows that arrive (`Routing.max_received`).
    """

    tensors: list[Tensor]
    route: Callable[..., Routing | tuple[Routing, list[Tensor]]]
    is_bounded: bool = False

    def routing(self) -> tuple[Routing, list[Tensor]]:
        """Returns the routing and the other tensors. A collective."""
        found = self.route(*self.tensors)
        return found if isinstance(found, tuple) else (found, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsCall:
    """One call of a layer's experts.

    x_TH: rows. routed: what the framework's router returned. weights, lora: of this rank's experts, as `moe` takes
    them: w1, w2, b1, b2, and updates of w1 and w2. up_eIH: the up weights, if w1 is the gate weights alone. All may
    require gradients.
    settings: other arguments of `moe`.
    """

    x_TH: Tensor
    routed: RouterTensors
    weights: Weights
    lora: ExpertsLoRA | None = None
    up_eIH: Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@final
class FrameworkExperts:
    """The calls of one layer's experts. A copy of it starts without programs.

    K: experts per token. as_programs: False for the code alone.
    """

    def __init__(
        self, group: EPGroup, transport: LocalTransport | GroupTransport, K: int, *, as_programs: bool = True
    ) -> None:
        self.group, self.transport, self._K, self._as_programs = group, transport, K, as_programs
        self._programs = ExpertsPrograms(K)
        self._steps = steps_of(group, transport, partial(_transport_of, transport))

    @classmethod
    def of(cls, group: EPGroup, options: SonicEPOptions, K: int) -> Self:
        """Returns the calls of a layer with these options. A collective: see `transport_for`."""
        return cls(group, transport_for(group, options.transport), K, as_programs=options.record_launches)

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[object, ...]]:
        return partial(type(self), as_programs=self._as_programs), (self.group, self.transport, self._K)

    @property
    def num_programs(self) -> int:
        """The number of programs that steps run as."""
        return self._programs.num_programs

    def __call__(self, call: ExpertsCall) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the group.

        Raises what `moe` and the route raise.
        """
        return self.with_others(call)[0]

    def with_others(self, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
        """Returns that, and the other tensors of the route."""
        if not self._as_programs or torch.compiler.is_dynamo_compiling() or not host_may_wait(call.x_TH):
            routing, others = call.routed.routing()
            return self._compute(call, routing), others
        step = None if self._steps is None else self._steps.begin(call)
        routing, others = call.routed.routing()
        runs_as = RunsAs.of(self._programs, self.group, self.transport, step)
        out_TH = self._compute(call, routing, runs_as)
        if self._steps is not None:
            self._steps.observe(routing.split_sizes)
        return out_TH, others

    def _compute(self, call: ExpertsCall, routing: Routing, runs_as: RunsAs | None = None) -> Tensor:
        others = {"up_eIH": call.up_eIH, "lora": call.lora, "runs_as": runs_as, **call.settings}
        return moe(call.x_TH, routing, *call.weights, transport=self.transport, group=self.group, **others)


def _transport_of(transport: LocalTransport | GroupTransport, call: ExpertsCall) -> LayerTransport | None:
    x_TH = call.x_TH
    return bounded_transport(transport, x_TH, x_TH.shape[1] * x_TH.element_size(), may_be_static=call.routed.is_bounded)
