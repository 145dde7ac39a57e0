"""What it costs to move rows between GPUs: dispatch and combine, by transport, size, skew and number of blocks.

    torchrun --nproc-per-node 4 benchmarks/dispatch.py --out results.json [--d 2048 7168] [--tokens 8192]

Microseconds of the device, calls back to back, the median over rounds of the slowest rank:

* symmetric: a CUDA graph of everything between a routing and rows to compute on (numbering of rows, index lists and
  weights to their owners, the owner's lists, rows), and of everything from pair values to sums per token;
* all_to_all, dedup: the exchange of rows alone, packing and final sum included: each (token, owner) row once;
* all_to_all, pairs: the same for a row a pair. Both without their index lists, which the host must wait for.

Wire: bytes of rows that leave a GPU for others (of the busiest), over the time. Logical: T K rows, over the time, which
is what others quote. Blocks: of 512 threads for dispatch, and as many threads for combine.
"""

import argparse
import functools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from across_ranks import captured, slowest, topk_routing

from sonic_ep import EPGroup
from sonic_ep.dispatch.plan import Plan, plan_for
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.kernels.cuda import peer_rows
from sonic_ep.kernels.operations import gather_sum, sent_rows, token_lists
from sonic_ep.peer_memory import symmetric_memory

E, K = 128, 8
BLOCKS = (8, 16, 24, 32, 48, 64)
CALLS, ROUNDS = 5, 7


class Case:
    def __init__(self, T: int, d: int, skew: float, group: EPGroup) -> None:
        self.T, self.d, self.group = T, d, group
        generator = torch.Generator("cuda").manual_seed(group.rank)
        bf16 = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.x = torch.randn(T, d, **bf16)  # type: ignore[call-overload]
        routing = topk_routing(T, E, K, group, generator, skew)
        counts = routing.counts
        self.pairs_SQ = Plan.from_counts(counts.rows_SE, counts.pairs_SE).pairs_SQ
        self.routing = replace(routing, most_received=int(self.pairs_SQ.sum(0).max()))
        self.sent = sent_rows(routing.token_ids_N, plan_for(counts, group.rank).pair_starts_Q, T)
        self.rows_out = self.sent.row_starts_Q.diff().tolist()
        self.rows_in = group.all_to_all(torch.tensor(self.rows_out, device="cuda"), [1] * group.size, [1] * group.size)

    def wire_bytes(self, rows: list[int]) -> int:
        """Of rows to other ranks: the busiest rank's."""
        leaving = (sum(rows) - rows[self.group.rank]) * self.d * 2
        return int(slowest(leaving, self.group))

    def symmetric(self, blocks: int | None) -> dict[str, float]:
        saved = peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS
        if blocks is not None:
            peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS = blocks, 16 * blocks
        allocate = functools.partial(symmetric_memory, self.group, self.x.device)
        transport = SymmetricTransport(self.group, allocate, patience=60, static=True)
        plan = plan_for(self.routing.counts, self.group.rank)
        opened = transport.open(self.routing, plan)
        y_PH = torch.randn(opened.gates_P.shape[0], self.d, device="cuda", dtype=torch.bfloat16)

        def dispatch() -> Any:
            return transport.open(self.routing, plan, self.x)

        def combine() -> Any:
            return transport.combine_pairs(y_PH, opened.gates_P, opened.receipt)

        try:
            return {
                "dispatch": time_of(captured(dispatch), self.group),
                "combine": time_of(captured(combine), self.group),
            }
        finally:
            peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS = saved

    def all_to_all(self, *, dedup: bool) -> dict[str, float]:
        group, T = self.group, self.T
        if dedup:
            lists = token_lists(self.sent, sum(self.rows_out))
            tokens, out, into = lists.token_of_sent_U, self.rows_out, self.rows_in.tolist()
            by_token, starts = lists.sent_by_token_U, lists.sent_starts_T
        else:
            tokens = self.routing.token_ids_N
            out, into = self.pairs_SQ[group.rank].tolist(), self.pairs_SQ[:, group.rank].tolist()
            by_token = tokens.argsort(stable=True).int()
            starts = torch.arange(0, (T + 1) * K, K, dtype=torch.int32, device="cuda")
        back = torch.randn(sum(into), self.d, device="cuda", dtype=torch.bfloat16)
        return {
            "dispatch": time_of(lambda: group.all_to_all(self.x.index_select(0, tokens), out, into), group),
            "combine": time_of(lambda: gather_sum(group.all_to_all(back, into, out), by_token, starts), group),
        }


def time_of(call: Callable[[], Any], group: EPGroup) -> float:
    """Microseconds a call."""
    for _ in range(2):
        call()
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        call()  # the ranks fall into step, and the host gets ahead
        start.record()
        for _ in range(CALLS):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop) / CALLS)
    return slowest(statistics.median(times), group)


def measure(case: Case) -> dict[str, Any]:
    rows, pairs = case.rows_out, case.pairs_SQ[case.group.rank].tolist()
    wire, undedup = case.wire_bytes(rows), case.wire_bytes(pairs)
    contestants: dict[str, tuple[int, dict[str, float]]] = {
        "all_to_all, pairs": (undedup, case.all_to_all(dedup=False)),
        "all_to_all, dedup": (wire, case.all_to_all(dedup=True)),
        "symmetric": (wire, case.symmetric(None)),
    }
    if case.T == 8192:
        contestants |= {f"symmetric, {blocks} blocks": (wire, case.symmetric(blocks)) for blocks in BLOCKS}
    logical = case.T * K * case.d * 2
    return {
        name: {
            f"{way}_{key}": round(value, 1)
            for way, us in times.items()
            for key, value in (("us", us), ("wire_gb_s", sent / us / 1e3), ("logical_gb_s", logical / us / 1e3))
        }
        for name, (sent, times) in contestants.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="+", default=[2048, 4096, 7168])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 2.0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    group = EPGroup()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": group.size}
    results |= {"E": E, "K": K, "cases": []}
    for d in options.d:
        for T in options.tokens:
            for skew in options.skew if T == 8192 else options.skew[:1]:
                times = measure(Case(T, d, skew, group))
                results["cases"].append({"d": d, "T": T, "skew": skew, "times": times})
                torch.cuda.empty_cache()
                if group.rank == 0:
                    for name, each in times.items():
                        print(f"d={d} T={T} skew={skew} {name:22}", each, flush=True)
                    if options.out is not None:
                        options.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
