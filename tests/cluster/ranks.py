"""What ranks do: on imitated hosts, started by torchrun, and in a pool on one host, to compare with.

`ranks.py FOLDER`: each rank writes what it sent to the other host in dispatches and combines, by the transport's own
count or by its split sizes, and what the interface counted meanwhile.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import train
from corpus import load_corpus
from options import parse_options
from parallel import form_groups
from run_folder import checkpoints_to_resume
from sonic_ep import EPGroup
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.routing import Routing
from tests.cluster.imitated_hosts import RANKS_PER_HOST, bytes_sent_by

T, H, E, K, REPEATS = 256, 512, 16, 6, 10


def routing_of(rank: int, group: EPGroup) -> Routing:
    generator = torch.Generator().manual_seed(rank)
    experts_TK = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    tokens_TK = torch.arange(T)[:, None].expand(T, K)
    weights_N = torch.ones(T * K)
    return Routing.from_pairs(tokens_TK.flatten(), experts_TK.flatten(), weights_N, num_tokens=T, E=E, group=group)


def sent_and_counted(transport: Any, rank: int, group: EPGroup) -> dict[str, int]:
    """Bytes of rows that crossed in REPEATS dispatches and combines: `sent` by this rank, `counted` on its host."""
    routing = routing_of(rank, group)
    prepared = transport.prepare(routing, plan_for(routing.counts, rank))
    x_TH, splits = torch.randn(T, H), prepared.handle.splits
    y_PH = torch.randn(len(prepared.weights_P), H)
    elsewhere = [q for q in range(group.size) if q // RANKS_PER_HOST != rank // RANKS_PER_HOST]
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    dist.barrier()
    before = bytes_sent_by(interface)
    dist.barrier()
    for _ in range(REPEATS):
        transport.dispatch(x_TH, prepared.handle).result()
        transport.combine(y_PH, prepared.weights_P, prepared.handle).result()
    dist.barrier()
    counted = bytes_sent_by(interface) - before
    dist.barrier()
    if isinstance(transport, TwoHopTransport):
        sent = transport.bytes_across_hosts["dispatch"] + transport.bytes_across_hosts["combine"]
    else:
        sent = REPEATS * 4 * H * sum(splits.rows_out[q] + splits.rows_in[q] for q in elsewhere)
    return {"sent": sent, "counted": counted}


def write_bytes(rank: int, folder: Path) -> None:
    group = EPGroup()
    transports = {"two_hop": TwoHopTransport(group, RANKS_PER_HOST), "all_to_all": AllToAllTransport(group)}
    found = {name: sent_and_counted(transport, rank, group) for name, transport in transports.items()}
    (folder / f"bytes-{rank}").write_text(json.dumps(found))


def train_on_this_rank(rank: int, size: int, flags: tuple[str, ...], run: Path) -> None:
    """What train.main does once torch.distributed stands. A worker of a pool of `size` ranks."""
    options = parse_options(flags)
    checkpoints = checkpoints_to_resume(run, options.steps) if options.resume else ()
    mesh, corpus = form_groups(torch.device("cpu"), size), load_corpus(options.text, seq=options.seq)
    train.train(options, mesh, corpus, run, checkpoints)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    write_bytes(dist.get_rank(), Path(sys.argv[1]))
    dist.destroy_process_group()
