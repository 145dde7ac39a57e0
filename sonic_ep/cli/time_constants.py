"""The constants of sonic_ep/cli/time_model.py, each with the records that it was fitted to.

benchmarks/fit_time_model.py prints their values, by least squares of relative errors. tests/benchmarks/ computes them
again from the records and compares. All records are of H200s, but for "host", of two H100s.
"""

from typing import NamedTuple


class Fitted(NamedTuple):
    """Constants of a stage. values: microseconds by `units`. records: of benchmarks/results; fields: what in them."""

    values: tuple[float, ...]
    units: str
    records: tuple[str, ...]
    fields: str


_DISPATCH = tuple(f"dispatch_{ranks}_ranks_h200.json" for ranks in (2, 4, 8))
_GEMMS = tuple(
    f"grouped_gemms_{name}h200.json"
    for name in ("", "large_", "drawn_", "few_rows_", "partial_", "weights_", "tiles_", "left_free_")
)
_IN_LAYER = ("grouped_gemms_large_h200.json", "grouped_gemms_drawn_h200.json", "grouped_gemms_few_rows_h200.json")
_LAYERS = tuple(f"ep_layer_{name}_h200.json" for name in ("router_2_ranks", "tokens_4_ranks", "4_ranks", "8_ranks"))
_ROUTING = ("routing_4_ranks_h200.json", "routing_8_ranks_h200.json")
_GEMM = "us a GFLOP; us a MB of operands and results"
_SENT = "us; us a MB sent; us a MB sent and a rank"
_EXCHANGE = "us; us a MB sent; us a MB of rows packed and unpacked"

CONSTANTS = {
    "push": Fitted((20.41, 2.488, 0.07594), _SENT, _DISPATCH, "symmetric, push: dispatch_us; skew 0"),
    "combine_push": Fitted(
        (19.19, 2.369, 0.1008, 0.1338),
        f"{_SENT}; us a MB of pairs",
        _DISPATCH,
        "symmetric, push: combine_us; skew 0",
    ),
    "copy": Fitted((29.97, 2.868), "us; us a MB sent", _DISPATCH, "symmetric, copy: dispatch_us; skew 0"),
    "dispatch": Fitted(
        (45.81, 2.879, 0.6527), _EXCHANGE, _DISPATCH, "all_to_all, dedup: dispatch_us; skew 0, T >= 8192"
    ),
    "combine": Fitted((49.48, 2.638, 0.6099), _EXCHANGE, _DISPATCH, "all_to_all, dedup: combine_us; skew 0, T >= 8192"),
    "dispatch of pairs": Fitted((37, 3.03, 0.5338), _EXCHANGE, _DISPATCH, "all_to_all, pairs: dispatch_us; skew 0"),
    "combine of pairs": Fitted((68.75, 3.027, 0.2672), _EXCHANGE, _DISPATCH, "all_to_all, pairs: combine_us; skew 0"),
    "least exchange": Fitted(
        (112, 129.3),
        "us of a dispatch, of a combine",
        _DISPATCH[:2],
        "all_to_all, dedup: mean of T=1024, d 2048 and 4096",
    ),
    "up": Fitted((1.478, 0.03701), _GEMM, _GEMMS, "layer_ms.up"),
    "down": Fitted((1.369, 0.06126), _GEMM, _GEMMS, "layer_ms.down"),
    "down_backward": Fitted((1.499, 0.1143), _GEMM, _GEMMS, "layer_ms.down_backward"),
    "up_backward": Fitted((1.4, 0.01926), _GEMM, _GEMMS, "layer_ms.up_backward"),
    "weight_up": Fitted((1.444, 0.1427), _GEMM, _GEMMS, "layer_ms.weight_up"),
    "weight_down": Fitted((1.543, 0.09419), _GEMM, _GEMMS, "layer_ms.weight_down"),
    "gather_sum": Fitted((12.1, 0.2608), "us; us a MB of pairs", _GEMMS, "layer_ms.gather_sum"),
    "rested GEMMs": Fitted(
        (0.9023,), "time with rested clocks over time back to back", _IN_LAYER, "median of in_layer_ms / layer_ms"
    ),
    "logits": Fitted((12.17, 4.758), "us; us a GFLOP", ("router_h200.json",), "logits"),
    "router, backward": Fitted(
        (50.11, 5.65),
        "us; us a GFLOP",
        ("router_h200.json",),
        "gradients_of_x_and_weight + logits_gradient_with_losses",
    ),
    "routing": Fitted((85.03, 17.56), "us; us a million logits", _ROUTING, "apportion"),
    "routing, plain top-K": Fitted((55.15, 12.51), "us; us a million logits", _ROUTING, "off"),
    "layer": Fitted(
        (64.75, 154.7),
        "us of a forward, of a backward",
        _LAYERS,
        "symmetric, static, behind a backlog, less its stages",
    ),
    "host waits": Fitted(
        (1774,), "us of a forward", _LAYERS, "all_to_all, behind a backlog: forward_ms, less its stages"
    ),
    "host": Fitted(
        (1144, 5901),
        "us of a step, symmetric, and all_to_all",
        ("sustained_2_gpus.json",),
        "geometric mean of host: apportion, symmetric; off, all_to_all",
    ),
    "GPU": Fitted(
        (0.02976,), "standard deviation of a GPU's time over its mean", _GEMMS, "layer_ms of a shape in several records"
    ),
}
