"""Megatron's partial CUDA graphs: router and preprocessing in one, experts outside. Here without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
S, B, E = 6, 3, 8  # sequence length on a rank, microbatch, experts


def captured(layer: Any, x: Tensor, mask: Tensor | None) -> tuple[list[Tensor], dict[str, Any]]:
    """The results of router and preprocessing, and what a replay of their graph sets in the dispatcher."""
    layer.fwd_execution_map = "route"
    results = layer(x, intermediate_tensors=(), padding_mask=mask)
    handed = {name: getattr(layer.token_dispatcher, name) for name in layer.token_dispatcher.cudagraph_attrs}
    layer.token_dispatcher.pop_routing()
    return list(results), handed


def graphed_router(rank: int, masked: bool) -> list[bool]:
    """The three parts that Megatron's graphs divide a layer into: as captured, then replayed for another batch.

    A replay writes into the tensors of the capture.
    """
    from sonic_ep.integrations.megatron import get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config, parallel_state

    with parallel_state(expert=2), torch.no_grad():
        config = gpt_config(moe_shared_expert_intermediate_size=40)
        torch.manual_seed(5)
        layer: Any = get_sonic_ep_moe_spec(E)(config=config)
        layer.set_layer_number(1)
        for parameter in layer.experts.parameters():
            parameter.data *= 1 + rank / 2  # ranks draw the same numbers
        batches = []
        for seed in (rank, 2 + rank):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(S, B, config.hidden_size, generator=generator)
            batches.append((x, torch.rand(B, S, generator=generator) < 0.3 if masked else None))
        wanted = [layer(x, padding_mask=mask)[0] for x, mask in batches]
        (results, handed), (new_results, new_handed) = (captured(layer, *batch) for batch in batches)
        set_by_graph = [name for name, value in handed.items() if value is not None]
        assert set_by_graph == ["routing_map", *(["padding_O"] if masked else [])]
        found = []
        for step in range(2):
            if step == 1:
                of_capture, values = [*results, *handed.values()], [*new_results, *new_handed.values()]
                for static, value in zip(of_capture, values, strict=True):
                    if static is not None:
                        static.copy_(value)
            for name, value in handed.items():
                setattr(layer.token_dispatcher, name, value)
            tokens, probs, shared = results
            layer.fwd_execution_map = "expert_compute"
            output, bias = layer(None, intermediate_tensors=(tokens, probs))
            layer.fwd_execution_map = "postprocess"
            found += [bias is None, torch.equal(layer(None, intermediate_tensors=(output, shared)), wanted[step])]
        return found


@pytest.mark.parametrize("masked", [False, True])
def test_the_router_may_be_in_a_graph_of_its_own(ranks: Ranks, masked: bool) -> None:
    assert ranks(2).run(graphed_router, masked) == [[True] * 4] * 2
