"""One layer beside Megatron's own: initial weights, outputs, every gradient, and what DDP and optimizer look at."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.experts.activations import concatenate
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import is_near

pytest.importorskip("megatron.core")

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
S, B = 6, 3  # sequence length on a rank, microbatch
VARIANTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu": {"activation_func": fast_gelu},
    "gpt-oss": {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
    },
    "relu2": {"activation_func": squared_relu, "gated_linear_unit": False, "moe_grouped_gemm": True},
    "pre-softmax-scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "switch": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_router_dtype": "fp64"},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"},
    "forced-balance": {"moe_router_force_load_balancing": True},
    "per-token-loss": {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1},
    "padded-to-capacity": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "dropped-by-position": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "probs-on-input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    "probs-on-input-padded": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "22-experts": {"num_moe_experts": 32, "moe_router_topk": 22},
    "shared-gate": {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
}
# Shares of padding, by rank.
PADDED = {"some": [0.3] * 4, "uneven": [0.0, 1.0, 0.6, 0.1]}


def layers(config: Any, options: Any = None) -> tuple[Any, Any]:
    """Stock and ours of one config, from one seed."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.parallel_state import get_expert_model_parallel_rank

    from sonic_ep.integrations.megatron import use_sonic_ep

    stock_spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    built: list[Any] = []
    for spec in (stock_spec, use_sonic_ep(stock_spec, options)):
        torch.manual_seed(5)
        layer: Any = spec(config=config)
        layer.set_layer_number(1)
        for bias in (parameter for name, parameter in layer.named_parameters() if "bias" in name):
            torch.nn.init.normal_(bias, std=0.1, generator=torch.Generator().manual_seed(bias.numel()))
        # Ranks draw the same numbers, and between equal experts nothing depends on the router.
        for parameter in layer.experts.parameters():
            parameter.data *= 1 + get_expert_model_parallel_rank() / 2
        built.append(layer)
    return built[0], built[1]


def expert_weights(layer: Any, values: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """`values` of the experts' parameters, stacked, gate rows first."""
    experts = layer.experts
    if not hasattr(experts, "local_experts"):
        count = experts.num_local_experts
        named = {
            name: values(parameter).view(count, -1, *parameter.shape[2:])
            for name, parameter in experts.named_parameters()
        }
        return {name: concatenate(v) if "1" in name and experts.gated else v for name, v in named.items()}
    names = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}
    names |= {"bias1": "linear_fc1.bias", "bias2": "linear_fc2.bias"} if experts.config.add_bias_linear else {}
    return {
        ours: torch.stack([values(each.get_parameter(name)) for each in experts.local_experts])
        for ours, name in names.items()
    }


def set_biases(stock: Any, ours: Any) -> None:
    for name, value in expert_weights(stock, lambda parameter: parameter.data).items():
        if "bias" in name:
            interleaved = value.view(value.shape[0], 2, -1).transpose(1, 2).reshape(value.shape)
            ours.experts.get_parameter(name).data.copy_((interleaved if name == "bias1" else value).flatten())


def run_layer(layer: Any, x: Tensor, padding_mask: Tensor | None) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(7)  # for the logits of a forced balance
    x = x.clone().requires_grad_()
    output, bias = layer(x, padding_mask=padding_mask)
    assert bias is None
    if padding_mask is None:
        padding_mask = torch.zeros(B, S, dtype=torch.bool)
    output[~padding_mask.T].square().sum().backward()
    results = {"output": output.detach()[~padding_mask.T], "padding": output.detach()[padding_mask.T], "x": x.grad}
    results |= {f"d{name}": value for name, value in expert_weights(layer, lambda parameter: parameter.grad).items()}
    others = [(name, parameter) for name, parameter in layer.named_parameters() if not name.startswith("experts.")]
    return results | {f"d{name}": parameter.grad for name, parameter in others}


def is_close(got: Tensor, wanted: Tensor) -> bool:
    return is_near(got, wanted, share=1e-5)


def compare_variants(
    rank: int,
    groups: dict[str, int],
    variants: list[str],
    changes: dict[str, Any],
    padded: str = "some",
) -> dict[str, list[str]]:
    """What differs, by variant. Of padding the output is 0, or that of the shared expert."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    different: dict[str, list[str]] = {}
    with parallel_state(**groups):
        for variant in variants:
            # Gradients of routers would else be what rounding leaves of the experts' outputs.
            config = gpt_config(init_method_std=0.2, **VARIANTS[variant] | changes)
            x = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank))
            mask = torch.rand(B, S, generator=torch.Generator().manual_seed(rank)) < PADDED[padded][rank]
            stock, ours = layers(config)
            start = [expert_weights(each, lambda parameter: parameter.data) for each in (stock, ours)]
            different[variant] = [f"initial {n}" for n in start[0] if "w" in n and not start[1][n].equal(start[0][n])]
            set_biases(stock, ours)
            wanted, got = run_layer(stock, x, mask), run_layer(ours, x, mask)
            assert wanted.keys() == got.keys()
            wanted["padding"] = torch.zeros_like(wanted["padding"])  # stock computes it, and nobody reads it
            if ours.use_shared_expert:
                wanted["padding"] = ours.shared_experts(x)[mask.T].detach()
            close = {name: is_close(got[name], value) for name, value in wanted.items()}
            different[variant] += [name for name, fits in close.items() if not fits]
    return different


@pytest.mark.parametrize("groups", [{"expert": 2}, {"expert": 4, "context": 2}, {"expert": 2, "tensor": 2}], ids=str)
def test_outputs_and_gradients_are_megatrons(ranks: Ranks, groups: dict[str, int]) -> None:
    for different in ranks(4).run(compare_variants, groups, list(VARIANTS), {}, timeout=600):
        assert different == {variant: [] for variant in VARIANTS}


@pytest.mark.parametrize(
    ("size", "groups"), [(2, {"expert": 2}), (4, {"expert": 4}), (4, {"expert": 2, "tensor": 2})], ids=str
)
def test_ranks_may_have_any_number_of_tokens(ranks: Ranks, size: int, groups: dict[str, int]) -> None:
    """One has none. There stock's loss is 0 / 0, unless TP ranks sum it, and its gradients are compared without it."""
    variants = ["swiglu", "gpt-oss", "pre-softmax-scaled", "sigmoid", "per-token-loss", "shared-gate"]
    changes = {} if "tensor" in groups else {"moe_router_load_balancing_type": "none"}
    for different in ranks(size).run(compare_variants, groups, variants, changes, "uneven", timeout=600):
        assert different == {variant: [] for variant in variants}


def test_parts_of_experts_are_megatrons(ranks: Ranks) -> None:
    variants = ["swiglu", "relu2", "switch", "probs-on-input", "padded-to-capacity", "shared-gate"]
    groups, two = {"expert": 2, "expert_tensor": 2}, {"num_moe_experts": 2}
    for different in ranks(4).run(compare_variants, groups, variants, two, timeout=600):
        assert different == {variant: [] for variant in variants}


def refusals_of_parts(rank: int) -> list[str]:
    from sonic_ep import RoundingConfig
    from sonic_ep.integrations.megatron import SonicEPOptions
    from tests.helpers.megatron_training import gpt_config, parallel_state

    cases: list[tuple[dict[str, Any], SonicEPOptions]] = [
        ({"moe_ffn_hidden_size": 25}, SonicEPOptions()),
        ({}, SonicEPOptions(rounding=RoundingConfig())),
    ]
    said = []
    with parallel_state(expert_tensor=2):
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from sonic_ep.integrations.megatron.groups import divide_experts

        for changes, options in cases:
            with pytest.raises(ValueError, match=r"^num_moe_experts=3 .* 2 parts, but .*; set expert_") as caught:
                divide_experts(get_default_pg_collection(), gpt_config(num_moe_experts=3, **changes), options)
            said.append(str(caught.value))
    return said


def test_what_cannot_be_cut_in_parts_says_why(ranks: Ranks) -> None:
    reasons = ("moe_ffn_hidden_size=25", "options.rounding")
    for said in ranks(2).run(refusals_of_parts):
        assert [reason in text for reason, text in zip(reasons, said, strict=True)] == [True] * 2


def drawn_later(rank: int) -> list[bool]:
    """Whether a layer that is made without memory has, once it gets some, the values and marks of any other."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import gpt_config, parallel_state

    spec: Any = use_sonic_ep(get_moe_module_spec(use_te=False, num_experts=8))
    with parallel_state(expert=2):
        config = gpt_config(use_cpu_initialization=False, init_model_with_meta_device=True)
        with torch.device("meta"):
            experts = spec(config=config).experts
        assert experts.weight1.is_meta
        assert experts.weight1.allreduce is False
        experts.to_empty(device="cpu")
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(3)
        experts.reset_parameters()
        config = gpt_config(use_cpu_initialization=True)
        other = spec(config=config).experts
        other.config.use_cpu_initialization = False
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(3)
        other.reset_parameters()
        pairs = [(experts.weight1, other.weight1), (experts.weight2, other.weight2)]
        names = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride")
        return [torch.equal(one, two) and all(getattr(one, n) == getattr(two, n) for n in names) for one, two in pairs]


def test_experts_on_the_meta_device_are_drawn_when_they_get_memory(ranks: Ranks) -> None:
    assert ranks(2).run(drawn_later) == [[True, True]] * 2


def attributes(rank: int, groups: dict[str, int]) -> list[list[list[Any]]]:
    """Of fc1 and fc2: stock's values, then ours."""
    from tests.helpers.megatron_training import gpt_config, parallel_state

    names = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride")
    with parallel_state(**groups):
        stock, ours = layers(gpt_config())
        assert ours.router.weight.sequence_parallel == (groups.get("tensor", 1) > 1)
        experts = stock.experts.local_experts[0]
        pairs = [(experts.linear_fc1.weight, ours.experts.weight1), (experts.linear_fc2.weight, ours.experts.weight2)]
        return [[[getattr(parameter, name) for name in names] for parameter in pair] for pair in pairs]


@pytest.mark.parametrize(
    "groups", [{"expert": 1}, {"expert": 2}, {"expert": 1, "tensor": 2}, {"expert": 2, "tensor": 2}], ids=str
)
def test_parameters_carry_megatrons_attributes(ranks: Ranks, groups: dict[str, int]) -> None:
    for (stock, ours), dim in zip(ranks(2).run(attributes, groups)[0], (0, 1), strict=True):
        assert ours == stock
        assert ours[2] == dim


def with_groups_of_its_own(rank: int) -> tuple[list[str], list[str]]:
    """Keys of a sharded state dict, stock's and ours, where Megatron has no global groups."""
    import torch.distributed as dist
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_cpu import megatron_on_cpu
    from tests.helpers.megatron_training import gpt_config, parallel_state

    with parallel_state(expert=2):
        config = gpt_config()
    world, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(2)][rank]
    groups: Any = ProcessGroupCollection()
    groups.tp = groups.expt_tp = groups.cp = groups.tp_cp = groups.expt_dp = alone
    groups.ep = groups.tp_ep = groups.tp_dp_cp = groups.dp = groups.dp_cp = world
    spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    found = []
    with megatron_on_cpu():
        for each in (spec, use_sonic_ep(spec)):
            layer = each(config=config, pg_collection=groups)
            layer.set_layer_number(1)
            layer(torch.randn(S, B, config.hidden_size))[0].sum().backward()
            found.append(sorted(layer.sharded_state_dict("mlp.", (), {"dp_cp_group": world})))
    return found[0], found[1]


def test_groups_of_a_programs_own_are_enough(ranks: Ranks) -> None:
    for stock, ours in ranks(2).run(with_groups_of_its_own):
        assert "mlp.router.weight" in stock
        assert "mlp.router.weight" in ours


def misuses(rank: int) -> list[str]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from sonic_ep.integrations.megatron.layer import SonicEPMoELayer
    from tests.helpers.megatron_training import gpt_config, parallel_state

    messages = []
    with parallel_state(tensor=2):
        _, ours = layers(gpt_config(sequence_parallel=False))
        assert isinstance(ours, MoELayer)
        x = torch.randn(S, B, ours.config.hidden_size)
        calls = (
            lambda: ours(x),
            lambda: SonicEPMoELayer(gpt_config(moe_mlp_glu_interleave_size=32)),
            lambda: SonicEPMoELayer(gpt_config(moe_shared_expert_intermediate_size=8)),
            lambda: SonicEPMoELayer(gpt_config(moe_latent_size=16)),
        )
        for call in calls:
            with pytest.raises(ValueError, match="; (set|install) ") as caught:
                call()
            messages.append(str(caught.value))
        ours.eval()  # every TP rank has all tokens then, and computes them
        output, _ = ours(x)
        torch.testing.assert_close(output, ours(x)[0])
    return messages


def test_misuse_is_refused(ranks: Ranks) -> None:
    no_sequence, interleaved, shared, latent = ranks(2).run(misuses)[0]
    assert "set sequence_parallel=True" in no_sequence
    assert "moe_mlp_glu_interleave_size=32" in interleaved
    assert "set MoESubmodules.shared_experts" in shared
    assert "moe_latent_size=16 needs Transformer Engine" in latent


def fused_and_plain(rank: int, overlap: bool) -> tuple[list[Any], list[Any], bool]:
    """Two curves over several microbatches: weight gradients in main_grad by DDP's hook, and by the GEMM."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    curves, added = [], []
    for fused in (False, True):
        with parallel_state(expert=2):
            spec = use_sonic_ep(get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm"))
            run = Run(gpt_config(), spec, overlap=overlap, distributed_optimizer=overlap)
            # Megatron's own layers have read it by now, and have no fused kernel on the CPU.
            run.config.gradient_accumulation_fusion = fused
            curves.append([tuple(step) for step in run.train(4)])
            named = [(name, p.grad_added_to_main_grad) for name, p in run.models[0].named_parameters()]
            added.append({is_added for name, is_added in named if "experts.weight" in name})
    return curves[0], curves[1], added == [{False}, {True}]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_gradient_accumulation_fusion_changes_no_gradient(ranks: Ranks, overlap: bool) -> None:
    plain, fused, was_used = ranks(2).run(fused_and_plain, overlap, timeout=600)[0]
    assert was_used
    for step, wanted in zip(fused, plain, strict=True):
        assert step[:2] == pytest.approx(wanted[:2], abs=1e-6)


def in_steps(layer: Any, x: Tensor) -> list[Any]:
    """Output and gradients of a layer entered as overlapped batches do: each step's graph is cut from the next."""
    x = x.clone().requires_grad_()
    tokens, probs = layer.preprocess(x, *layer.route(x))
    shared = layer.shared_experts_compute(x)
    cut = [each.detach().requires_grad_() for each in (tokens, probs)]
    dispatched = layer.dispatch(*cut)
    cut_again = [each.detach().requires_grad_() for each in dispatched]
    output, _ = layer.routed_experts_compute(*cut_again)
    last = output.detach().requires_grad_()
    result = layer.postprocess(layer.combine(last), None if shared is None else shared.detach())
    result.square().sum().backward()
    output.backward(last.grad)
    torch.autograd.backward(dispatched, [each.grad for each in cut_again])
    layer.backward_dw()
    steps = [tokens, probs], [each.grad for each in cut]
    if shared is not None:
        steps[0].append(shared)
        steps[1].append(2 * result.detach())
    torch.autograd.backward(*steps)
    return [result.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def whole(layer: Any, x: Tensor) -> list[Any]:
    x = x.clone().requires_grad_()
    result, _ = layer(x)
    result.square().sum().backward()
    return [result.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def stepped_and_whole(rank: int, rounded: bool) -> tuple[list[bool], list[bool]]:
    from sonic_ep import RoundingConfig
    from sonic_ep.integrations.megatron import SonicEPOptions
    from tests.helpers.megatron_training import gpt_config, parallel_state

    options = SonicEPOptions(rounding=RoundingConfig(t=4, G=8) if rounded else None)
    with parallel_state(expert=2):
        config = gpt_config(moe_shared_expert_intermediate_size=40, overlap_moe_expert_parallel_comm=True)
        x = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank))
        found = []
        for run in (whole, in_steps):
            layer = layers(config, options)[1]
            found.append(run(layer, x))
            names = ["rounded", *layer.token_dispatcher.cudagraph_attrs]
            assert all(getattr(layer.token_dispatcher, name) is None for name in names)
    return [is_close(a, b) for a, b in zip(*found, strict=True)], [float(a.norm()) > 0 for a in found[0]]


@pytest.mark.parametrize("rounded", [False, True], ids=["top-k", "rounded"])
def test_a_layer_entered_step_by_step_computes_the_same(ranks: Ranks, rounded: bool) -> None:
    for close, nonzero in ranks(2).run(stepped_and_whole, rounded):
        assert all(close)
        assert all(nonzero)


class Linear(torch.nn.Linear):
    """What stands for Transformer Engine's linear layer."""

    def __init__(self, *sizes: int, bias: bool, name: str | None, **_: object) -> None:
        super().__init__(*sizes, bias=bias)
        self.name = name

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), None


def latent(rank: int) -> tuple[list[bool], list[bool]]:
    """Our layer of a latent size against stock's with SequentialMLP as experts."""

    from megatron.core.transformer.moe import moe_layer

    from tests.helpers.megatron_training import gpt_config, parallel_state

    with (
        parallel_state(expert=2),
        patch.object(moe_layer, "TELinear", Linear),
        patch.object(moe_layer, "HAVE_TE", True),
    ):
        config = gpt_config(moe_latent_size=16, moe_shared_expert_intermediate_size=40)
        x = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank))
        stock, ours = layers(config)
        for name in ("fc1_latent_proj", "fc2_latent_proj", "router", "shared_experts"):
            getattr(ours, name).load_state_dict(getattr(stock, name).state_dict())
        assert ours.experts.weight2.shape[1] == 16
        wanted, got = run_layer(stock, x, None), run_layer(ours, x, None)
        return [is_close(got[name], value) for name, value in wanted.items()], [ours.fc1_latent_proj.name is None]


def test_experts_of_a_latent_size_are_megatrons(ranks: Ranks) -> None:
    for close, named in ranks(2).run(latent):
        assert all(close)
        assert all(named)
