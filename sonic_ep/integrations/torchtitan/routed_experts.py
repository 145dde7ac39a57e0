"""`SonicEPRoutedExperts`: torchtitan's RoutedExperts, with our dispatch, experts and combine.

The parameters belong to torchtitan's own grouped experts, in its module and under its names. So its initialisation,
sharding, FSDP2, optimizers and checkpoints see the model that they know. Its token dispatcher is built, and not called.

Legend: T tokens on this rank, E experts, K experts per token, B sequences, L tokens of a sequence. D is torchtitan's
letter for the hidden size.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from sonic_ep.config import RoundingConfig, RouterConfig
from sonic_ep.graph.modules import module_of, new_key
from sonic_ep.graph.operation import GraphOperation, Outputs, in_graph, lasting, like_first
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.framework_experts import FrameworkExperts, compute_dtype
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.rounded_routing import rounded_routing
from sonic_ep.integrations.topk_routing import config_of, routing_of_topk
from sonic_ep.integrations.torchtitan.inner_experts import (
    activation_of,
    local_parameters,
    problem_with_experts,
    weights_of,
)
from sonic_ep.integrations.torchtitan.router import split
from sonic_ep.routers.given_routing import GivenRouting
from sonic_ep.routers.replay import refuse_new_numbers
from sonic_ep.routers.topk_pairs import GivenTopK, RouterCall
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs


class SonicEPRoutedExperts(RoutedExperts):
    """The routed experts of one MoE. Raises ValueError for what it cannot compute, on every rank alike."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """options: see SonicEPOptions. router: how a pair that rounding adds gets its weight; None without rounding."""

        options: SonicEPOptions = field(default_factory=SonicEPOptions)
        router: RouterConfig | None = None

        def __post_init__(self) -> None:
            problem = problem_with_experts(self.inner_experts)
            if type(self.token_dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
                problem = (
                    f"the token dispatcher is a {type(self.token_dispatcher).__qualname__}, which sonic_ep replaces; "
                    "set moe_comm_backend='standard'"
                )
            if problem is not None:
                raise ValueError(problem)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_experts, self.top_k = config.inner_experts.num_experts, config.token_dispatcher.top_k
        self.options, self.router_config = config.options, config.router
        self.tp_size = 1
        self.given: GivenRouting | None = None  # what the router was given for this call: see replay.py
        self._experts = FrameworkExperts.of(EPGroup.alone(), self.options, self.top_k)
        self._key = new_key(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = new_key(self)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Shards the module as torchtitan's sharding_config says. A collective of the EP group.

        Raises ValueError if the experts cannot be divided among its ranks, or these would round differently.
        """
        if self.num_experts % parallel_dims.ep:
            raise ValueError(
                f"num_experts={self.num_experts} is no multiple of expert_parallel_degree={parallel_dims.ep}; "
                "set a degree that divides it"
            )
        rounding = self.options.rounding
        if rounding is not None and rounding.draws_numbers and parallel_dims.ep == 1 and parallel_dims.tp > 1:
            raise ValueError(
                f"rounding.mode={rounding.mode!r} draws numbers on each of {parallel_dims.tp} tensor parallel ranks, "
                "which must round alike; set expert_parallel_degree, or another mode"
            )
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is not None:
            self._experts = FrameworkExperts.of(EPGroup(ep_mesh.get_group()), self.options, self.top_k)
        else:
            self.tp_size = parallel_dims.tp

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Returns each token's weighted sum over its experts, (B, L, D) like x. A collective of the EP group.

        Without EP, tensor parallel ranks each return the part of their slices of the experts, which torchtitan sums.
        topk_scores_BLK, topk_expert_ids_BLK: what the router returned. num_local_tokens_per_expert_E is not read: `moe`
        counts pairs itself.

        Raises what `moe` and the exchange of counts raise.
        """
        (B, L, D), K = x_BLD.shape, topk_expert_ids_BLK.shape[-1]
        parameters = local_parameters(self.inner_experts)
        x_TH = x_BLD.reshape(B * L, D).to(compute_dtype(parameters[0]))
        columns_TC, ids_TK = topk_scores_BLK.reshape(B * L, -1), topk_expert_ids_BLK.reshape(B * L, K)
        if torch.compiler.is_dynamo_compiling():
            tensors = [x_TH, columns_TC, *parameters]
            out_TH = in_graph(torch.ops.sonic_ep.torchtitan_experts, tensors, self._key, ids_TK)[0][0]
        else:
            out_TH = self._out(x_TH, columns_TC, ids_TK, parameters)
        return out_TH.to(x_BLD.dtype).view(B, L, D)

    def _out(self, x_TH: Tensor, columns_TC: Tensor, ids_TK: Tensor, parameters: list[Tensor]) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H). columns_TC: the router's weights, see `split`."""
        weights, up_eIH = weights_of(parameters, x_TH.dtype, self.tp_size)
        rounding = self.options.rounding if self.training else None
        runs_as = self._experts.begin(x_TH, is_bounded=rounding is not None and rounding.capacity_factor is not None)
        call = RouterCall(
            group=self._experts.group,
            exchange=self._experts.transport,
            dtype=x_TH.dtype,
            training=self.training,
            problem=None if self.given is None else self.given.problem,
            has_given_experts=self.given is not None,
        )
        if rounding is None:
            routing = routing_of_topk(ids_TK, columns_TC, E=self.num_experts, call=call, runs_as=runs_as)
        else:
            routing = self._rounded(call, ids_TK, columns_TC, rounding, runs_as)
        activation = activation_of(self.inner_experts)
        return self._experts(x_TH, routing, weights, runs_as, up_eIH=up_eIH, activation=activation)

    def _rounded(
        self, call: RouterCall, ids_TK: Tensor, columns_TC: Tensor, rounding: RoundingConfig, runs_as: RunsAs | None
    ) -> Routing:
        K, E, router = ids_TK.shape[1], self.num_experts, self.router_config
        assert router is not None
        columns_TC = columns_TC.to(torch.promote_types(columns_TC.dtype, torch.float32))
        given = GivenTopK(ids_TK, *split(columns_TC, K, E))
        return rounded_routing(self, given, config_of(E, K, router, rounding), call, runs_as=runs_as)


def _compute(tensors: list[Tensor], key: Tensor, ids_TK: Tensor) -> Outputs:
    (x_TH, columns_TC, *parameters), experts = tensors, cast(SonicEPRoutedExperts, module_of(key))
    rounding = experts.options.rounding
    if experts.training and rounding is not None and rounding.draws_numbers:
        refuse_new_numbers()
    return Outputs([experts._out(x_TH, columns_TC, lasting(ids_TK), parameters)])


# The call in a compiled graph. tensors: x_TH, columns_TC and the parameters. key: of the module.
GraphOperation("torchtitan_experts", "Tensor key, Tensor ids_TK", _compute, like_first, first_lasting=2)
