"""The AutoEP layer by itself: beside stock's on unequal and no tokens, token rounding, groups, fields of the config."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonic_ep import RoundingConfig, TransportConfig
from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
from tests.helpers.deepspeed_moe import noted_routings
from tests.helpers.hugging_face import PRESETS, adam_of, batches, expert_parallel, loss_of, model_of

Ranks = Callable[[int], RankPool]
H = 32
ROUNDING = RoundingConfig(t=4, G=8)


def replaced(preset: str, ep_size: int, ours: bool, options: Any = None, **fields: Any) -> nn.Module:
    """A model whose MoE blocks DeepSpeed has replaced, without an engine."""
    from deepspeed.module_inject.auto_ep import AutoEP as Replacer
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    from sonic_ep.integrations.deepspeed import AutoEP

    AutoEP.install(options) if ours else AutoEP.uninstall()
    try:
        model = model_of(preset)
        replacer = Replacer(model, parse_autoep_config(expert_parallel(ep_size, preset, **fields)["expert_parallel"]))
        rank = dist.get_rank() if dist.is_initialized() else 0
        replacer.replace_moe_layers(replacer.ep_parser(), ep_size, rank % ep_size)
    finally:
        AutoEP.uninstall()
    return model


def last_layer(*args: Any, **kwargs: Any) -> Any:
    layer: Any = replaced(*args, **kwargs)
    layer = layer.model.layers[-1].mlp
    if dist.is_initialized():
        layer.set_deepspeed_parallelism()
    return layer


def run_layer(layer: Any, tokens: int) -> dict[str, Tensor]:
    """Output and local gradients, before anybody reduces or scales them."""
    x = torch.randn(1, tokens, H, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
    out = layer(x)
    (out * torch.linspace(-1, 1, H)).sum().backward()
    assert x.grad is not None
    grads = {name: weight.grad for name, weight in layer.named_parameters() if weight.requires_grad}
    return {"out": out.detach(), "dx": x.grad, "counts": layer.tokens_per_expert.clone(), **grads}


def against_stock(rank: int, preset: str, ep_size: int, tokens: tuple[int, ...]) -> None:
    with deepspeed_world():
        stock = run_layer(last_layer(preset, ep_size, False), tokens[rank])
        ours = run_layer(last_layer(preset, ep_size, True), tokens[rank])
    assert ours.keys() == stock.keys()
    for name, wanted in stock.items():
        torch.testing.assert_close(
            ours[name], wanted, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tokens", [(24, 24), (17, 5), (9, 0)], ids=["equal", "unequal", "none"])
def test_outputs_and_local_gradients_are_those_of_stock(ranks: Ranks, preset: str, tokens: tuple[int, ...]) -> None:
    ranks(2).run(against_stock, preset, 2, tokens)


def test_groups_of_two_among_four_ranks(ranks: Ranks) -> None:
    ranks(4).run(against_stock, "deepseek_v3", 2, (11, 0, 3, 8))


def groups_used(rank: int) -> tuple[int, int, bool]:
    """Process groups after an engine with stock's layers, and with ours; and whose group our layers hold."""
    from deepspeed.utils import groups
    from torch.distributed import distributed_c10d

    from sonic_ep.integrations.deepspeed import AutoEP

    counts, own = [], False
    for ours in (False, True):
        AutoEP.install() if ours else AutoEP.uninstall()
        with deepspeed_world():
            before = len(distributed_c10d._world.pg_map)
            run = engine(model_of("qwen3_moe"), zero=1, optimizer=adam_of, **expert_parallel(2, "qwen3_moe"))
            train(run, batches(rank, 1), loss_of)
            counts.append(len(distributed_c10d._world.pg_map) - before)
            layer = run.module.model.layers[0].mlp
            own = ours and layer.ep.process_group is groups._get_expert_parallel_group("ep_size_2")
    AutoEP.uninstall()
    return counts[0], counts[1], own


def test_deepspeeds_groups_are_used_and_none_is_made_beside_them(ranks: Ranks) -> None:
    for stock, ours, own in ranks(4).run(groups_used):
        assert ours == stock
        assert own


def rounded(rank: int, zero: int) -> tuple[list[float], list[list[int]], bool]:
    """Losses of training, row counts of each expert in the whole group, and whether eval is as without rounding."""
    from sonic_ep.integrations.deepspeed import AutoEP, SonicEPOptions

    AutoEP.install(SonicEPOptions(rounding=ROUNDING))
    try:
        with deepspeed_world():
            run = engine(model_of("qwen3_moe"), zero=zero, optimizer=adam_of, **expert_parallel(2, "qwen3_moe"))
            layer: Any = run.module.model.layers[0].mlp
            routings = noted_routings(layer.experts)
            losses = [step.loss for step in train(run, batches(rank, 12, sequences=4), loss_of)]
            num_trained = len(routings)
            run.eval()
            ids = batches(rank, 1, start=99)[0]
            with torch.no_grad():
                run(input_ids=ids, use_cache=False)
            plain = layer.router.config.replace(rounding=RoundingConfig(mode="off"))
            layer.router.bind(plain)
            with torch.no_grad():
                run(input_ids=ids, use_cache=False)
            totals = [routing.counts.rows_SE.sum(0).tolist() for routing in routings]
            plain_in_eval = totals[-1] == totals[-2] and any(total % ROUNDING.G for total in totals[-1])
            return losses, totals[:num_trained], plain_in_eval
    finally:
        AutoEP.uninstall()


@pytest.mark.parametrize("zero", [1, 3])
def test_token_rounding_trains_and_leaves_eval_alone(ranks: Ranks, zero: int) -> None:
    for losses, totals, plain_in_eval in ranks(2).run(rounded, zero):
        assert losses[-1] < losses[0] - 0.5
        assert all(total % ROUNDING.G == 0 for expert in totals for total in expert)
        assert plain_in_eval


def layer_with(transport: TransportConfig) -> Any:
    from sonic_ep.integrations.deepspeed import SonicEPOptions

    rounding = RoundingConfig(t=4, G=8, capacity_factor=1.25)
    return last_layer("qwen3_moe", 2, True, SonicEPOptions(rounding=rounding, transport=transport))


def transport_asked_for(rank: int) -> tuple[bool, str]:
    from sonic_ep.transports import transport_for

    all_to_all = TransportConfig(kind="all_to_all", timeout=5)
    with deepspeed_world():
        layer = layer_with(all_to_all)
        run_layer(layer, 24)
        (held,) = layer.ep.held.values()
        with pytest.raises(ValueError, match="cannot be had") as caught:
            run_layer(layer_with(TransportConfig(kind="symmetric")), 24)
        return held is transport_for(layer.ep, all_to_all), str(caught.value)


def test_the_transport_is_the_one_asked_for(ranks: Ranks) -> None:
    for is_asked_for, message in ranks(2).run(transport_asked_for):
        assert is_asked_for
        assert "kind='symmetric' with exact buffers cannot be had: the rows are on a cpu device" in message


def static_and_exact(rank: int, folder: str) -> tuple[list[dict[str, Tensor]], str]:
    from sonic_ep.transports import transport_for
    from tests.helpers.static_buffers import static_buffers

    config = TransportConfig(kind="symmetric", buffers="static")
    with deepspeed_world():
        exact, static = layer_with(TransportConfig()), layer_with(config)
        results = [run_layer(exact, 24)]
        transport: Any = transport_for(static.ep, config)
        with static_buffers(transport, folder):
            results.append(run_layer(static, 24))
            with pytest.raises(ValueError, match="buffers='static'") as caught:
                run_layer(static, 24 + rank)
            static.eval()(torch.randn(1, 24 + rank, H))  # plain top-K knows no bound: sizes are read
    return results, str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels: runs with CUDA_VISIBLE_DEVICES=")
def test_static_buffers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for (exact, static), message in ranks(2).run(static_and_exact, str(tmp_path)):
        torch.testing.assert_close(static, exact)
        assert "rank 1: T=25 tokens, but transport.buffers='static' keeps to the first step's 24" in message


def recomputed(rank: int, zero: int) -> list[Any]:
    """Stock's steps and ours, with Hugging Face's gradient checkpointing and load-balancing loss."""
    from sonic_ep.integrations.deepspeed import AutoEP

    runs = []
    for ours in (False, True):
        AutoEP.install() if ours else AutoEP.uninstall()
        with deepspeed_world():
            model: Any = model_of("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1.0)
            model.gradient_checkpointing_enable()
            run = engine(model, zero=zero, optimizer=adam_of, **expert_parallel(2, "qwen3_moe"))
            runs.append(train(run, batches(rank, 4), loss_of))
    AutoEP.uninstall()
    return runs


@pytest.mark.parametrize("zero", [1, 3])
def test_gradient_checkpointing_and_auxiliary_loss_are_as_with_stock(ranks: Ranks, zero: int) -> None:
    stock, ours = ranks(2).run(recomputed, zero)[0]
    assert stock[0].loss > 6  # with the auxiliary loss
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_apply": "pre"}, "score_apply='pre' is not supported (weights act on the experts' output); set score"),
        ({"comm_backend": "deepep"}, "comm_backend='deepep' is not supported (the layer brings its own transport)"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2 is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replaced("qwen3_moe", 1, True, **fields)


def test_tensor_parallelism_is_refused() -> None:
    layer: Any = last_layer("qwen3_moe", 1, True)
    with pytest.raises(ValueError, match="autotp_size=2 with expert_parallel is not supported"):
        layer.set_deepspeed_parallelism(folding_group_handles=SimpleNamespace(spec=SimpleNamespace(tp_size=2)))


@pytest.mark.parametrize(
    ("name", "alpha", "limit"),
    [
        ("geglu_tanh", 0.0, 0.0),
        ("swiglu_clamped", 0.0, 10.0),
        ("swiglu_clamped", 0.0, 7.0),
        ("swiglu_oai", 1.702, 7.0),
    ],
)
def test_activations_are_those_of_deepspeed(name: str, alpha: float, limit: float) -> None:
    from deepspeed.moe.ep_experts import apply_expert_activation

    from sonic_ep.integrations.deepspeed.autoep_fields import activation_of
    from sonic_ep.kernels.experts.activations import activation_named

    spec = dataclasses.replace(
        spec_of(), expert_activation=name, expert_activation_alpha=alpha, expert_activation_limit=limit
    )
    h = 20 * torch.randn(50, 2)
    wanted = apply_expert_activation(h[:, :1], h[:, 1:], name, alpha, limit, fused=False)
    torch.testing.assert_close(activation_named(activation_of(spec)).forward(h), wanted)


def test_other_limits_are_refused() -> None:
    from sonic_ep.integrations.deepspeed.autoep_fields import activation_of

    spec = dataclasses.replace(spec_of(), expert_activation="swiglu_clamped", expert_activation_limit=8.0)
    with pytest.raises(ValueError, match=r"^expert_activation='swiglu_clamped' with alpha .*, limit 8.0 has no kernel"):
        activation_of(spec)


def test_group_scores_of_deepseek_v2_are_refused() -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    from sonic_ep.integrations.deepspeed.autoep_fields import check

    with pytest.raises(ValueError, match="scores groups of experts by 'max', which is not supported"):
        check(
            dataclasses.replace(spec_of(), num_expert_groups=4, num_limited_groups=2, group_score_func="max"),
            AutoEPConfig(),
        )


def spec_of() -> Any:
    from deepspeed.module_inject.auto_ep import AutoEP as Replacer
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    return Replacer(
        model_of("qwen3_moe"), parse_autoep_config({"enabled": True, "preset_model": "qwen3_moe"})
    ).ep_parser()[0]


def test_an_unknown_field_with_a_value_is_refused() -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    from sonic_ep.integrations.deepspeed.autoep_fields import check

    config = dataclasses.make_dataclass("Newer", [("shiny", int, dataclasses.field(default=0))], bases=(AutoEPConfig,))
    check(spec_of(), config())
    with pytest.raises(ValueError, match="expert_parallel.shiny=1 is not known"):
        check(spec_of(), config(shiny=1))


@pytest.mark.parametrize("fields", [{"combine_impl": "legacy_bmm"}, {"async_split_plan": True}, {"comm_num_sm": 4}])
def test_what_does_nothing_is_said(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.warns(UserWarning, match=f"without effect in sonic_ep's AutoEP layer: {name}="):
        replaced("qwen3_moe", 1, True, **fields)


def test_the_table_has_every_field_of_deepspeed_and_the_page_has_the_table() -> None:
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig

    from sonic_ep.integrations.deepspeed.autoep_fields import FIELDS, table

    wanted = {field.name for field in dataclasses.fields(AutoEPConfig) if not field.name.startswith("_")}
    assert {field.name for field in FIELDS} == wanted
    page = Path(__file__).resolve().parents[3] / "docs" / "deepspeed_autoep.md"
    assert "\n".join(table()) in page.read_text(encoding="utf-8")
