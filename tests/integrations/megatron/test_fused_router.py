"""`SonicEPOptions(router="fused")` computes what TopKRouter does: probabilities, losses, counts, logs, replay."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig
from sonic_ep.integrations.options import SonicEPOptions
from tests.helpers.implementations import interpreted
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import is_near
from tests.helpers.triton_interpreter import quicken_interpreter

pytest.importorskip("megatron.core")

from megatron.core.transformer.enums import CudaGraphModule

from sonic_ep.integrations.megatron.fields import check

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
S, CALLS = 12, 3
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"moe_router_topk_scaling_factor": 2.5},
    "pre-softmax-groups": {"moe_router_pre_softmax": True, **GROUPS},
    "switch": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "sigmoid-bias-groups": {**SIGMOID, **GROUPS, "moe_z_loss_coeff": 0.1},
    "no-loss": {"moe_router_load_balancing_type": "none", **SIGMOID},
    "z-loss-alone": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1},
    "both-losses": {"moe_z_loss_coeff": 0.1, "moe_router_dtype": "fp32"},
    "per-token-loss": {"moe_z_loss_coeff": 0.1, "calculate_per_token_loss": True},
    "seq-aux-loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global-aux-loss": {"moe_router_load_balancing_type": "global_aux_loss", **SIGMOID},
    "list-of-losses": {
        "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss", "aux_loss"],
        "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
    },
    "jitter": {"moe_input_jitter_eps": 0.1},
    "linear-bias": {"add_bias_linear": True},
    "forced-balance": {"moe_router_force_load_balancing": True},
    "forced-bias": {"moe_router_force_biased": 0.5},
}


def routers(config: Any) -> tuple[Any, Any]:
    """TopKRouter and ours, of the same weights, far from uniform."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from sonic_ep.integrations.megatron.fused_router import FusedRouter

    built: list[Any] = []
    for kind in (TopKRouter, FusedRouter):
        torch.manual_seed(3)
        router: Any = kind(config=config, pg_collection=get_default_pg_collection())
        router.set_layer_number(2)
        router.weight.data *= 20
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.2, 0.2, config.num_moe_experts))
        built.append(router)
    assert built[0].state_dict().keys() == built[1].state_dict().keys()
    return built[0], built[1]


def as_dense(returned: tuple[Tensor, Any], E: int) -> Tensor:
    """(T, E) probabilities of what either router returned."""
    probs, pairs = returned
    if isinstance(pairs, Tensor):
        assert bool((probs.detach()[~pairs] == 0).all())
        return probs
    experts = torch.repeat_interleave(torch.arange(E), pairs.counts_E)
    rows = probs.new_zeros(int(pairs.token_ids_N.max()) + 1, E)
    return rows.index_put((pairs.token_ids_N.long(), experts), probs)


def results_of(router: Any, batch: int, masked: bool, rank: int) -> dict[str, Any]:
    """Of a router that is called CALLS times: all that training gets from it."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(7)  # for jitter and forced logits
    E, generator = router.config.num_moe_experts, torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {}
    for number in range(CALLS):
        x = torch.randn(S, batch, router.config.hidden_size, generator=generator).requires_grad_()
        mask = torch.rand(S, batch, generator=generator) < 0.3 if masked else None
        probs_TE = as_dense(router(x, mask), E)
        (probs_TE * torch.randn(S * batch, E, generator=generator)).sum().backward()
        found |= {f"probs {number}": probs_TE.detach(), f"dx {number}": x.grad}
    found |= {f"d{name}": parameter.grad for name, parameter in router.named_parameters()}
    found |= {name: buffer.float() for name, buffer in router.named_buffers()}
    tracker = get_moe_metrics_tracker()
    for name, each in tracker.metrics.items():
        sizes = [group.size() if group is not None else 0 for group in (each.reduce_group, each.avg_group)]
        found[f"log {name}"] = torch.cat([each.values, torch.tensor([*sizes, each.needs_dp_avg])])
    tracker.clear()
    router.eval()
    with torch.no_grad():
        found["evaluation"] = as_dense(router(torch.randn(S, batch, router.config.hidden_size, generator=generator)), E)
    return found


@contextmanager
def by_kernels() -> Iterator[None]:
    """The router's choices between plain torch and a kernel, made for interpreted kernels."""
    quicken_interpreter()
    fused = import_module("sonic_ep.kernels.route.fused")
    with ExitStack() as stack:
        for name in ("routers.topk.router_operations", "routers.weights_and_losses.router_operations"):
            stack.enter_context(patch(f"sonic_ep.{name}", lambda *_: fused))
        stack.enter_context(patch("sonic_ep.kernels.backend.runs_triton", lambda _: True))
        yield


def compare(rank: int, groups: dict[str, int], batch: int, masked: bool, kernels: bool = False) -> dict[str, list[str]]:
    """What differs, by variant. kernels: ours is computed by kernels."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    different: dict[str, list[str]] = {}
    with parallel_state(**groups):
        for variant, changes in VARIANTS.items():
            if masked and "moe_router_enable_expert_bias" in changes:
                continue  # stock cannot count with a mask
            stock, fused = routers(gpt_config(**changes))
            wanted = results_of(stock, batch, masked, rank)
            with by_kernels() if kernels else nullcontext():
                got = results_of(fused, batch, masked, rank)
            assert wanted.keys() == got.keys(), (variant, wanted.keys() ^ got.keys())
            different[variant] = [name for name, value in wanted.items() if not is_near(got[name], value, share=2e-5)]
    return different


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("groups", "batch"),
    [({"expert": 2}, 1), ({"expert": 2}, 3), ({"expert": 2, "tensor": 2}, 1), ({"context": 2}, 3)],
    ids=str,
)
def test_it_computes_what_megatrons_router_does(ranks: Ranks, groups: dict[str, int], batch: int, masked: bool) -> None:
    for different in ranks(4).run(compare, groups, batch, masked, timeout=600):
        assert len(different) >= len(VARIANTS) - 3
        assert different == dict.fromkeys(different, [])


@interpreted
def test_its_kernels_compute_it_too(ranks: Ranks) -> None:
    for different in ranks(2).run(compare, {"tensor": 2}, 1, False, True, timeout=600):
        assert different == dict.fromkeys(VARIANTS, [])


def padded_counts(rank: int) -> list[list[float]]:
    """Tokens by expert, with and without a mask of the second half."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    counts = []
    with parallel_state():
        _, router = routers(gpt_config(**SIGMOID))
        x = torch.randn(S, 1, router.config.hidden_size, generator=torch.Generator().manual_seed(0))
        mask = torch.arange(S)[:, None] >= S // 2
        for rows, each in ((x, mask), (x[: S // 2], None)):
            router(rows, each)
            counts.append(router.local_tokens_per_expert.tolist())
            router.local_tokens_per_expert.zero_()
    return counts


def test_padding_is_not_counted(ranks: Ranks) -> None:
    """Stock's count fails with a mask."""
    ((masked, without),) = ranks(1).run(padded_counts)
    assert masked == without
    assert sum(masked) == S // 2 * 2


def replays(rank: int) -> list[list[Tensor]]:
    """Recorded ids, then probabilities and gradients of others that are replayed; stock's, then ours."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from tests.helpers.megatron_training import gpt_config, parallel_state

    found = []
    with parallel_state():
        config = gpt_config(moe_enable_routing_replay=True, **SIGMOID)
        for router in routers(config):
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(S, 1, config.hidden_size, generator=generator).requires_grad_()
            other = torch.rand(S, config.num_moe_experts, generator=generator).topk(config.moe_router_topk).indices
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
            router(x)
            recorded = router.router_replay.get_recorded_indices().sort(1).values
            router.router_replay.set_target_indices(other)
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            probs_TE = as_dense(router(x), config.num_moe_experts)
            probs_TE.square().sum().backward()
            found.append([recorded, probs_TE.detach(), x.grad, router.local_tokens_per_expert])
        RouterReplay.clear_global_router_replay_instances()
    return found


def test_it_records_and_replays(ranks: Ranks) -> None:
    ((stock, fused),) = ranks(1).run(replays)
    for got, wanted in zip(fused, stock, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


ROUNDED = {
    "softmax": {"moe_z_loss_coeff": 0.1},
    "sigmoid-bias-groups": {**SIGMOID, **GROUPS},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
}


def rounded(rank: int) -> dict[str, list[str]]:
    """What differs between rounding after Megatron's router, and with ours."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from sonic_ep.integrations.megatron import get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config, note_routings, parallel_state

    different: dict[str, list[str]] = {}
    with parallel_state(expert=2):
        for variant, changes in ROUNDED.items():
            config, found = gpt_config(**changes), []
            for router in ("megatron", "fused"):
                torch.manual_seed(3)
                options = SonicEPOptions(rounding=RoundingConfig(t=8, G=16), router=router)
                layer: Any = get_sonic_ep_moe_spec(config.num_moe_experts, options=options)(config=config)
                layer.set_layer_number(1)
                layer.router.weight.data *= 20
                routings: list[Any] = []
                note_routings(layer, routings)
                x = torch.randn(S, 8, config.hidden_size, generator=torch.Generator().manual_seed(rank))
                y, _ = layer(x.requires_grad_())
                y.square().sum().backward()
                results = {"y": y.detach(), "dx": x.grad, "counts": routings[0].counts.rows_SE.float()}
                results |= {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
                tracker = get_moe_metrics_tracker()
                results |= {f"log {name}": each.values.clone() for name, each in tracker.metrics.items()}
                tracker.clear()
                layer.eval()
                results["evaluation"] = layer(x)[0].detach()
                assert bool((results["counts"].sum(0) % 16 == 0).all())
                found.append(results)
            assert found[0].keys() == found[1].keys()
            different[variant] = [
                name for name, value in found[0].items() if not is_near(found[1][name], value, share=2e-5)
            ]
    return different


def test_rounding_with_it_is_rounding_after_megatrons(ranks: Ranks) -> None:
    for different in ranks(2).run(rounded, timeout=600):
        assert different == dict.fromkeys(ROUNDED, [])


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function='sqrtsoftplus'"),
        ({"moe_router_dtype": "fp64"}, "moe_router_dtype='fp64'"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor=1.5"),
        ({"moe_pad_experts_for_cuda_graph_inference": True}, "moe_pad_experts_for_cuda_graph_inference=True"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "moe_router_load_balancing_type='quantile"),
        ({**GROUPS, "moe_router_group_topk": 1, "moe_router_pre_softmax": True}, "moe_router_group_topk=1"),
        (GROUPS, "moe_router_num_groups=4"),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [CudaGraphModule.moe_router]},
            "cuda_graph_modules",
        ),
    ],
    ids=str,
)
def test_what_it_cannot_compute_is_refused(values: dict[str, Any], name: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 8}
    config = copy.copy(TransformerConfig(**sizes, add_bias_linear=False, moe_ffn_hidden_size=16))
    for field, value in values.items():
        setattr(config, field, value)
    check(config, SonicEPOptions())
    with pytest.raises(ValueError, match="^" + name) as caught:
        check(config, SonicEPOptions(router="fused"))
    assert "; set " in str(caught.value)
    assert "options.router to 'megatron'" in str(caught.value)


def other_misuses(rank: int) -> list[str]:
    from megatron.core.inference import utils
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.moe.router import InferenceTopKRouter

    from sonic_ep.integrations.megatron import SonicEPMoELayer, get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config, parallel_state

    options, messages = SonicEPOptions(router="fused"), []
    with parallel_state(), torch.no_grad():
        config = gpt_config()
        own: Any = MoESubmodules(experts=None, router=InferenceTopKRouter)  # type: ignore[arg-type]
        layer: Any = get_sonic_ep_moe_spec(config.num_moe_experts, options=options)(config=config)
        layer.eval()
        utils.moe_layer_cache = None
        utils.set_decode_expert_padding(layer, True, capacity_factor=4)
        calls = (
            lambda: SonicEPMoELayer(gpt_config(), own, options=options),
            lambda: layer(torch.randn(S, 1, config.hidden_size)),
            lambda: SonicEPOptions(router="own"),  # type: ignore[arg-type]
        )
        for call in calls:
            with pytest.raises(ValueError, match="; set ") as caught:
                call()
            messages.append(str(caught.value))
        utils.moe_layer_cache = None
    return messages


def test_a_router_of_the_specs_own_and_padded_decoding_are_refused(ranks: Ranks) -> None:
    ((own, padded, unknown),) = ranks(1).run(other_misuses)
    assert own.startswith("MoESubmodules.router=")
    assert padded.startswith("moe_expert_capacity_factor=4")
    assert unknown.startswith("router='own'")
