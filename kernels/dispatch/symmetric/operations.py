"""All operations on the symmetric memory of the ranks. `symmetric_kernels` of kernels/backend.py imports them."""

from sonic_ep.kernels.dispatch.symmetric.acquire_release import acquire_peers, release_peers
from sonic_ep.kernels.dispatch.symmetric.all_gather import NUM_SLOTS, all_gather_start, all_gather_wait
from sonic_ep.kernels.dispatch.symmetric.pairs import collect_scalars, push_lists, push_scalars
from sonic_ep.kernels.dispatch.symmetric.rows import combine_push, combine_reduce, push_rows
