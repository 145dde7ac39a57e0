"""Training steps of a model over several GPUs, as users run them: attention and `MoE` in turn, forward and backward.

    torchrun --nproc-per-node 4 benchmarks/training_step.py --out results.json [--shape qwen3_30b_a3b]
                                                            [--layers 6] [--tokens 2048 8192]

Nothing waits for anything but what the layers themselves wait for, so the host's time shows where it is more than the
device's. "graphed": the MoE layers went through graph_layers, the rest of the model runs eagerly.
Contestants alternate in one run; times of a step over STEPS in a row, medians over rounds, the slowest rank counts.
"host_ms" is how long the host needed to launch it, waits included.
"""

import gc

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from across_ranks import summary
from runs import group_of_ranks, leave, new_record, parser_of, say, shown, write
from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, graph_layers, load_config
from timing import Clock

WARM_UP, ROUNDS, STEPS = 2, 12, 5
LENGTH, HEAD = 2048, 128  # tokens of a sequence, width of a head
CAPACITY = 1.25  # of static buffers
TRANSPORTS = {
    "all_to_all": TransportConfig(kind="all_to_all"),
    "exact": TransportConfig(kind="symmetric"),
    "static": TransportConfig(kind="symmetric", buffers="static"),
    "static, graphed": TransportConfig(kind="symmetric", buffers="static"),
}


class Block(nn.Module):
    def __init__(self, config: MoEConfig, group: EPGroup) -> None:
        super().__init__()
        d, bf16 = config.d, {"device": "meta", "dtype": torch.bfloat16}
        self.before_attention, self.before_experts = (nn.RMSNorm(d, **bf16) for _ in range(2))
        self.qkv, self.out = (nn.Linear(d, width, bias=False, **bf16) for width in (3 * d, d))
        self.moe = MoE(config, group, seed=0, **bf16)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, L, d = x.shape
        heads = (part.view(B, L, -1, HEAD).transpose(1, 2) for part in self.qkv(self.before_attention(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, L, d))
        y, aux_loss, _ = self.moe(self.before_experts(x))
        return x + y, aux_loss


class Model(nn.Module):
    def __init__(self, config: MoEConfig, group: EPGroup, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, group) for _ in range(layers))
        self.to_empty(device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=config.d**-0.5, generator=generator)
        for buffer in self.buffers():
            buffer.zero_()

    def step(self, x: Tensor) -> None:
        losses = []
        for block in self.blocks:
            x, aux_loss = block(x)
            losses.append(aux_loss)
        (x.float().square().mean() + torch.stack(losses).sum()).backward()
        self.zero_grad()


def measure(config: MoEConfig, T: int, layers: int) -> dict[str, dict[str, float]]:
    group = EPGroup()  # whose transports keep to T
    clock = Clock(group, "cuda")
    x = torch.randn(T // LENGTH, LENGTH, config.d, device="cuda", dtype=torch.bfloat16)
    models = {}
    for name, transport in TRANSPORTS.items():
        rounding = RoundingConfig(capacity_factor=CAPACITY if transport.buffers == "static" else None)
        models[name] = Model(config.replace(rounding=rounding, transport=transport), group, layers)
        if name.endswith("graphed"):
            graph_layers([block.moe for block in models[name].blocks], x)  # type: ignore[misc]
    samples_of: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    for number in range(WARM_UP + ROUNDS):
        for name, model in models.items():
            ms, host = clock.back_to_back(lambda model=model: model.step(x), STEPS)
            sample = {"step_ms": ms, "host_ms": host}
            if number >= WARM_UP:
                samples_of[name].append(sample)
    return {name: summary(samples) for name, samples in samples_of.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3_30b_a3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192], help=f"multiples of {LENGTH}")
    options = parser.parse_args()
    group_of_ranks()
    # Gradients are accumulated on the stream of the capture, which torch says once.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    record = new_record(shape=options.shape, layers=options.layers, cases=[])
    for T in options.tokens:
        times = measure(load_config(options.shape), T, options.layers)
        gc.collect()
        torch.cuda.empty_cache()
        record["cases"].append({"T": T, "times": times})
        for name, each in times.items():
            say(f"T={T} {name:16} {shown(each)}")
        write(record, options.out)
    torch.cuda.synchronize()
    leave()


if __name__ == "__main__":
    main()
