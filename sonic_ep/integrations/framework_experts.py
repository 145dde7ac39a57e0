"""`FrameworkExperts`: the experts of a framework's layer, as programs where that is possible.

The framework has a router of its own. A program makes a routing of its top-K (topk_routing.py), or code of its other
results. All that follows, dispatch, experts and combine, forward and backward, is `moe`, which runs as programs
(docs/how_a_step_runs.md).

Legend: T tokens on this rank, H hidden size, K experts per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.autocast import autocast_dtype
from sonic_ep.dispatch.bounded_steps import LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.functional import moe
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.routers.replay import replaying
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import ExpertsPrograms, RunsAs
from sonic_ep.steps.programs import StepPrograms
from sonic_ep.steps.topk_step import TopKStep, traced_topk
from sonic_ep.transports import GroupTransport, bounded_transport, steps_of, transport_for

# w1, w2, b1 and b2 of this rank's experts, as `moe` takes them.
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@final
class FrameworkExperts:
    """The calls of one layer's experts. A copy of it starts without programs.

    In a step comes `begin`, then the collective that makes the routing, then the call.

    K: experts per token. save_dispatched: see SonicEPOptions. as_programs: False for the code alone.
    """

    def __init__(
        self,
        group: EPGroup,
        transport: LocalTransport | GroupTransport,
        K: int,
        *,
        save_dispatched: bool = False,
        as_programs: bool = True,
    ) -> None:
        self.group, self.transport, self._K = group, transport, K
        self._save_dispatched, self._as_programs = save_dispatched, as_programs
        self._programs, self._routings = ExpertsPrograms(K), StepPrograms(traced_topk)
        self._steps = steps_of(group, transport, partial(_transport_of, transport))

    @classmethod
    def of(cls, group: EPGroup, options: SonicEPOptions, K: int) -> Self:
        """Returns the calls of a layer with these options. A collective: see `transport_for`."""
        transport = transport_for(group, options.transport)
        return cls(group, transport, K, save_dispatched=options.save_dispatched, as_programs=options.record_launches)

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[object, ...]]:
        settings = {"save_dispatched": self._save_dispatched, "as_programs": self._as_programs}
        return partial(type(self), **settings), (self.group, self.transport, self._K)

    @property
    def num_programs(self) -> int:
        """The number of programs that steps run as, of routings and of experts."""
        return self._routings.num_programs + self._programs.num_programs

    def begin(self, x_TH: Tensor, *, is_bounded: bool = False) -> RunsAs | None:
        """Returns how the experts of the next step may run; None for the code. A collective at its first use.

        x_TH: the rows, or others of their width, dtype and device. is_bounded: whether the routing will have a bound of
        the rows that arrive (`Routing.max_received`).
        """
        if not self._as_programs or torch.compiler.is_dynamo_compiling() or not host_may_wait(x_TH):
            return None
        step = None if self._steps is None else self._steps.begin((x_TH, is_bounded), is_replayed=replaying())
        runs_as = RunsAs.of(self._programs, self.group, self.transport, step)
        runs_as.routes = TopKStep(self._routings, runs_as.ranks, self._steps)
        return runs_as

    def __call__(
        self, x_TH: Tensor, routing: Routing, weights: Weights, runs_as: RunsAs | None, **settings: Any
    ) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective of the group.

        runs_as: what `begin` returned. settings: other arguments of `moe`. Raises what `moe` raises.
        """
        settings |= {"transport": self.transport, "group": self.group, "save_dispatched": self._save_dispatched}
        out_TH = moe(x_TH, routing, *weights, runs_as=runs_as, **settings)
        if runs_as is not None and self._steps is not None:
            self._steps.observe(routing.split_sizes)
        return out_TH


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of experts with this weight: of autocast, or without it of the weight."""
    return autocast_dtype(weight.device.type) or weight.dtype


def _transport_of(transport: LocalTransport | GroupTransport, rows: tuple[Tensor, bool]) -> LayerTransport | None:
    x_TH, is_bounded = rows
    return bounded_transport(transport, x_TH, x_TH.shape[1] * x_TH.element_size(), may_be_static=is_bounded)
