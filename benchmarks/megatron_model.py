"""The models of megatron_step.py: a GPT of Megatron-Core by contestant, in DDP with its optimizer, of equal weights.

With Transformer Engine, norms, linear layers, attention, rotary positions and cross-entropy are its kernels, and
routers and permutation use its fused ones. Without it they are Megatron's own modules and torch's flash attention.
"""

import dataclasses
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain_model import DENSE
from sonic_ep import RoundingConfig, load_config
from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.kernels.experts.activations import interleave
from step_race import LayerAlone, StepModel, release_memory

TE_GROUPED, SEQUENTIAL = "MoELayer, TEGroupedMLP", "MoELayer, SequentialMLP"
OURS, ROUNDED, GRAPHED = "sonic_ep", "sonic_ep, apportion", "sonic_ep, graphs"
# Contestants of one model. Graphs come last: a capture that fails may leave the device useless.
FAMILIES = ((TE_GROUPED,), (OURS, ROUNDED), (SEQUENTIAL,), (GRAPHED,))
ROUNDING = RoundingConfig(mode="apportion")

STD, BALANCE_COEF = 0.02, 0.001
LEARNING_RATE = 1e-5  # small, so that routing stays as at the start: contestants train one after the other


def has_te() -> bool:
    """Returns True if Megatron-Core can use Transformer Engine here."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


class TorchAttention(nn.Module):
    """Causal attention by torch, in place of Megatron's unfused one."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """query, key, value: (length, sequences, heads, width), fewer heads of the last two. Heads are joined."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class Model(StepModel):
    """One model of FAMILIES. `choose` says which of its contestants trains it."""

    def __init__(self, family: tuple[str, ...], options: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.module import Float16Module

        self.options, self.family, self.config = options, family, gpt_config(family, options)
        moe, dense, on_gpu = load_config(options.shape), DENSE[options.shape], options.device == "cuda"
        with _fused_gradients_without_apex(self.config):
            model = GPTModel(
                self.config,
                _spec(family, self.config, options),
                vocab_size=dense.vocabulary,
                max_sequence_length=options.length,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
            )
        model = model.cuda() if on_gpu else model
        self.layers: list[Any] = [layer.mlp for layer in model.decoder.layers]
        fill(model, self.layers, moe.n)
        # Both contestants of our families train one model: rounding is switched.
        self._switched = [(layer, layer.options, layer.router.routing) for layer in self.layers if len(family) > 1]
        overlap: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        ddp = DistributedDataParallelConfig(**overlap, overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        wrapped = Float16Module(self.config, model) if on_gpu else model
        with side_stream() if on_gpu else nullcontext():
            self.model: Any = DistributedDataParallel(self.config, ddp, wrapped)
        self.model.broadcast_params()
        self.model.train()
        self.optimizer = self._optimizer(overlap)
        B, L = options.tokens // options.length, options.length
        generator = torch.Generator(options.device).manual_seed(dist.get_rank())
        tokens = torch.randint(dense.vocabulary, (B, L + 1), device=options.device, generator=generator)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.positions = torch.arange(L, device=options.device).expand(B, L)

    def _optimizer(self, overlap: dict[str, Any]) -> Any:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        bf16 = self.config.bf16
        common = {"bf16": bf16, "params_dtype": self.config.params_dtype, **overlap}
        adam = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, **common)
        optimizer = get_megatron_optimizer(adam, [self.model])
        self.config.no_sync_func = self.model.no_sync
        self.config.grad_scale_func = optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        return optimizer

    def choose(self, name: str) -> None:
        rounds = name == ROUNDED
        for layer, options, routing in self._switched:
            layer.options = options if rounds else dataclasses.replace(options, rounding=None)
            if rounds:
                layer.router.routing = routing  # it hands the logits to rounding
            else:
                vars(layer.router).pop("routing", None)

    def num_programs(self) -> int:
        ours = [layer.experts._experts for layer in self.layers if hasattr(layer.experts, "_experts")]
        return sum(each.num_programs for each in ours)

    def step(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._pass(forward_only=False)
        self.optimizer.step()

    def loss(self) -> float:
        """Returns the mean loss of this rank's tokens, in training mode."""
        with self.outside_steps():
            return float(self._pass(forward_only=True))

    def _pass(self, *, forward_only: bool) -> Tensor:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        count = 1 if forward_only else self.options.micro_batches
        losses: Any = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter([self.batch] * count),
            model=[self.model],
            num_microbatches=count,
            seq_length=self.options.length,
            micro_batch_size=self.options.tokens // self.options.length,
            forward_only=forward_only,
        )
        return losses[0]

    def _forward_step(self, batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        tokens, labels = next(batches)

        def mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
            mean = losses.float().mean()
            return mean, mean.detach()

        return model(tokens, self.positions, None, labels=labels), mean_loss

    def _capture(self) -> None:
        """Captures Megatron's graphs of router and preprocessing."""
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        sequences = self.options.tokens // self.options.length
        helper = TECudaGraphHelper([self.model], self.config, self.options.length, sequences, [self.optimizer])
        self.model.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        self.model.enable_forward_pre_hook()
        helper.cuda_graph_set_manual_hooks()

    def warmed_up(self) -> None:
        """Captures what Megatron's training loop captures after some steps."""
        if GRAPHED in self.family:
            self._capture()

    @contextmanager
    def layer_alone(self) -> Generator[LayerAlone | None]:
        """The first MoE layer on random rows. None with graphs."""
        if GRAPHED in self.family:
            yield None
            return
        layer, d, B = self.layers[0], self.config.hidden_size, self.options.tokens // self.options.length
        like: dict[str, Any] = {"device": self.options.device, "dtype": next(layer.experts.parameters()).dtype}
        torch.manual_seed(dist.get_rank())
        x = torch.randn(self.options.length, B, d, **like).requires_grad_()
        dout = torch.randn(self.options.length, B, d, **like)

        def forward() -> Tensor:
            return layer(x)[0]

        def backward(out: Tensor) -> None:
            out.backward(dout)
            x.grad = None

        with self.outside_steps():
            yield LayerAlone(forward, backward, lambda: known_sizes(layer))

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Weights are gathered first, and gradients are not reduced."""
        self.model.disable_forward_pre_hook()
        try:
            with self.model.no_sync():
                yield
        finally:
            self.model.enable_forward_pre_hook()

    @torch.no_grad()
    def free(self) -> None:
        """Gives memory back, whoever still refers to the model: autograd's nodes do."""
        tensors: list[Tensor] = [self.batch[0], self.batch[1]]
        for buffer in self.model.buffers + self.model.expert_parallel_buffers:
            tensors += [each for each in (buffer.param_data, buffer.grad_data) if each is not None]
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            tensors += [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
            states = part.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        vars(self).clear()
        release_memory()


@contextmanager
def side_stream() -> Iterator[None]:
    """Another stream, on which Megatron's training loop wraps a model too: CUDA graphs need its hooks there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def gpt_config(family: tuple[str, ...], options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    moe, dense, on_gpu, te = load_config(options.shape), DENSE[options.shape], options.device == "cuda", has_te()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    graphs: dict[str, Any] = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["moe_router", "moe_preprocess"],
    }
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=moe.d,
        ffn_hidden_size=moe.n,
        num_attention_heads=dense.heads,
        num_query_groups=dense.kv_heads,
        kv_channels=dense.head_dim,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=on_gpu,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        num_moe_experts=moe.E,
        moe_ffn_hidden_size=moe.n,
        moe_router_topk=moe.K,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=BALANCE_COEF,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=te,
        moe_permute_fusion=te,
        moe_router_fusion=te,
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
        masked_softmax_fusion=False,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=te,
        persist_layer_norm=False,
        apply_rope_fusion=te,
        cross_entropy_loss_fusion=on_gpu,
        cross_entropy_fusion_impl="te" if te else "native",
        **(graphs if GRAPHED in family else {}),
    )


def _spec(family: tuple[str, ...], config: Any, options: Any) -> Any:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from sonic_ep.integrations.megatron import SonicEPOptions, use_sonic_ep

    te = has_te()
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=te, normalization="RMSNorm")
    for layer in spec.layer_specs:
        parts = layer.submodules
        if not te or options.attention == "torch":
            parts.self_attention.submodules.core_attention = TorchAttention
        if SEQUENTIAL in family:
            experts = LocalSpecProvider().grouped_mlp_modules(True)
            submodules = dataclasses.replace(parts.mlp.keywords["submodules"], experts=experts)
            parts.mlp = partial(MoELayer, submodules=submodules)
    if family[0] in (TE_GROUPED, SEQUENTIAL):
        return spec
    return use_sonic_ep(spec, SonicEPOptions(rounding=ROUNDING if len(family) > 1 else None))


@contextmanager
def _fused_gradients_without_apex(config: Any) -> Iterator[None]:
    """Builds a model in which Transformer Engine's layers and ours add weight gradients to main_grad in the GEMM.

    Megatron's own linear layers could do it by Apex only. They do not.
    """
    from megatron.core.tensor_parallel import layers

    if not config.gradient_accumulation_fusion:
        yield
        return
    column, row = layers.ColumnParallelLinear, layers.RowParallelLinear

    def built_by(original: Any) -> Any:
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.gradient_accumulation_fusion = False

        return build

    with (
        replaced(layers, _grad_accum_fusion_available=True),
        replaced(column, __init__=built_by(column.__init__)),
        replaced(row, __init__=built_by(row.__init__)),
    ):
        yield


@torch.no_grad()
def fill(model: Any, layers: list[Any], n: int) -> None:
    """Gives weights the values of their names, and experts the values of their layer and rank, in any contestant."""
    generator = torch.Generator(next(model.parameters()).device)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            continue
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # of a norm: nothing has a bias
        else:
            parameter.normal_(std=STD, generator=generator.manual_seed(zlib.crc32(name.encode())))
    for number, layer in enumerate(layers):
        generator.manual_seed(1 + number + len(layers) * dist.get_rank())
        _fill_experts(layer.experts, layer.num_local_experts, layer.config.hidden_size, n, generator)


def _fill_experts(experts: Any, count: int, d: int, n: int, generator: torch.Generator) -> None:
    like: dict[str, Any] = {"device": generator.device, "dtype": next(experts.parameters()).dtype}
    fc1 = torch.empty(count, 2 * n, d, **like).normal_(std=STD, generator=generator)
    fc2 = torch.empty(count, d, n, **like).normal_(std=STD, generator=generator)
    if hasattr(experts, "weight1"):
        experts.weight1.copy_(interleave(fc1))
        experts.weight2.copy_(fc2)
        return
    for i in range(count):
        if hasattr(experts, "local_experts"):
            ends = experts.local_experts[i].linear_fc1.weight, experts.local_experts[i].linear_fc2.weight
        else:
            ends = getattr(experts.linear_fc1, f"weight{i}"), getattr(experts.linear_fc2, f"weight{i}")
        ends[0].copy_(fc1[i])
        ends[1].copy_(fc2[i])


@contextmanager
def megatron(options: Any) -> Iterator[None]:
    """Megatron's process groups and generators, EP over all ranks, on the CPU with what stock Megatron needs there."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    on_cpu: Any = nullcontext()
    if options.device == "cpu":
        from tests.helpers.megatron_cpu import megatron_on_cpu

        on_cpu = megatron_on_cpu()
    with on_cpu:
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
        )
        model_parallel_cuda_manual_seed(1, te_rng_tracker=has_te())
        batch, world = options.tokens // options.length, dist.get_world_size()
        # Megatron's graphs read it.
        init_num_microbatches_calculator(dist.get_rank(), None, batch * world * options.micro_batches, batch, world)
        yield
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def known_sizes(layer: Any) -> Any:
    """A context in which the all-to-all dispatcher of a stock layer does not wait for row counts.

    It takes the counts of the call before, so launches can be hidden as in ours. The input has to be the same.
    """
    dispatcher = layer.token_dispatcher
    if not hasattr(dispatcher, "_maybe_dtoh_and_synchronize"):
        return nullcontext()
    names = ("input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert")
    original, known = dispatcher._maybe_dtoh_and_synchronize, {}

    def read(point: str, tokens_per_expert: Any = None) -> Any:
        if not known:
            tokens_per_expert = original(point, tokens_per_expert)
            if point == "before_finish":
                known.update({name: getattr(dispatcher, name) for name in names}, tokens=tokens_per_expert)
        elif point == dispatcher.cuda_dtoh_point:
            for name in names:
                setattr(dispatcher, name, known[name])
            return known["tokens"]
        return tokens_per_expert

    return replaced(dispatcher, _maybe_dtoh_and_synchronize=read)
