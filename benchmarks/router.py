"""The router's kernels against eager torch on one GPU: microseconds of device time, and the error of the logits.

    python benchmarks/router.py [--out results.json] [--shape qwen3_30b_a3b ...]

Every operation is captured ten times in a CUDA graph, so launches cost nothing, and its buffers may stay in the L2
cache, as between the operations of a step. `bf16_parts_mm` is the linear layer as one torch.mm over concatenated parts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runs import new_record, parser_of, write
from sonic_ep import RouterConfig, load_config
from sonic_ep.kernels.route import fused as router
from sonic_ep.kernels.route.interface import LossGradient, PairGradients
from sonic_ep.kernels.route.linear import triton as router_linear
from sonic_ep.kernels.route.select.reference import pairs_of_topk
from sonic_ep.kernels.route.topk.reference import top_experts
from timing import captured_us

TOKENS = {"sonic_7b": 24576, "qwen3_30b_a3b": 16384, "qwen3_next_80b_a3b": 16384, "deepseek_v3": 8192}  # by config


def bf16_parts_mm(x_TH: Tensor, parts_3EH: Tensor) -> Tensor:
    products = torch.mm(x_TH, parts_3EH.T, out_dtype=torch.float32).unflatten(1, (3, -1))
    return products[:, 2] + products[:, 1] + products[:, 0]


def operations(shape: str) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Every operation of a router of this config, and the relative errors of its logits."""
    config, T = load_config(shape), TOKENS[shape]
    E, K, settings = config.E, config.K, config.router
    x_TH = torch.randn(T, config.d, device="cuda").bfloat16()
    weight_EH = torch.randn(E, config.d, device="cuda") * config.init_std
    parts_3EH = router_linear._parts_of_weight(weight_EH).buffer[1:, :E].flatten(0, 1)
    exact_TE = x_TH.double() @ weight_EH.double().T
    bias_E = torch.zeros(E, device="cuda") if settings.expert_bias else None
    logits_TE = router_linear.logits(x_TH, weight_EH, None)
    chosen = router.compute_topk(logits_TE, bias_E, K, settings)
    tokens_N, experts_N = pairs_of_topk(chosen.topk_ids_TK)
    pairs = PairGradients(tokens_N.int(), experts_N, torch.randn(T * K, device="cuda"))
    loss = LossGradient(torch.ones((), device="cuda"), torch.rand(1, E, device="cuda"))
    balanced = RouterConfig(balance="batch", balance_coef=0.01, z_loss_coef=0.001)
    of_sequences = RouterConfig(balance="sequence", balance_coef=0.01, z_loss_coef=0.001)
    dlogits_TE = torch.randn(T, E, device="cuda")

    def gradients(of_x: bool, of_weight: bool) -> Any:
        return router_linear.gradients(dlogits_TE, x_TH, weight_EH, of_x=of_x, of_weight=of_weight)

    errors = {
        "logits": router_linear.logits(x_TH, weight_EH, None),
        "fp32_linear": F.linear(x_TH.float(), weight_EH),
        "bf16_parts_mm": bf16_parts_mm(x_TH, parts_3EH),
    }
    calls: dict[str, Callable[[], Any]] = {
        "logits": lambda: router_linear.logits(x_TH, weight_EH, None),
        "choose": lambda: router.compute_topk(logits_TE, bias_E, K, settings),
        "weights_of_pairs": lambda: router.weights_of_pairs(
            chosen.scores_TE, chosen.topk_ids_TK, pairs.token_ids_N, experts_N, settings
        ),
        "losses": lambda: router.losses(logits_TE, chosen.topk_ids_TK, chosen.counts_E()[None], 1, balanced),
        "losses of 256 sequences": lambda: router.losses(
            logits_TE, chosen.topk_ids_TK, chosen.counts_E()[None], 256, of_sequences
        ),
        "logits_gradient": lambda: router.logits_gradient(logits_TE, chosen.topk_ids_TK, pairs, None, settings),
        "logits_gradient_with_losses": lambda: router.logits_gradient(
            logits_TE, chosen.topk_ids_TK, pairs, loss, balanced
        ),
        "gradients_of_x_and_weight": lambda: gradients(True, True),
        "gradient_of_x": lambda: gradients(True, False),
        "gradient_of_weight": lambda: gradients(False, True),
        "eager: fp32_linear": lambda: F.linear(x_TH.float(), weight_EH),
        "eager: bf16_parts_mm": lambda: bf16_parts_mm(x_TH, parts_3EH),
        "eager: softmax and top_experts": lambda: top_experts(logits_TE.softmax(1), None, K),
    }
    return calls, {name: float((got - exact_TE).norm() / exact_TE.norm()) for name, got in errors.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=TOKENS, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    record = new_record(shapes={})
    for shape in options.shape:
        torch.manual_seed(0)
        calls, errors = operations(shape)
        times = {name: round(captured_us(call), 2) for name, call in calls.items()}
        record["shapes"][shape] = {"microseconds": times, "errors": errors}
        print(shape, "T", TOKENS[shape], "errors of the logits", {name: f"{e:.2e}" for name, e in errors.items()})
        for name, time in times.items():
            print(f"  {name:32} {time:9.1f} us", flush=True)
        write(record, options.out)


if __name__ == "__main__":
    main()
