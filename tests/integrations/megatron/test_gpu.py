"""The layer on GPUs in bfloat16, beside Megatron's own: outputs, gradients, main_grad, the shared expert's stream."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig
from sonic_ep.functional import moe
from sonic_ep.integrations import framework_experts
from sonic_ep.kernels.experts.activations import concatenate
from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from megatron.core.activations import fast_gelu, squared_relu

pytestmark = pytest.mark.gpu

Ranks = Callable[[int], RankPool]
S, B = 512, 2
SHARED = {"moe_shared_expert_intermediate_size": 256}
# No biases: with torch 2.11 backward of Megatron's own fails.
VARIANTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "sigmoid-bias-groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
    },
    "geglu-fp32-router": {"activation_func": fast_gelu, "moe_router_dtype": "fp32"},
    "relu2-fp64-router": {"activation_func": squared_relu, "gated_linear_unit": False, "moe_router_dtype": "fp64"},
    "shared": SHARED | {"moe_shared_expert_gate": True},
    "shared-overlap": SHARED | {"moe_shared_expert_overlap": True},
    "dropped": {"moe_expert_capacity_factor": 0.5},
    "padded-to-capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "22-experts": {"num_moe_experts": 64, "moe_router_topk": 22},
    "probs-on-input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    "moe-recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def config_of(**changes: Any) -> Any:
    from tests.helpers.megatron_training import gpt_config

    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "moe_ffn_hidden_size": 128, "moe_router_topk": 2}
    dtypes = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    return gpt_config(**{**sizes, **dtypes, **changes})


def layers(config: Any, rounding: RoundingConfig | None = None) -> tuple[Any, Any]:
    """Stock and ours, from one seed."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    from sonic_ep.integrations.megatron import SonicEPOptions, use_sonic_ep

    stock_spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    built: list[Any] = []
    for spec in (stock_spec, use_sonic_ep(stock_spec, SonicEPOptions(rounding=rounding))):
        torch.manual_seed(5)
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(7)
        layer: Any = spec(config=config)
        layer.set_layer_number(1)
        built.append(layer.cuda())
    return built[0], built[1]


def expert_values(layer: Any, values: Callable[[Any], Tensor]) -> list[Tensor]:
    """Of fc1 and fc2, stacked, gate rows first."""
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        names = ("linear_fc1.weight", "linear_fc2.weight")
        return [torch.stack([values(each.get_parameter(name)) for each in experts.local_experts]) for name in names]
    fc1, fc2 = values(experts.weight1), values(experts.weight2)
    return [concatenate(fc1) if experts.gated else fc1, fc2]


def run_layer(layer: Any, x: Tensor) -> list[Tensor]:
    """Output and the gradients of x, router and experts."""
    x = x.clone().requires_grad_()
    output, _ = layer(x)
    output.backward(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x))
    assert x.grad is not None
    return [output.detach(), x.grad, layer.router.weight.grad, *expert_values(layer, lambda parameter: parameter.grad)]


def hidden_states(rank: int, config: Any) -> Tensor:
    values = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank))
    return values.to("cuda", torch.bfloat16)


def distances(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(got, wanted, strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)) for a, b in pairs]


def against_stock(rank: int, changes: dict[str, Any], ep_size: int) -> tuple[bool, list[float]]:
    from tests.helpers.megatron_training import parallel_state

    with parallel_state(expert=ep_size):
        config = config_of(**changes)
        stock, ours = layers(config)
        starts = [expert_values(each, lambda parameter: parameter.data) for each in (stock, ours)]
        same_start = all(map(torch.equal, *starts))
        x = hidden_states(rank, config)
        return same_start, distances(run_layer(ours, x), run_layer(stock, x))


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_close_to_megatrons(gpus: Ranks, variant: str, ep_size: int) -> None:
    for same_start, far in gpus(ep_size).run(against_stock, VARIANTS[variant], ep_size, timeout=600):
        assert same_start
        assert max(far) < 2e-2, far


def accumulated(rank: int) -> tuple[list[float], bool]:
    """main_grad of two microbatches by the GEMMs, against the sum of two gradients."""
    from tests.helpers.megatron_training import parallel_state

    with parallel_state():
        config = config_of()
        _, ours = layers(config)
        x = hidden_states(rank, config)
        for scale in (1.0, 0.5):
            run_layer(ours, x * scale)
        weights = [ours.experts.weight1, ours.experts.weight2]
        wanted = [weight.grad for weight in weights]
        config.gradient_accumulation_fusion = True  # later than Megatron's linear layers, which would want Apex
        for weight in weights:
            weight.grad, weight.grad_added_to_main_grad = None, False
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        for scale in (1.0, 0.5):
            run_layer(ours, x * scale)
        added = all(weight.grad_added_to_main_grad for weight in weights)
        return distances([weight.main_grad for weight in weights], wanted), added


def test_weight_gradients_accumulate_in_main_grad(gpus: Ranks) -> None:
    far, added = gpus(1).run(accumulated, timeout=600)[0]
    assert added
    assert max(far) < 1e-2, far


def rounded(rank: int, ep_size: int) -> tuple[list[int], list[float], bool]:
    from tests.helpers.megatron_training import parallel_state

    routings: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        routings.append(args[1])
        return moe(*args, **kwargs)

    with parallel_state(expert=ep_size):
        config = config_of()
        _, plain = layers(config)
        _, ours = layers(config, RoundingConfig(t=64))
        x = hidden_states(rank, config)
        with patch.object(framework_experts, "moe", noted):
            ours_rounded = run_layer(ours, x)
        far = distances(ours_rounded, run_layer(plain, x))
        ours.eval()
        plain.eval()
        same_eval = torch.equal(ours(x)[0], plain(x)[0])
    return routings[0].counts.rows_SE.sum(0).tolist(), far, same_eval


@pytest.mark.parametrize("ep_size", [1, 2])
def test_rounded_counts_are_full_tiles(gpus: Ranks, ep_size: int) -> None:
    for counts, far, same_eval in gpus(ep_size).run(rounded, ep_size, timeout=600):
        assert all(count % 128 == 0 for count in counts)
        assert 0 < max(far) < 1  # some pairs differ, not the layer
        assert same_eval


def captured_generation(rank: int, ep_size: int) -> float:
    """A replay of a layer in generation, on tokens of its own, against stock."""
    from megatron.core.inference import utils

    from tests.helpers.megatron_training import parallel_state

    with parallel_state(expert=ep_size), torch.no_grad():
        stock, ours = layers(config_of(moe_shared_expert_intermediate_size=256))
        capacity = ours.config.num_moe_experts / ours.config.moe_router_topk
        for layer in (stock, ours):
            layer.eval()
            utils.moe_layer_cache = None
            utils.set_decode_expert_padding(layer, True, capacity_factor=capacity)
        tokens = hidden_states(rank, ours.config)[:32]
        x, stream = torch.zeros_like(tokens), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            ours(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = ours(x)[0]
        x.copy_(tokens)
        graph.replay()
        torch.cuda.synchronize()
        far = distances([output], [stock(tokens)[0]])[0]
        utils.moe_layer_cache = None
        graph.reset()  # NCCL does not destroy a group of which a graph holds a collective
    return far


@pytest.mark.parametrize("ep_size", [1, 2])
def test_generation_is_captured_with_its_experts(gpus: Ranks, ep_size: int) -> None:
    for far in gpus(ep_size).run(captured_generation, ep_size, timeout=600):
        assert far < 2e-2


def tokens_that_differ_when_permuted(rank: int) -> int:
    """As Megatron's own test of the mode: a batch, in another order and in two parts, within its kernels' context."""
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import set_batch_invariant_mode
    from megatron.core.transformer.enums import AttnBackend

    from tests.helpers.megatron_training import parallel_state

    def results(rows: Tensor) -> Tensor:
        x = rows[:, None].clone().requires_grad_()
        output, _ = layer(x)
        output.backward(torch.ones_like(output))
        assert x.grad is not None
        return torch.cat([output.detach(), x.grad], -1)[:, 0]

    mode = {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash, "flash_attention_version": 3}
    plain = {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"}
    with parallel_state(expert=torch.distributed.get_world_size()), set_batch_invariant_mode(True):
        _, layer = layers(config_of(**mode, **plain))
        rows = hidden_states(rank, layer.config).flatten(0, 1)
        whole, differ = results(rows), 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            order = torch.randperm(len(rows), generator=generator)
            cut = int(torch.randint(1, len(rows), (), generator=generator))
            for some in (order[:cut].cuda(), order[cut:].cuda()):
                differ += int((results(rows[some]) != whole[some]).any(1).sum())
    return differ


@pytest.mark.parametrize("ep_size", [1, 2])
def test_no_bit_differs_in_megatrons_batch_invariant_mode(gpus: Ranks, ep_size: int) -> None:
    assert gpus(ep_size).run(tokens_that_differ_when_permuted, timeout=600) == [0] * ep_size
