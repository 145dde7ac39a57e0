"""Pretrain a small GPT with Megatron-Core twice, side by side: once with its own MoE layer, once with sonic_ep's.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/megatron_pretrain.py
    ... examples/megatron_pretrain.py --steps 100 --ep-size 2 --layers 4 --text book.txt

All of it is Megatron-Core: GPTModel, DistributedDataParallel with overlapped gradient reduction and parameter gather,
DistributedOptimizer, its schedules and GPTDataset. One line differs between the two models, `use_sonic_ep(spec)`. Both
start from the same weights and see the same batches, so their losses agree to rounding errors.

On a host with a GPU per process it runs on those over NCCL. Without any GPU it runs on the CPU over gloo, where stock
Megatron-Core needs the shims of tests/helpers/megatron_cpu.py; sonic_ep does not. Needs the extras megatron and train.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from corpus import END_OF_FILE, Corpus, load_corpus
from parallel import check_torchrun, choose_device, positive, read_launch
from sonic_ep.extras import require_extra

# 256 bytes and a padding token that never occurs, rounded up.
PADDING, VOCABULARY = 256, 264


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_pretrain.py", description="Megatron-Core with its MoE layer and with sonic_ep's, side by side."
    )
    parser.add_argument("--steps", type=positive, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--batch", type=positive, default=16, help="sequences a step over all processes (default: 16)")
    parser.add_argument("--micro-batch", type=positive, default=2, help="sequences a microbatch (default: 2)")
    parser.add_argument("--seq", type=positive, default=64, help="bytes a sequence (default: 64)")
    parser.add_argument(
        "--layers", type=positive, default=2, help="transformer layers, the first one dense (default: 2)"
    )
    parser.add_argument("--hidden", type=positive, default=64, help="hidden size (default: 64)")
    parser.add_argument("--expert-width", type=positive, default=32, help="an expert's inner size (default: 32)")
    parser.add_argument("--experts", type=positive, default=16, help="experts in all (default: 16)")
    parser.add_argument("--top-k", type=positive, default=4, help="experts a token (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--ep-size", type=positive, help="processes that divide the experts (default: all)")
    parser.add_argument("--text", help="a file or folder to learn from (default: Python's standard library)")
    parser.add_argument("--data-dir", help="keep the tokenised text here, on a disk that all hosts share")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError for sizes that do not divide each other."""
    ep_size = options.ep_size or world_size
    if options.batch % (world_size * options.micro_batch):
        raise ValueError(
            f"--batch {options.batch} is not a multiple of {world_size} processes times --micro-batch "
            f"{options.micro_batch}; take --batch {world_size * options.micro_batch}"
        )
    if world_size % ep_size or options.experts % ep_size:
        raise ValueError(f"--ep-size {ep_size} divides not both {world_size} processes and --experts {options.experts}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the processes' groups, train both models, print their losses."""
    options, launch = parse(arguments), read_launch()
    # What else could be installed, and that our layer is none that Megatron knows.
    warnings.filterwarnings("ignore", module="megatron")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        check(options, launch.world_size)
        check_torchrun("examples/megatron_pretrain.py")
        require_extra("megatron", "megatron.core")
        device = choose_device("cuda" if torch.cuda.is_available() else "cpu", launch)
        corpus = load_corpus(options.text, seq=options.seq)
    except (ValueError, ImportError) as error:
        raise SystemExit(f"megatron_pretrain.py: error: {error}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        train(options, device, corpus)
    else:
        from tests.helpers.megatron_cpu import megatron_on_cpu

        dist.init_process_group("gloo")
        with megatron_on_cpu():
            train(options, device, corpus)
    dist.destroy_process_group()


def train(options: argparse.Namespace, device: torch.device, corpus: Corpus) -> None:
    """Train both models in turn, a step each, and print a line a step."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from sonic_ep.integrations.megatron import use_sonic_ep

    say = print if dist.get_rank() == 0 else lambda *_: None
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=options.ep_size or dist.get_world_size(), expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1 + options.seed)
    trainers = {
        name: Trainer(options, device, change) for name, change in (("stock", None), ("sonic_ep", use_sonic_ep))
    }
    say(f"{dist.get_world_size()} processes on {device.type}, experts divided among {trainers['stock'].ep_size}")
    say(f"text: {corpus.source}")
    with TemporaryDirectory() as own_folder:
        folder = [options.data_dir or own_folder]
        dist.broadcast_object_list(folder)
        dataset = build_dataset(options, corpus, Path(folder[0]))
        say("step   loss: stock  sonic_ep   gradient norm: stock  sonic_ep   ms a step: stock  sonic_ep")
        for step in range(options.steps):
            (loss, norm, ms), (our_loss, our_norm, our_ms) = (
                trainer.step(microbatches(options, device, dataset, step)) for trainer in trainers.values()
            )
            losses, norms = f"{loss:11.6f}  {our_loss:8.6f}", f"{norm:20.5f}  {our_norm:8.5f}"
            say(f"{step + 1:4d}   {losses}   {norms}   {ms:16.1f}  {our_ms:8.1f}")
        dist.barrier()
    parallel_state.destroy_model_parallel()


class ByteTokenizer:
    """What GPTDataset asks of a tokenizer; a byte is its own token."""

    vocab_size = VOCABULARY
    eod = END_OF_FILE[0]
    pad = PADDING
    unique_identifiers = {"class": "bytes"}


def build_dataset(options: argparse.Namespace, corpus: Corpus, folder: Path) -> Any:
    """A GPTDataset of the training text, written as an IndexedDataset with a document a file. All ranks call it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    prefix = str(folder / f"text-{corpus.fingerprint()}")  # Megatron finds its index files again by name alone
    if dist.get_rank() == 0:
        import numpy

        folder.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
        ends = torch.nonzero(corpus.train == ByteTokenizer.eod).flatten() + 1
        for document in torch.tensor_split(corpus.train, ends):
            if len(document):
                builder.add_document(document, [len(document)])
        builder.finalize(get_idx_path(prefix))
    dist.barrier()
    config = GPTDatasetConfig(
        random_seed=1 + options.seed,
        sequence_length=options.seq,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "index"),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [options.steps * options.batch, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def microbatches(
    options: argparse.Namespace, device: torch.device, dataset: Any, step: int
) -> Iterator[dict[str, Tensor]]:
    """This rank's share of a step's batch, a microbatch at a time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for first in range(rank * options.micro_batch, options.batch, size * options.micro_batch):
        samples = [dataset[step * options.batch + first + number] for number in range(options.micro_batch)]
        yield {name: torch.stack([sample[name] for sample in samples]).to(device) for name in samples[0]}


class Trainer:
    """One model with its optimizer. change: what becomes of Megatron's block spec before the model is built."""

    def __init__(self, options: argparse.Namespace, device: torch.device, change: Callable[[Any], Any] | None) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.ep_size = parallel_state.get_expert_model_parallel_world_size()
        self.options, self.device = options, device
        half = device.type == "cuda"
        config = gpt_config(options, self.ep_size, half)
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        torch.manual_seed(options.seed)
        model = GPTModel(
            config,
            spec if change is None else change(spec),
            vocab_size=VOCABULARY,
            max_sequence_length=options.seq,
            position_embedding_type="rope",
        ).to(device)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
        )
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model) if half else model)
        self.model.broadcast_params()
        adam = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=half,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        config.no_sync_func = self.model.no_sync
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def step(self, batch: Iterator[dict[str, Tensor]]) -> tuple[float, float, float]:
        """One training step: (mean loss over the global batch, gradient norm, milliseconds)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        start = time.perf_counter()
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batch,
            model=[self.model],
            num_microbatches=self.options.batch // (dist.get_world_size() * self.options.micro_batch),
            seq_length=self.options.seq,
            micro_batch_size=self.options.micro_batch,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()  # type: ignore[misc]
        total = torch.stack(losses).sum(0)
        dist.all_reduce(total)
        loss, tokens = total.tolist()
        return loss / tokens, float(norm), 1000 * (time.perf_counter() - start)


def forward_step(batch: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Megatron's forward step: the tokens' losses, and the function that sums them."""
    data = next(batch)
    mask = data["loss_mask"].flatten()

    def total_loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, count = (losses.float().flatten() * mask).sum(), mask.sum().int()
        return total, count, torch.stack([total.detach(), count.float()])

    return model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"]), total_loss


def gpt_config(options: argparse.Namespace, ep_size: int, half: bool) -> Any:
    """The TransformerConfig of both models. Fusions are off that need Apex or Transformer Engine."""
    from megatron.core.transformer import TransformerConfig

    dtype = torch.bfloat16 if half else torch.float32
    return TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=4 * options.hidden,
        num_attention_heads=max(1, options.hidden // 32),
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=half,
        use_cpu_initialization=True,
        num_moe_experts=options.experts,
        moe_layer_freq=[0] + [1] * (options.layers - 1),  # type: ignore[arg-type]
        moe_ffn_hidden_size=options.expert_width,
        moe_router_topk=options.top_k,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ep_size,
        expert_tensor_parallel_size=1,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


if __name__ == "__main__":
    main()
