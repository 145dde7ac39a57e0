"""The experts of a transformers model, computed by `moe` on the model's own routing.

Source: huggingface/transformers, src/transformers/integrations/moe.py, `ExpertsInterface`.

Legend: T tokens on this rank, H hidden size, K experts per token.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.autocast import autocast_dtype, autocast_to
from sonic_ep.config import RoundingConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.graph.modules import HeldKey, module_of, with_tensors
from sonic_ep.graph.operation import GraphOperation, Outputs, in_graph, lasting, like_first
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.framework_experts import FrameworkExperts, compute_dtype
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.topk_routing import capped_routing, routing_of_topk
from sonic_ep.integrations.transformers.activation import activation_of
from sonic_ep.integrations.transformers.router_outputs import RouterOutputs
from sonic_ep.integrations.transformers.weights import layout_of, num_local_experts, weights_of
from sonic_ep.routers.given_routing import NOT_ROUNDED, NOTHING_GIVEN, GivenRouting, add_to_records, recording
from sonic_ep.routers.topk_pairs import RouterCall
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs
from sonic_ep.transports import GroupTransport

# Attributes of a module of experts. LORA: lora.py's Adapters during a forward with them, or None.
LORA = "_sonic_ep_lora"
_EXPERTS: WeakKeyDictionary[nn.Module, dict[object, FrameworkExperts]] = WeakKeyDictionary()  # by transport and options
_say_once = cache(logging.getLogger("sonic_ep").warning)
_NO_CAPACITY = RoundingConfig(mode="off")
TOKEN_ROUNDING = "_sonic_ep_rounding"  # attribute of a module of experts: rounding.py's TokenRounding, or None
# Of batch_fields.py: the function from E and K to what a batch gives the next call, or None; RouterOutputs.
GIVEN, ROUTER_OUTPUTS = "_sonic_ep_given", "_sonic_ep_router_outputs"
DISPATCHED = "_sonic_ep_dispatched"  # of experts that expert_parallel.py brings their tokens
_KEY = "_sonic_ep_key"  # of hold_key
NAME = "sonic_ep"  # in transformers' registries


def compute_experts(
    experts: Any,
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    group: EPGroup,
    transport: LocalTransport | GroupTransport,
    options: SonicEPOptions,
    own_slice: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns each token's weighted sum over its experts, (T, H) in the dtype of x. A collective of `group`.

    Computes in the dtype of autocast, or without it in the weights' dtype. Rounds in training if `round_tokens` was
    called.

    experts: the module of transformers. x_TH, topk_ids_TK, topk_weights_TK: (T, H), and (T, K) ids, distinct in each
    row, and weights. own_slice: returns this rank's rows of what the router returned.
    options: its rounding is of mode "off"; the capacity_factor bounds in training how many rows a rank receives, unless
    `round_tokens` was called.

    Raises ValueError for experts that we do not compute: see `check`.
    """
    if torch.compiler.is_dynamo_compiling():
        settings = {"group": group, "transport": transport, "options": options, "own_slice": own_slice}
        return _compiled(experts, x_TH, topk_ids_TK, topk_weights_TK, **settings)
    hold_key(experts)
    activation, dtype = checked_activation(experts), compute_dtype(experts.down_proj)
    if recording():
        refuse_stock_dispatch(experts, "record_routing")
    E, rounding = num_local_experts(experts) * group.size, getattr(experts, TOKEN_ROUNDING, None)
    rounding, capacity = (rounding, options.rounding or _NO_CAPACITY) if experts.training else (None, _NO_CAPACITY)
    routed = [topk_ids_TK, topk_weights_TK]
    if rounding is not None and (logits_TE := rounding.outputs.pop_logits(E)) is not None:
        routed.append(logits_TE if own_slice is None else own_slice(logits_TE))
    given, routed = _given(experts, x_TH, routed, E)
    if given.expert_ids_TK is not None and rounding is not None:
        _say_once(NOT_ROUNDED, rounding.config.mode)
        rounding = None
    call = RouterCall(
        group=group,
        exchange=transport,
        dtype=dtype,
        training=experts.training,
        problem=given.problem,
        has_given_experts=given.expert_ids_TK is not None,
    )
    adapters = getattr(experts, LORA, None)
    lora = None if adapters is None else adapters.of_rank(group, num_local_experts(experts), dtype)
    w, x = weights_of(experts, dtype), given.take(x_TH).to(dtype)
    weights = w.w1, w.w2_eHI, w.b1_eJ, w.b2_eH
    calls = _experts_of(experts, group, transport, options, topk_ids_TK.shape[1])
    is_bounded = (capacity if rounding is None else rounding.config).capacity_factor is not None
    runs_as = calls.begin(x, is_bounded=is_bounded)
    routing = _routing(experts, routed, rounding, capacity, E, call, runs_as)
    out_TH = calls(x, routing, weights, runs_as, activation=activation, layout=layout_of(experts), lora=lora)
    if recording():
        add_to_records(experts, routed[0], x_TH.shape[:1], given)
    return given.put(out_TH).to(x_TH.dtype)


def hold_key(experts: nn.Module) -> HeldKey:
    """Returns the module's key in compiled graphs, which is made in the first call."""
    held: HeldKey | None = getattr(experts, _KEY, None)
    if held is None or held.key is None:
        held = HeldKey(experts)
        setattr(experts, _KEY, held)
    return held


@_disable_dynamo
def _in_eager_mode(experts: nn.Module, *routed: Tensor, **settings: Any) -> Tensor:
    return compute_experts(experts, *routed, **settings)


def _compiled(
    experts: nn.Module, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, **settings: Any
) -> Tensor:
    """Calls the experts as one operation of a compiled graph.

    Some break the graph: those without a key, in their first call, and those that take what hooks have noted on the
    host, the logits of a router or the fields of a batch.
    """
    held: HeldKey | None = getattr(experts, _KEY, None)
    noted = [getattr(experts, name, None) for name in (TOKEN_ROUNDING, GIVEN, ROUTER_OUTPUTS)]
    if held is None or held.key is None or any(each is not None for each in noted):
        return _in_eager_mode(experts, x_TH, topk_ids_TK, topk_weights_TK, **settings)
    tensors = [x_TH, topk_weights_TK, *experts.parameters()]
    constants = held.key, topk_ids_TK, [*experts.buffers()], autocast_dtype(x_TH.device.type)
    return in_graph(torch.ops.sonic_ep.transformers_experts, tensors, *constants)[0][0]


def _compute(
    tensors: list[Tensor], key: Tensor, topk_ids_TK: Tensor, buffers: list[Tensor], autocast: torch.dtype | None
) -> Outputs:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    (x_TH, topk_weights_TK, *parameters), experts = tensors, module_of(key)
    forward: Any = hold_key(experts).call or partial(ALL_EXPERTS_FUNCTIONS[NAME], experts)
    with autocast_to(autocast, x_TH.device.type), with_tensors(experts, parameters, buffers):
        return Outputs([forward(x_TH, lasting(topk_ids_TK), topk_weights_TK)])


# key, buffers: of the module. autocast: its dtype, if it is on. tensors: x_TH, the weights (T, K) and the parameters.
GraphOperation(
    "transformers_experts",
    "Tensor key, Tensor ids_TK, Tensor[] buffers, ScalarType? autocast",
    _compute,
    like_first,
    first_lasting=2,
)


def _given(experts: nn.Module, x_TH: Tensor, routed: list[Tensor], E: int) -> tuple[GivenRouting, list[Tensor]]:
    """Returns what the batch gives for this layer, and what the router returned, without padding and with the experts
    that are given."""
    outputs: RouterOutputs | None = getattr(experts, ROUTER_OUTPUTS, None)
    logits_TE = None if outputs is None else outputs.pop_logits(E)
    given_for: Callable[[int, int], GivenRouting] | None = getattr(experts, GIVEN, None)
    if given_for is None:
        return NOTHING_GIVEN, routed
    setattr(experts, GIVEN, None)
    given = given_for(E, routed[0].shape[1])
    if given.shape.numel() != x_TH.shape[0]:
        problem = (
            f"the batch has {given.shape.numel()} tokens and the experts get {x_TH.shape[0]}; routed_experts and "
            "padding go with tp_size=1, where a rank computes all tokens of its batch"
        )
        return GivenRouting(x_TH.shape[:1], problem=problem), routed
    if given.problem is not None or given.expert_ids_TK is None:
        return given, [given.take(each) for each in routed]
    assert outputs is not None  # replay_routing has set it
    rule, problem = outputs.rule_of(logits_TE, routed[0].long(), routed[1], E)
    if problem is not None or logits_TE is None:
        return replace(given, problem=problem), routed
    own_ids_TK, own_weights_TK = given.take(routed[0].long()), given.take(routed[1])
    weights_TK = rule.weights_in_place_of(given.take(logits_TE), own_ids_TK, own_weights_TK, given.expert_ids_TK)
    return given, [given.expert_ids_TK, weights_TK]


def _routing(
    experts: Any,
    routed: list[Tensor],
    rounding: Any,
    capacity: RoundingConfig,
    E: int,
    call: RouterCall,
    runs_as: RunsAs | None,
) -> Routing:
    """Returns the routing of what the router returned. A collective. rounding: TokenRounding, or None."""
    ep_size = call.group.size
    if call.problem is not None:
        return routing_of_topk(*routed[:2], E=E, call=call)
    if rounding is not None:
        return rounding.routing(experts, *routed, E=E, call=call, runs_as=runs_as)
    if (capacity.capacity_factor or ep_size) >= ep_size:
        has_sentinels = _has_stock_dispatch(experts)
        return routing_of_topk(*routed, E=E, call=call, has_sentinels=has_sentinels, capacity=capacity, runs_as=runs_as)
    return capped_routing(experts, *routed, E=E, call=call, capacity=capacity, runs_as=runs_as)


def _experts_of(
    experts: nn.Module,
    group: EPGroup,
    transport: LocalTransport | GroupTransport,
    options: SonicEPOptions,
    K: int,
) -> FrameworkExperts:
    of_module, key = _EXPERTS.setdefault(experts, {}), (transport, options)
    if key not in of_module:
        saves, runs = options.save_dispatched, options.record_launches
        of_module[key] = FrameworkExperts(group, transport, K, save_dispatched=saves, as_programs=runs)
    return of_module[key]


def num_programs(experts: nn.Module) -> int:
    """Returns how many programs there are for a module of experts."""
    return sum(each.num_programs for each in _EXPERTS.get(experts, {}).values())


def uses_registry(module: Any) -> bool:
    """Returns True for a module of a class that has transformers' decorator `use_experts_implementation`."""
    return all(hasattr(module, name) for name in ("is_concatenated", "is_transposed", "has_gate", "has_bias"))


def registered_experts(model: nn.Module, otherwise: str, needed_by: str | None = None) -> dict[str, nn.Module]:
    """Returns the modules of a model that ask transformers' registry, by name. Raises ValueError if there are none.

    otherwise: what follows for the caller, for the message. needed_by: see `refuse_stock_dispatch`.
    """
    found = {name: module for name, module in model.named_modules() if uses_registry(module)}
    if not found:
        raise ValueError(
            f"no experts of {type(model).__name__} ask transformers' registry for an implementation, so {otherwise}; "
            "docs/transformers.md lists the models with experts that do"
        )
    if needed_by is not None:
        for experts in found.values():
            refuse_stock_dispatch(experts, needed_by)
    return found


def refuse_stock_dispatch(experts: nn.Module, needed_by: str) -> None:
    """Raises ValueError if transformers' own expert parallelism brings these experts their tokens.

    needed_by: the function of ours that needs all tokens of a rank, with the ids of all experts, for the message.
    """
    if _has_stock_dispatch(experts):
        raise ValueError(
            f"{needed_by} needs a rank's tokens with the experts of all ranks, and ep_implementation='all_reduce' or "
            "'all_to_all' gives each rank the ids of its own experts alone; build the model with "
            "DistributedConfig(ep_implementation='sonic_ep')"
        )


def _has_stock_dispatch(experts: nn.Module) -> bool:
    return getattr(experts, "_is_expert_parallel", False) and not hasattr(experts, DISPATCHED)


def checked_activation(experts: Any) -> str:
    """Returns the name of the activation. Raises ValueError for a module of experts that we cannot compute."""
    name = type(experts).__name__
    if not uses_registry(experts):
        raise ValueError(
            f"{name} is not of a class with transformers' decorator use_experts_implementation, which tells the layout "
            "of the weights; use experts_implementation='eager' and ep_implementation='all_to_all'"
        )
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError(
            f"{name} normalises the output of each expert (has_post_expert_norm=True), and the combine sums outputs as "
            "they are; build the model with experts_implementation='grouped_mm'"
        )
    dtype = experts.down_proj.dtype
    if dtype.itemsize < 2:
        raise ValueError(f"{name} has weights of {dtype}; supported are float32, float64, bfloat16 and float16")
    return activation_of(experts)
