"""`decide_pairs` as one operation of a compiled graph: torch.compile sees logits go in and integers come out.

Inside, top-K, the all-gather of counts, rounding, selection, record and replay run as in eager mode. Weights of pairs,
losses and statistics are traced around it. See docs/torch_compile.md.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends, S ranks of the EP group.
"""

import functools
import json

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup, exchange_named
from sonic_ep.in_flight import InFlight
from sonic_ep.kernels.route.topk.reference import scores_of
from sonic_ep.routers.replay import DECIDE_PAIRS_OP, in_region, replaying
from sonic_ep.routers.rounding import max_received, max_rows
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK, compute_topk, counts_by_score
from sonic_ep.routing import INDEX_DTYPE, AsyncSplitSizes, BalanceCounts, GroupCounts, RoutedPairs

_TAGS = (torch.Tag.cudagraph_unsafe,)
# Passes the split sizes from `decide_pairs` to the operation that calls `prepare`. The key is counts.pairs_SE.
pending_sizes: InFlight[AsyncSplitSizes] = InFlight(AsyncSplitSizes.check)


def text_of(config: MoEConfig) -> str:
    """Returns a config as a string, which operations take. Equal layers have equal strings and share a compilation."""
    return json.dumps(config.to_dict())


@functools.cache
def config_of(text: str) -> MoEConfig:
    """Returns the config of a `text_of`, one object for each text."""
    return MoEConfig.from_dict(json.loads(text))


def constant_config_of(text: str) -> MoEConfig:
    """`config_of`, but torch.compile treats the numbers of the result as constants."""
    return config_of(text)


# torch.compiler.assume_constant_result sets this. Calling it would import all of Dynamo, which takes a second.
constant_config_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decide_pairs_in_graph(
    logits_TE: Tensor,
    expert_bias_E: Tensor | None,
    counter_E: Tensor | None,
    config_text: str,
    context: RoutingContext,
    *,
    dispatched_next: bool,
) -> tuple[TopK, RoutedPairs]:
    """Returns the top-K of these logits, as far as weights and losses need it, and the result of `decide_pairs`.

    expert_bias_E, counter_E: see `decide_pairs` in route.py. config_text: `text_of` the config.
    dispatched_next: True if the graph passes this routing to `moe` next. The rank status is then checked there, if
    launching before the check is safe.
    """
    config, group, training = context.config, context.group, context.training
    topk_ids_TK, token_ids_N, expert_ids_N, chosen_N, counts, balance_counts, new_counts_E = (
        torch.ops.sonic_ep.decide_pairs(
            logits_TE.detach(),
            expert_bias_E,
            config_text,
            group.name,
            group.size,
            context.dtype,
            training,
            context.problem,
            "" if context.exchange is None else context.exchange.name,
            dispatched_next,
        )
    )
    if training and counter_E is not None:
        torch.ops.sonic_ep.add_counts(counter_E, new_counts_E)
    T, E = logits_TE.shape
    limit = max_rows(config.rounding, T, config.K, E, group.size, training=training)
    received = max_received(config.rounding, T, config.K, training=training)
    routed_pairs = RoutedPairs(
        topk_ids_TK,
        token_ids_N,
        expert_ids_N,
        chosen_N,
        GroupCounts(*counts),
        limit,
        received,
        balance_counts=BalanceCounts(*balance_counts) if balance_counts else None,
    )
    scores_TE = scores_of(logits_TE, config.router)
    return TopK(scores_TE, scores_TE.detach(), None, topk_ids_TK), routed_pairs


@torch.library.custom_op(DECIDE_PAIRS_OP, mutates_args=(), tags=_TAGS)
def _decide_pairs(
    logits_TE: Tensor,
    expert_bias_E: Tensor | None,
    config_text: str,
    group_name: str,
    ep_size: int,
    dtype: torch.dtype,
    training: bool,
    problem: str | None,
    exchange_name: str,
    dispatched_next: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor], Tensor]:
    if torch._C._current_graph_task_id() != -1 and not replaying():
        raise RuntimeError(
            "backward recomputes a router that torch.compile has traced, and it would decide anew; "
            "give its checkpoint context_fn=sonic_ep.replay_contexts"
        )
    config, group = config_of(config_text), EPGroup.named(group_name)
    exchange = exchange_named(exchange_name)
    if exchange is None and exchange_name:
        raise RuntimeError(
            f"nobody holds the exchange {exchange_name!r}: keep what transport_for(group, config) gave, and pass it"
        )
    context = RoutingContext(
        config=config, group=group, dtype=dtype, training=training, problem=problem, exchange=exchange
    )
    topk = compute_topk(logits_TE, expert_bias_E, config.K, config.router)
    has_bias = expert_bias_E is not None
    new_counts_E = torch.zeros(config.E if has_bias else 0, dtype=torch.int64, device=logits_TE.device)
    pending_sizes.flush(group_name)
    routed_pairs = decide_pairs(config, topk, new_counts_E if has_bias else None, context)
    # Outputs must share no memory with each other or with a region's tape: a graph reuses memory that it has read.
    own = torch.clone if in_region() else Tensor.contiguous
    counts = [values.clone() for values in routed_pairs.counts]
    split_sizes = routed_pairs.split_sizes
    if split_sizes is not None:
        if not (dispatched_next and split_sizes.may_launch_unchecked):
            split_sizes.check()
        if dispatched_next:
            pending_sizes.put(group_name, GroupCounts(*counts).pairs_SE, split_sizes)
    return (
        own(routed_pairs.topk_ids_TK),
        own(routed_pairs.token_ids_N),
        own(routed_pairs.expert_ids_N),
        own(routed_pairs.chosen_N),
        counts,
        [] if routed_pairs.balance_counts is None else [tensor.clone() for tensor in routed_pairs.balance_counts],
        new_counts_E,
    )


@_decide_pairs.register_fake
def _(
    logits_TE: Tensor, expert_bias_E: Tensor | None, config_text: str, group_name: str, ep_size: int, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor], Tensor]:
    (T, E), S, config = logits_TE.shape, ep_size, config_of(config_text)
    N = torch.library.get_ctx().new_dynamic_size()
    balance_shapes = ((T, config.K), (S, E)) if counts_by_score(config.router) else ()
    return (
        logits_TE.new_empty(T, config.K, dtype=torch.int64),
        logits_TE.new_empty(N, dtype=INDEX_DTYPE),
        logits_TE.new_empty(N, dtype=torch.int64),
        logits_TE.new_empty(N, dtype=torch.bool),
        [logits_TE.new_empty(shape, dtype=torch.int64) for shape in ((S, E), (S, E), (S, E), (S,), (S,), ())],
        [logits_TE.new_empty(shape, dtype=torch.int64) for shape in balance_shapes],
        logits_TE.new_empty(0 if expert_bias_E is None else E, dtype=torch.int64),
    )


@torch.library.custom_op("sonic_ep::add_counts", mutates_args=("counter_E",))
def _add_counts(counter_E: Tensor, counts_E: Tensor) -> None:
    """Adds in place. An operation of its own, so that a graph does not copy the counter, which a module holds."""
    counter_E += counts_E


@torch.library.custom_op("sonic_ep::prevent_dce", mutates_args=("counter_E",))
def _prevent_dce(counter_E: Tensor, out_TH: Tensor) -> None:
    """Does nothing, but declares that it writes to the counter of a module. So no graph drops it, nor what computes
    out_TH: the experts' operation checks the rank status, which must happen even if their output is not used.
    """
