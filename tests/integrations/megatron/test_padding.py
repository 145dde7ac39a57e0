"""`padding_mask` and packed sequences in a GPT: padding reaches no expert, and real tokens train as with MoELayer."""

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import RoundingConfig
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near, is_near

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
S, B, E = 9, 4, 8


def dispatched(rank: int, rounding: Any) -> list[list[Tensor]]:
    """Pairs and tokens of all ranks, count for the bias, output and gradients: with padding, and without its rows."""
    from sonic_ep.integrations import framework_experts as module
    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config, parallel_state

    found, options = [], SonicEPOptions(rounding=rounding)
    config: dict[str, Any] = {"moe_router_load_balancing_type": "none", "init_method_std": 0.2}
    config |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    is_padding = torch.rand(B, S, generator=torch.Generator().manual_seed(rank)) < (0.4, 0.9)[rank]
    real, moe = ~is_padding.T, module.moe
    for has_padding in (True, False):
        with parallel_state(expert=2), patch.object(module, "moe") as noted:
            noted.side_effect = moe
            torch.manual_seed(3)
            layer: Any = get_sonic_ep_moe_spec(E, options=options)(config=gpt_config(**config))
            layer.set_layer_number(1)
            x = torch.randn(S, B, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
            rows = x if has_padding else x[real][:, None]
            y, _ = layer(rows.requires_grad_(), padding_mask=is_padding if has_padding else None)
            y.square().sum().backward()
            counts, counter_E = noted.call_args.args[1].counts, layer.router.local_tokens_per_expert
            grads = [x.grad[real] if has_padding else rows.grad[:, 0]] + [each.grad for each in layer.parameters()]
            found.append(
                [counts.rows_SE, counts.tokens_S, counter_E, (y[real] if has_padding else y[:, 0]).detach(), *grads]
            )
            assert noted.call_args.args[0].shape[0] == real.sum()
    return found


@pytest.mark.parametrize("rounding", [None, RoundingConfig(mode="up", t=4, G=8)], ids=["top-k", "rounded"])
def test_padding_is_neither_rounded_nor_dispatched(ranks: Ranks, rounding: Any) -> None:
    for with_padding, without in ranks(2).run(dispatched, rounding):
        for got, wanted in zip(with_padding[:3], without[:3], strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(with_padding[3:], without[3:], strict=True):
            assert_near(got, wanted, share=1e-5)


def overlapped(rank: int) -> list[list[Tensor]]:
    """Output and gradients with rounding, and with rounding before a cut of autograd's graph."""
    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec
    from tests.helpers.megatron_training import gpt_config, parallel_state

    found, options = [], SonicEPOptions(rounding=RoundingConfig(mode="up", t=4, G=8))
    is_padding = torch.rand(B, S, generator=torch.Generator().manual_seed(rank)) < (0.4, 1.0)[rank]
    for overlaps in (False, True):
        with parallel_state(expert=2):
            torch.manual_seed(3)
            config = gpt_config(init_method_std=0.2, overlap_moe_expert_parallel_comm=overlaps)
            layer: Any = get_sonic_ep_moe_spec(E, options=options)(config=config)
            layer.set_layer_number(1)
            x = torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            y, _ = layer(x, padding_mask=is_padding)
            y.square().sum().backward()
            assert not y[is_padding.T].any()
            found.append([y.detach(), x.grad, *(each.grad for each in layer.parameters())])
    return found


def test_padding_is_not_rounded_before_a_cut_either(ranks: Ranks) -> None:
    for whole, cut in ranks(2).run(overlapped):
        for got, wanted in zip(cut, whole, strict=True):
            assert torch.equal(got, wanted)


def waits_for_padding(rank: int) -> list[str]:
    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec
    from tests.helpers.host_reads import noted_step
    from tests.helpers.megatron_training import gpt_config, parallel_state

    options = SonicEPOptions(rounding=RoundingConfig(mode="up", t=4, G=8))
    is_padding = torch.rand(B, S, generator=torch.Generator().manual_seed(rank)) < 0.4
    with parallel_state(expert=2):
        layer: Any = get_sonic_ep_moe_spec(E, options=options)(config=gpt_config())
        layer.set_layer_number(1)
        x = torch.randn(S, B, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
        with noted_step() as step:
            layer(x, padding_mask=is_padding)
    return [read for read in step.reads if "given_routing.py" in read]


def test_with_rounding_too_the_host_waits_once_for_the_padding(ranks: Ranks) -> None:
    for reads in ranks(2).run(waits_for_padding):
        assert len(reads) == 1, reads


def without_tokens(rank: int, groups: dict[str, int], kind: str) -> tuple[bool, bool]:
    """Whether gradients are finite, and what the router gets any; the last ranks have padding alone."""
    from tests.helpers.megatron_training import gpt_config, parallel_state
    from tests.integrations.megatron.test_layer import B, S, layers, run_layer

    with parallel_state(**groups):
        _, layer = layers(gpt_config(moe_router_load_balancing_type=kind))
        x = torch.randn(S, B, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
        results = run_layer(layer, x, torch.full((B, S), rank >= 2))
        assert layer.router.get_aux_loss_coeff(kind) > 0
        return all(bool(value.isfinite().all()) for value in results.values()), bool(results["drouter.weight"].any())


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("groups", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_losses_of_no_tokens_are_finite(ranks: Ranks, groups: dict[str, int], kind: str) -> None:
    assert ranks(4).run(without_tokens, groups, kind) == [(True, rank < 2) for rank in range(4)]


def padded_step(data: Iterator[Tensor], model: Any) -> Any:
    """As megatron_training's, of sequences that end early."""
    from tests.helpers.megatron_training import SEQUENCE

    tokens = next(data)
    positions = torch.arange(SEQUENCE)[None]
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    mask = positions >= 1 + int(tokens[0, 0]) % SEQUENCE
    output = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous(), padding_mask=mask)

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        mean = output[~mask].float().mean()
        return mean, mean.detach().clone()

    return output, loss


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "EP2-full": (2, {"expert": 2}, FULL),
    "EP2-moe": (2, {"expert": 2}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "PP2-EP2": (4, {"pipeline": 2, "expert": 2}, {"moe_shared_expert_intermediate_size": 40}),
    "TP2-EP2": (2, {"tensor": 2, "expert": 2}, {"moe_z_loss_coeff": 0.1}),
}


def padded_curves(rank: int, groups: dict[str, int], changes: dict[str, Any]) -> list[list[Any]]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    curves, stock = [], get_gpt_layer_local_spec(num_experts=E, normalization="RMSNorm")
    for spec in (stock, use_sonic_ep(stock)):
        with parallel_state(**groups):
            run = Run(gpt_config(**changes), spec, batch=8)
            run.forward_step = padded_step
            curves.append(run.train(4))
    return curves


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_padded_microbatches_train_as_megatrons(ranks: Ranks, case: Any) -> None:
    size, groups, changes = case
    stock, ours = ranks(size).run(padded_curves, groups, changes, timeout=600)[0]
    for got, wanted in zip(ours, stock, strict=True):
        assert got[:2] == pytest.approx(wanted[:2], rel=1e-5)
        assert got.aux == pytest.approx(wanted.aux, rel=1e-5)


class Attention(nn.Module):
    """What stands for Transformer Engine's attention, which alone takes packed sequences: causal in each."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Tensor:
        q, k, v = (each if each.dim() == 3 else each[:, 0] for each in (q, k, v))
        positions, sequence = torch.arange(q.shape[0]), torch.zeros(q.shape[0])
        if packed_seq_params is not None:
            sequence = torch.searchsorted(packed_seq_params.cu_seqlens_q_padded, positions, right=True)
        seen = (sequence[:, None] == sequence) & (positions[:, None] >= positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(2), v)
        return out if packed_seq_params is not None else out.flatten(1)[:, None]


LENGTHS = [5, 7, 4], [3, 8, 2]  # of the sequences of each rank


class Pack:
    """The sequences of one rank. gap: rows of padding behind each."""

    def __init__(self, rank: int, gap: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.tokens = [torch.randint(64, (length,), generator=generator) for length in LENGTHS[rank]]
        self.directions = [torch.randn(length, 64, generator=generator) for length in LENGTHS[rank]]
        self.starts = [0, *accumulate(length + gap for length in LENGTHS[rank])]
        self.ids, self.mask = torch.zeros(1, self.starts[-1], dtype=torch.long), torch.ones(1, self.starts[-1]).bool()
        for start, tokens in zip(self.starts, self.tokens, strict=False):
            self.ids[0, start : start + len(tokens)] = tokens
            self.mask[0, start : start + len(tokens)] = False

    def of(self, values: Tensor) -> list[Tensor]:
        """Those of each sequence."""
        lengths = [len(each) for each in self.tokens]
        return [values[start : start + length] for start, length in zip(self.starts, lengths, strict=False)]

    def params(self, tokens_per_sample: int | None = None) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        cu = torch.tensor([0, *accumulate(len(each) for each in self.tokens)], dtype=torch.int32)
        padded = torch.tensor(self.starts, dtype=torch.int32)
        longest = max(end - start for start, end in pairwise(self.starts))
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            tokens_per_sample=tokens_per_sample,
        )


def a_model(ours: bool, changes: dict[str, Any]) -> Any:
    """In DDP. ours: with our layer, else stock's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config

    spec: Any = copy.deepcopy(get_gpt_layer_local_spec(num_experts=E, normalization="RMSNorm"))
    spec.submodules.self_attention.submodules.core_attention = Attention
    if ours:
        spec = use_sonic_ep(spec)
    model = Run(gpt_config(**changes), spec).models[0]
    model.zero_grad_buffer()
    return model


def gradients(model: Any) -> list[Tensor]:
    return [each.main_grad.clone() for each in model.parameters()]


def packed_and_alone(rank: int, gap: int) -> list[list[Tensor]]:
    """Logits of each sequence and all gradients: in one pack, and sequence by sequence."""
    from tests.helpers.megatron_training import parallel_state

    pack, found = Pack(rank, gap), []
    for is_packed in (True, False):
        with parallel_state(expert=2):
            model = a_model(True, {"moe_router_load_balancing_type": "none"})
            if is_packed:
                mask = pack.mask if gap else None
                logits = pack.of(model(pack.ids, None, None, packed_seq_params=pack.params(), padding_mask=mask)[0])
            else:
                logits = [model(each[None], None, None)[0] for each in pack.tokens]
            losses = [(each * direction).sum() for each, direction in zip(logits, pack.directions, strict=True)]
            torch.stack(losses).sum().backward()
            found.append([*(each.detach() for each in logits), *gradients(model)])
    return found


@pytest.mark.parametrize("gap", [0, 2])
def test_packed_sequences_are_those_alone(ranks: Ranks, gap: int) -> None:
    for packed, alone in ranks(2).run(packed_and_alone, gap, timeout=300):
        for got, wanted in zip(packed, alone, strict=True):
            assert_near(got, wanted, share=1e-5)


def packed_losses(rank: int, kind: str, samples: int) -> list[str]:
    """What differs from stock of a pack with gaps: logits, gradients and the logged loss. samples: in the pack."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from tests.helpers.megatron_training import parallel_state

    pack, found = Pack(rank, gap=2 + rank), []
    assert pack.starts[-1] == 22
    for each in (False, True):
        with parallel_state(expert=2):
            model = a_model(each, {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.5})
            params = pack.params(None if samples == 1 else 22 // samples)
            logits = pack.of(model(pack.ids, None, None, packed_seq_params=params, padding_mask=pack.mask)[0])
            losses = [(each * direction).sum() for each, direction in zip(logits, pack.directions, strict=True)]
            torch.stack(losses).sum().backward()
            (metric,) = get_moe_metrics_tracker().metrics.values()
            results = {f"logits {number}": logits.detach() for number, logits in enumerate(logits)}
            named = zip([name for name, _ in model.named_parameters()], gradients(model), strict=True)
            found.append({**results, "loss": metric.values.clone(), **_whole_experts(dict(named))})
    assert found[0].keys() == found[1].keys()
    return [name for name, wanted in found[0].items() if not is_near(found[1][name], wanted, share=1e-5)]


def _whole_experts(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the experts, which test_layer.py compares."""
    return {name: grad for name, grad in grads.items() if "experts" not in name}


@pytest.mark.parametrize(("kind", "samples"), [("aux_loss", 1), ("seq_aux_loss", 1), ("seq_aux_loss", 2)])
def test_losses_of_packed_sequences_are_megatrons(ranks: Ranks, kind: str, samples: int) -> None:
    """A loss of sequences takes the pack for one, or PackedSeqParams.tokens_per_sample says how long they are."""
    assert ranks(2).run(packed_losses, kind, samples, timeout=300) == [[], []]
