"""A small GPT trained by Megatron-Core's own loop, in few calls; the machine may be without a GPU (megatron_cpu).

    def worker(rank):
        with parallel_state(expert=2):                                # inside: megatron_on_cpu, groups, seeds
            run = Run(gpt_config(), get_gpt_layer_local_spec(num_experts=8))
            return run.train(20)                                      # [Step(loss, grad_norm, aux), ...]

The numbers of a run depend on `Run(seed=...)` alone, not on how ranks divide the work: every expert and every layer has
the weights of its global number, and all ranks cut their share out of one global batch. One exception is Megatron's:
with TP > 1, expert-TP 1 and EP = 1 its own experts carry `allreduce = True`, so that they are reduced over the dense
data-parallel group and each tensor rank keeps the gradient of its slice of the sequence alone.
"""

import gc
import re
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from tests.helpers.megatron_cpu import CPU_CONFIG, megatron_on_cpu

VOCABULARY = 64
SEQUENCE = 16


class Step(NamedTuple):
    """What one step reports, equal on all ranks: the loss before the step (tokens' mean), the gradients' norm before
    clipping, and the auxiliary losses of the MoE layers by Megatron's name for them (mean over layers)."""

    loss: float
    grad_norm: float
    aux: dict[str, float]


@contextmanager
def parallel_state(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual_pipeline: int | None = None,
    context: int = 1,
    expert: int = 1,
    seed: int = 1234,
) -> Iterator[None]:
    """Megatron's process groups and generators over all ranks of the default group; the rest is data parallel.

    Expert-tensor parallelism is 1. Everything is put back at the end, so that one process can hold one after another.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

    with megatron_on_cpu(), _own_groups():
        state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
        )
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(seed)
        try:
            yield
        finally:
            clear_aux_losses_tracker()
            get_moe_layer_wise_logging_tracker().clear()
            state.destroy_model_parallel()


_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()  # by DDP, since the last parallel state


@contextmanager
def _own_groups() -> Iterator[None]:
    """Destroy the process groups that are made within, and the wrapped models, which know them.

    A gloo group has three threads until nothing refers to it. Megatron only forgets its own, and a model that has been
    trained refers to itself through autograd's nodes, where Python's collector does not look.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    before = set(distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
            dist.destroy_process_group(group)
        for wrapped in _WRAPPED:
            for parameter in wrapped.parameters():
                vars(parameter).clear()
            vars(wrapped).clear()
        _WRAPPED.clear()
        cast(Any, RotaryEmbedding.forward).cache_clear()
        gc.collect()


def gpt_config(**changes: Any) -> Any:
    """TransformerConfig of 2 MoE layers, 8 experts, K = 2, fp32, that agrees with the parallel state; **changes win."""
    from megatron.core import parallel_state as state
    from megatron.core.transformer import TransformerConfig

    tensor = state.get_tensor_model_parallel_world_size()
    settings: dict[str, Any] = {
        **({} if torch.cuda.is_available() else CPU_CONFIG),
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 24,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
    }
    return TransformerConfig(**{**settings, **changes})


class Run:
    """A GPT of `layer_spec` (a layer's ModuleSpec, or a block's submodules; a function of the virtual stage if they
    differ), wrapped in Megatron's DDP, with its Adam.

    distributed_optimizer: DistributedOptimizer instead of the plain one. overlap: gradient reduction overlapped with
    backward, and with the distributed optimizer also the parameter gather with forward. optimizer, ddp: further fields
    of OptimizerConfig and DistributedDataParallelConfig. seed: of weights and data; None leaves the weights as built.
    microbatches: of one sequence and data-parallel rank each; batch: sequences of one step over all ranks.
    """

    def __init__(
        self,
        config: Any,
        layer_spec: Any,
        *,
        distributed_optimizer: bool = False,
        overlap: bool = False,
        seed: int | None = 0,
        batch: int = 8,
        optimizer: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
    ) -> None:
        from megatron.core import parallel_state as state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config, self.seed, self.batch = config, seed, batch
        self.models: list[Any] = self._build(
            layer_spec,
            {
                "use_distributed_optimizer": distributed_optimizer,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap and distributed_optimizer,
                **(ddp or {}),
            },
            model or {},
        )
        adam = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.01, "adam_eps": 1e-6, "clip_grad": 1.0}
        adam |= {
            "use_distributed_optimizer": distributed_optimizer,
            "overlap_param_gather": overlap and distributed_optimizer,
        }
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**{**adam, **(optimizer or {})}), self.models)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            config.no_sync_func = [each.no_sync for each in self.models]
            if len(self.models) == 1:
                config.no_sync_func = config.no_sync_func[0]
        dp_size = state.get_data_parallel_world_size()
        if batch % dp_size:
            raise ValueError(f"batch {batch} is not a multiple of the {dp_size} data-parallel ranks")
        self.microbatches = batch // dp_size
        self.steps_done = 0

    def _build(self, layer_spec: Any, ddp: dict[str, Any], options: dict[str, Any]) -> list[nn.Module]:
        from megatron.core import parallel_state as state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel

        models = []
        stages = state.get_virtual_pipeline_model_parallel_world_size()
        for stage in range(stages) if stages else (None,):
            model = GPTModel(
                self.config,
                layer_spec(stage) if isinstance(layer_spec, FunctionType) else layer_spec,
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                position_embedding_type="rope",
                pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=False,
                vp_stage=stage,
                **options,
            )
            if torch.cuda.is_available():
                model.cuda()
            if self.seed is not None:
                fill_weights(model, self.seed)
            wrapped = DistributedDataParallel(
                self.config, DistributedDataParallelConfig(**ddp), model, disable_bucketing=bool(stage)
            )
            if ddp["use_distributed_optimizer"]:
                wrapped.broadcast_params()
            models.append(wrapped)
            _WRAPPED.add(wrapped)
        return models

    def train(self, steps: int, after_step: Callable[["Run"], None] | None = None) -> list[Step]:
        """Make `steps` more steps; what each reports. after_step is called with this run after each one."""
        reports = []
        for _ in range(steps):
            reports.append(self.step())
            if after_step is not None:
                after_step(self)
        return reports

    def step(self) -> Step:
        """One training step as Megatron's own train_step does it."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.train()
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(self._microbatches()) for _ in range(len(self.models))],
            model=self.models,
            num_microbatches=self.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            decoder_seq_length=SEQUENCE,
            forward_only=False,
        )
        _, grad_norm, _ = cast(tuple[bool, float, Any], self.optimizer.step())
        self.steps_done += 1
        return Step(self._mean_loss(losses), float(grad_norm), self._aux_losses())

    def _microbatches(self) -> list[Tensor]:
        """This data-parallel rank's share of the step's batch: (1, SEQUENCE + 1) tokens a microbatch."""
        from megatron.core import parallel_state as state

        generator = torch.Generator().manual_seed(1000 * (self.seed or 0) + self.steps_done)
        # A text that can be learned: each token follows from the one before it, most of the time.
        tokens = torch.randint(VOCABULARY, (self.batch, SEQUENCE + 1), generator=generator)
        noisy = torch.rand(self.batch, SEQUENCE, generator=generator) < 0.2
        for position in range(SEQUENCE):
            following = (5 * tokens[:, position] + 7) % VOCABULARY
            tokens[:, position + 1] = torch.where(noisy[:, position], tokens[:, position + 1], following)
        rank, size = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return list(tokens[rank::size, None].to(device))

    def _mean_loss(self, losses: list[Tensor]) -> float:
        from megatron.core import parallel_state as state

        device = "cuda" if torch.cuda.is_available() else "cpu"
        total = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        # All ranks but those of the last stage hold 0; tensor ranks of one stage hold the same.
        if not state.is_pipeline_last_stage(ignore_virtual=True):
            total.zero_()
        dist.all_reduce(total)
        return float(total) / (state.get_data_parallel_world_size() * state.get_tensor_model_parallel_world_size())

    def _aux_losses(self) -> dict[str, float]:
        from megatron.core.transformer.moe.moe_utils import (
            clear_aux_losses_tracker,
            get_moe_layer_wise_logging_tracker,
            reduce_aux_losses_tracker_across_ranks,
        )

        reduce_aux_losses_tracker_across_ranks()
        tracker = get_moe_layer_wise_logging_tracker()
        terms = self.config.num_layers * self.microbatches  # Megatron sums over both
        means = {name: float(each["values"].sum()) / terms for name, each in tracker.items()}
        clear_aux_losses_tracker()
        return means


def _forward_step(data: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    tokens = next(data)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=tokens.device)[None]
    # True hides: torch's attention in Megatron takes the mask that it is given.
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        mean = output.float().mean()
        return mean, mean.detach().clone()

    return model(inputs, positions, hidden, labels=labels), loss


@torch.no_grad()
def fill_weights(model: Any, seed: int) -> None:
    """Give each weight of a GPT the values of its global name: equal for every TP, PP and EP size, for stock experts
    (SequentialMLP) and ours.

    Matrices, and biases of experts and router, are normal(0, 0.1), norm weights 1 +- 0.1, the rest as it was built.
    Ours is known by `experts.weight1` (E_local, 2n, d), gate and up rows interleaved if gated, and `experts.weight2`.
    """
    for name, parameter in model.named_parameters():
        layer, _, rest = name.partition("layers.")[2].partition(".")
        if rest:
            offset = model.decoder.layers[int(layer)].layer_number if name.startswith("decoder") else int(layer)
            name = f"{name.split('layers.')[0]}layers.{offset}.{rest}"
        stacked = re.fullmatch(r"(.*experts\.)(weight|bias)([12])", name)
        if ".local_experts." in name:
            prefix, _, rest = name.partition("local_experts.")
            local, _, matrix = rest.partition(".")
            parameter.copy_(_values(f"{prefix}{_first_expert(model) + int(local)}.{matrix}", parameter.shape, seed))
        elif stacked and parameter.dim() == (3 if stacked[2] == "weight" else 2):
            for local, weight in enumerate(parameter):
                key = f"{stacked[1]}{_first_expert(model) + local}.linear_fc{stacked[3]}.{stacked[2]}"
                values = _values(key, weight.shape, seed)
                if stacked[3] == "1" and model.config.gated_linear_unit:
                    # The halves one after the other, gate first, become pairs of rows.
                    values = values.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
                weight.copy_(values)
        elif parameter.dim() > 1:
            parameter.copy_(_tensor_share(name, parameter, seed))
        elif name.endswith("router.bias"):
            parameter.copy_(_values(name, parameter.shape, seed))
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + _values(name, parameter.shape, seed))


def _first_expert(model: Any) -> int:
    from megatron.core import parallel_state as state

    config = model.config
    return state.get_expert_model_parallel_rank() * (config.num_moe_experts // config.expert_model_parallel_size)


def _values(key: str, shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return 0.1 * torch.randn(shape, generator=generator)


def _tensor_share(name: str, parameter: nn.Parameter, seed: int) -> Tensor:
    """What a tensor-parallel rank holds of the whole weight. fc1 of a gated unit divides gate and up rows each."""
    from megatron.core import parallel_state as state

    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return _values(name, parameter.shape, seed)
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    shape = list(parameter.shape)
    shape[dim] *= size
    whole = _values(name, torch.Size(shape), seed)
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(size, dim)[rank]
