"""The cost of moving rows between GPUs: dispatch and combine, by transport, size, skew and number of blocks.

    torchrun --nproc-per-node 4 benchmarks/dispatch.py --out results.json [--hidden 2048 7168] [--tokens 8192]
    torchrun --nproc-per-node 4 benchmarks/dispatch.py --nvshmem --out results.json

Microseconds of the device, calls back to back, the median over rounds of the slowest rank:

* symmetric, by push or copy (every row to every rank, by copy engines): a CUDA graph of everything between a routing
  and rows to compute on (numbering of rows, index lists and weights to their owners, the owner's lists, rows), and of
  everything from pair values to sums per token;
* all_to_all, dedup: the exchange of rows alone, packing and final sum included: each (token, owner) row once;
* all_to_all, pairs: the same for a row a pair. Both without their index lists, which the host must wait for;
* all_to_all_vdev_2d, with --nvshmem and in a run of its own, since a process has one backend of symmetric memory:
  torch's exchange of a row a pair with splits on the device, packing and final sum included. It groups the rows of at
  most 16 experts a rank: where there are more, neighbours count as one here.

Wire: bytes of rows that others need of a GPU (of the busiest), over the time; "copy" sends more than these. Logical:
T K rows, over the time, which is what others quote. Blocks: of 512 threads for pushing, and as many threads for
combine.
"""

import functools
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from across_ranks import topk_routing
from runs import group_of_ranks, leave, new_record, parser_of, say, write
from sonic_ep import EPGroup
from sonic_ep.config import Dispatch
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.kernels.backend import gather_sum, sent_rows, token_lists
from sonic_ep.kernels.dispatch.plan.reference import Plan
from sonic_ep.kernels.dispatch.symmetric import rows as peer_rows
from sonic_ep.symmetric_memory import symmetric_memory
from timing import captured, slowest

E, K = 128, 8
BLOCKS = (8, 16, 24, 32, 48, 64)
CALLS, ROUNDS = 5, 7
ALIGN, MOST_BINS = 128, 16  # of all_to_all_vdev_2d: rows of an expert start at a multiple; experts of a rank


class Case:
    def __init__(self, T: int, d: int, skew: float, group: EPGroup) -> None:
        self.T, self.d, self.group = T, d, group
        generator = torch.Generator("cuda").manual_seed(group.rank)
        bf16 = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.x = torch.randn(T, d, **bf16)  # type: ignore[call-overload]
        routing = topk_routing(T, E, K, group, generator, skew)
        counts = routing.counts
        self.pairs_SQ = Plan.from_counts(counts.rows_SE, counts.pairs_SE).pairs_SQ
        self.routing = replace(routing, max_received=int(self.pairs_SQ.sum(0).max()))
        self.sent = sent_rows(routing.token_ids_N, plan_for(counts, group.rank).pair_starts_Q, T)
        self.rows_out = self.sent.row_starts_Q.diff().tolist()
        self.rows_in = group.all_to_all(torch.tensor(self.rows_out, device="cuda"), [1] * group.size, [1] * group.size)

    def wire_bytes(self, rows: list[int]) -> int:
        """Of rows to other ranks: the busiest rank's."""
        leaving = (sum(rows) - rows[self.group.rank]) * self.d * 2
        return int(slowest(leaving, self.group))

    def symmetric(self, dispatch: Dispatch, blocks: int | None = None) -> dict[str, float]:
        saved = peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS
        if blocks is not None:
            peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS = blocks, 16 * blocks
        allocate = functools.partial(symmetric_memory, self.group, self.x.device)
        transport = SymmetricTransport(self.group, allocate, timeout=60, static=True, dispatch=dispatch)
        plan = plan_for(self.routing.counts, self.group.rank)
        prepared = transport.prepare(self.routing, plan)
        y_PH = torch.randn(prepared.weights_P.shape[0], self.d, device="cuda", dtype=torch.bfloat16)

        def start() -> Any:
            return transport.prepare(self.routing, plan, self.x)

        def combine_rows() -> Any:
            return transport.combine(y_PH, prepared.weights_P, prepared.handle).result()

        try:
            return {
                "dispatch": time_of(captured(start), self.group),
                "combine": time_of(captured(combine_rows), self.group),
            }
        finally:
            peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS = saved

    def all_to_all(self, *, dedup: bool) -> dict[str, float]:
        group = self.group
        if dedup:
            lists = token_lists(self.sent, sum(self.rows_out))
            tokens, out, into = lists.token_of_sent_U, self.rows_out, self.rows_in.tolist()
            by_token, starts = lists.sent_by_token_U, lists.sent_starts_T
        else:
            tokens = self.routing.token_ids_N
            out, into = self.pairs_SQ[group.rank].tolist(), self.pairs_SQ[:, group.rank].tolist()
            by_token, starts = self.pairs_by_token()
        back = torch.randn(sum(into), self.d, device="cuda", dtype=torch.bfloat16)
        return {
            "dispatch": time_of(lambda: group.all_to_all(self.x.index_select(0, tokens), out, into), group),
            "combine": time_of(lambda: gather_sum(group.all_to_all(back, into, out), by_token, starts), group),
        }

    def vdev_2d(self) -> dict[str, float]:
        group, tokens, counts = self.group, self.routing.token_ids_N, self.routing.counts
        N, capacity = tokens.shape[0], int(self.pairs_SQ.sum(0).max()) + E // group.size * ALIGN
        packed, rows, back = (_shared(n, self.d, dtype=torch.bfloat16) for n in (N, capacity, N))
        bins = min(E, MOST_BINS * group.size)
        splits, arrived, returned = (_shared(*size, dtype=torch.int64) for size in ((bins,), (2, bins), (2, bins)))
        splits.copy_(counts.pairs_SE[group.rank].view(bins, E // bins).sum(1))
        by_token, starts = self.pairs_by_token()
        operations: Any = torch.ops.symm_mem

        def start() -> None:
            torch.index_select(self.x, 0, tokens, out=packed)
            operations.all_to_all_vdev_2d(packed, rows, splits, arrived, group.name, ALIGN)

        def combine_rows() -> Tensor:
            operations.all_to_all_vdev_2d_offset(rows, back, arrived, returned, group.name)
            return gather_sum(back, by_token, starts)

        start()
        combine_rows()
        torch.cuda.synchronize()
        assert torch.equal(back, packed)
        return {"dispatch": time_of(start, group), "combine": time_of(combine_rows, group)}

    def pairs_by_token(self) -> tuple[Tensor, Tensor]:
        starts = torch.arange(0, (self.T + 1) * K, K, dtype=torch.int32, device="cuda")
        return self.routing.token_ids_N.argsort(stable=True).int(), starts


def _shared(*size: int, dtype: torch.dtype) -> Tensor:
    assert dist.group.WORLD is not None
    values = symmetric.empty(*size, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
    symmetric.rendezvous(values, dist.group.WORLD)
    return values


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


def measure(case: Case, *, nvshmem: bool) -> dict[str, Any]:
    rows, pairs = case.rows_out, case.pairs_SQ[case.group.rank].tolist()
    wire, undedup = case.wire_bytes(rows), case.wire_bytes(pairs)
    if nvshmem:
        return described(case, {"all_to_all_vdev_2d": (undedup, case.vdev_2d())})
    contestants: dict[str, tuple[int, dict[str, float]]] = {
        "all_to_all, pairs": (undedup, case.all_to_all(dedup=False)),
        "all_to_all, dedup": (wire, case.all_to_all(dedup=True)),
        "symmetric, push": (wire, case.symmetric("push")),
        "symmetric, copy": (wire, case.symmetric("copy")),
    }
    if case.T == 8192:
        contestants |= {f"symmetric, {blocks} blocks": (wire, case.symmetric("push", blocks)) for blocks in BLOCKS}
    return described(case, contestants)


def described(case: Case, contestants: dict[str, tuple[int, dict[str, float]]]) -> dict[str, Any]:
    """By contestant: its times, and rates by the bytes that it needs to send."""
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
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 7168])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--skew", type=float, nargs="+", default=[0.0, 2.0])
    parser.add_argument("--nvshmem", action="store_true")
    options = parser.parse_args()
    group = group_of_ranks()
    if options.nvshmem:
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "16G")
        symmetric.set_backend("NVSHMEM")
    record = new_record(E=E, K=K, cases=[])
    for d in options.hidden:
        for T in options.tokens:
            for skew in options.skew if T == 8192 else options.skew[:1]:
                times = measure(Case(T, d, skew, group), nvshmem=options.nvshmem)
                record["cases"].append({"d": d, "T": T, "skew": skew, "times": times})
                torch.cuda.empty_cache()
                for name, each in times.items():
                    say(f"d={d} T={T} skew={skew} {name:22} {each}")
                write(record, options.out)
    leave()


if __name__ == "__main__":
    main()
