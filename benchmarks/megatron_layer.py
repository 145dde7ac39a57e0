"""Qwen3-30B-A3B's layers under Megatron-Core: its MoELayer and ours, in one run over several GPUs.

    torchrun --nproc-per-node 4 benchmarks/megatron_layer.py --out results.json

EP = all ranks, DDP and DistributedOptimizer, bf16. *Layer*: one MoE layer, forward and backward of random rows, and
what it keeps between the two beside its output. *Step*: a whole training step of a GPT of such layers (unfused
attention, no Transformer Engine), its MFU, and the most memory that it allocates. Contestants take turns; times are
medians of the slowest rank. Stock is MoELayer with the alltoall dispatcher, on grouped GEMMs where they run, else on
SequentialMLP; `sonic_ep_rounded` is our layer with token rounding. MFU counts 6 operations per active parameter and
token and 12 s h per layer and token of attention, against 989 TFLOP/s.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from across_ranks import measure_layer, measure_step, summary
from runs import group_of_ranks, leave, new_record, parser_of, say, shown, write
from sonic_ep import RoundingConfig, load_config

SHAPE, LAYERS, SEQ, BATCH, VOCABULARY = "qwen3_30b_a3b", 4, 2048, 4, 32768
HEADS, KEY_VALUE_HEADS, HEAD_WIDTH = 32, 4, 128
PEAK_TFLOPS = 989


class Contestant:
    """A GPT whose block spec was changed by `change`, with its optimizer."""

    def __init__(self, change: Callable[[Any], Any], *, grouped_gemm: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        config = gpt_config(grouped_gemm)
        spec = change(get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"))
        torch.manual_seed(1)
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQ, position_embedding_type="rope"
        ).cuda()
        self.layers: list[Any] = [layer.mlp for layer in model.decoder.layers]
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model))
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        config.no_sync_func = self.model.no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def step(self, batch: dict[str, Tensor]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch]),
            model=[self.model],
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.optimizer.step()


def gpt_config(grouped_gemm: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    moe = load_config(SHAPE)
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=moe.d,
        ffn_hidden_size=moe.n,
        num_attention_heads=HEADS,
        num_query_groups=KEY_VALUE_HEADS,
        kv_channels=HEAD_WIDTH,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        num_moe_experts=moe.E,
        moe_ffn_hidden_size=moe.n,
        moe_router_topk=moe.K,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.001,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped_gemm,
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def forward_step(batch: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    data = next(batch)

    def total_loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        count = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
        return losses.float().sum(), count, {}

    return model(data["tokens"], data["positions"], data["mask"], labels=data["labels"]), total_loss


def random_batch() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ + 1), device="cuda")
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)[None, None]
    positions = torch.arange(SEQ, device="cuda").expand(BATCH, SEQ)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions, "mask": mask}


def tflops_of_step() -> float:
    """Per rank."""
    moe = load_config(SHAPE)
    attention = moe.d * HEAD_WIDTH * (2 * HEADS + 2 * KEY_VALUE_HEADS)
    active = LAYERS * (attention + moe.d * moe.E + 3 * moe.K * moe.d * moe.n) + moe.d * VOCABULARY
    return BATCH * SEQ * (6 * active + 12 * LAYERS * SEQ * HEADS * HEAD_WIDTH) / 1e12


def contestants() -> dict[str, Contestant]:
    from sonic_ep.integrations.megatron import SonicEPOptions, use_sonic_ep

    tile_aligned = SonicEPOptions(rounding=RoundingConfig(mode="apportion"))
    grouped = find_spec("grouped_gemm") is not None
    return {
        "grouped_gemm" if grouped else "sequential": Contestant(lambda spec: spec, grouped_gemm=grouped),
        "sonic_ep": Contestant(use_sonic_ep, grouped_gemm=False),
        "sonic_ep_rounded": Contestant(lambda spec: use_sonic_ep(spec, tile_aligned), grouped_gemm=False),
    }


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    group_of_ranks()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1)
    moe, models = load_config(SHAPE), contestants()
    torch.manual_seed(dist.get_rank())
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for number in range(options.rounds + 2):
        x = torch.randn(SEQ, BATCH, moe.d, device="cuda").bfloat16().requires_grad_()
        dout, batch = torch.randn(SEQ, BATCH, moe.d, device="cuda").bfloat16(), random_batch()
        for name, model in models.items():
            # The step first: it sets the scale of the auxiliary loss, whose shape Megatron then expects for good.
            sample = measure_step(partial(model.step, batch))
            layer = model.layers[0]
            sample |= measure_layer(lambda layer=layer, x=x: layer(x)[0], [x, *layer.parameters()], dout)
            if number >= 2:  # the first rounds compile and allocate
                samples[name].append(sample)
    shape = {"config": SHAPE, "layers": LAYERS, "sequence": SEQ, "batch": BATCH, "vocabulary": VOCABULARY}
    record = new_record(packages=("megatron-core",), shape=shape, contestants={})
    for name in models:
        figures = summary(samples[name])
        figures["mfu"] = tflops_of_step() / (figures["step_ms"] / 1000) / PEAK_TFLOPS
        record["contestants"][name] = figures
        say(f"{name} {shown(figures)}")
    write(record, options.out)
    leave()


if __name__ == "__main__":
    main()
