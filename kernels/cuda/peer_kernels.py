"""All kernels that write into the memory of other ranks."""

from sonic_ep.kernels.cuda.peer_gather import PLACES, announce, take_all
from sonic_ep.kernels.cuda.peer_meeting import come, go
from sonic_ep.kernels.cuda.peer_pairs import push_lists, push_values, take_values
from sonic_ep.kernels.cuda.peer_rows import push_rows, push_sums, sum_sent

__all__ = [
    "PLACES",
    "announce",
    "come",
    "go",
    "push_lists",
    "push_rows",
    "push_sums",
    "push_values",
    "sum_sent",
    "take_all",
    "take_values",
]
