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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.megatron_cpu import CPU_CONFIG, megatron_on_cpu
from tests.helpers.megatron_weights import fill_weights
from tests.helpers.process_groups import passing_groups

ForwardStep = Callable[..., tuple[Tensor, Callable[[Tensor], Any]]]
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
    expert_tensor: int = 1,
    seed: int = 1234,
) -> Iterator[None]:
    """Megatron's process groups and generators over all ranks of the default group; the rest is data parallel.

    Everything is put back at the end, so that one process can hold one after another.
    """
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    with megatron_on_cpu(), _own_groups():
        state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual_pipeline,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(seed)
        try:
            yield
        finally:
            destroy_moe_metrics_tracker()
            state.destroy_model_parallel()


_WRAPPED: weakref.WeakSet[Any] = weakref.WeakSet()  # by DDP, since the last parallel state


@contextmanager
def _own_groups() -> Iterator[None]:
    """Destroy the process groups that are made within, and the wrapped models, which know them.

    A gloo group has three threads until nothing refers to it. Megatron only forgets its own, and a model that has been
    trained refers to itself through autograd's nodes, where Python's collector does not look.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    try:
        with passing_groups():
            yield
    finally:
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
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
    }
    # Batches overlap in bf16 or fp16 alone, says TransformerConfig; the schedule does not mind fp32.
    overlapped = {name: changes.pop(name) for name in ("overlap_moe_expert_parallel_comm",) if name in changes}
    config = TransformerConfig(**{**settings, **changes})
    for name, value in overlapped.items():
        setattr(config, name, value)
    return config


def _reset_loss_scale() -> None:
    """Forgets the scale that an earlier test left in Megatron's class, perhaps of another shape."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None


class Run:
    """A GPT of `layer_spec` (a layer's ModuleSpec, or a block's submodules; a function of the virtual stage if they
    differ), wrapped in Megatron's DDP, with its Adam.

    distributed_optimizer: DistributedOptimizer instead of the plain one. overlap: gradient reduction overlapped with
    backward, and with the distributed optimizer also the parameter gather with forward. optimizer, ddp: further fields
    of OptimizerConfig and DistributedDataParallelConfig. seed: of weights and data; None leaves the weights as built.
    microbatches: of one sequence and data-parallel rank each; batch: sequences of one step over all ranks.
    forward_step: what Megatron's schedules call for each.
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
        self.forward_step: ForwardStep = forward_step
        _reset_loss_scale()

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
            forward_step_func=self.forward_step,
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
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        tracker = get_moe_metrics_tracker()
        tracker._sync_metrics(list(tracker.metrics))
        terms = self.config.num_layers * self.microbatches  # Megatron sums over both
        means = {name: float(each.values.sum()) / terms for name, each in tracker.metrics.items()}
        tracker.clear()
        return means


def forward_step(
    data: Iterator[Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As pretrain_gpt.py has it: a schedule of overlapping batches asks for a plan of the forward."""
    tokens = next(data)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE, device=tokens.device)[None]
    # True hides: torch's attention in Megatron takes the mask that it is given.
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=tokens.device).triu(1)

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        mean = output.float().mean()
        return mean, mean.detach().clone()

    run = model.build_schedule_plan if return_schedule_plan else model
    return run(inputs, positions, hidden, labels=labels), loss


def note_routings(layer: Any, routings: list[Any]) -> None:
    """Adds the routing of each forward of a layer that rounds to a list."""
    rounded_routing = layer.rounded_routing

    def noted(*results: Any) -> Any:
        routings.append(rounded_routing(*results))
        return routings[-1]

    layer.rounded_routing = noted
