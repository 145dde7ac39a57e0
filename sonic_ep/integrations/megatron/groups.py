"""Folds the tensor-parallel ranks of experts into the EP group.

Megatron cuts each expert's width over `expert_tensor_parallel_size` ranks, which by default is the tensor-parallel
size, and sums the parts. Here those ranks hold whole experts instead, and fewer of them: as much memory, the same
results, and no sum.

Legend: E experts.
"""

import copy

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig


def with_folded_tensor_ranks(groups: ProcessGroupCollection, config: TransformerConfig) -> ProcessGroupCollection:
    """Returns `groups` with the ranks of `expt_tp` in `ep`.

    Raises ValueError if E is no multiple of the larger group's size.
    """
    size, width = groups.ep.size(), groups.expt_tp.size()
    if width == 1:
        return groups
    E = config.num_moe_experts
    assert E is not None
    if E % (size * width):
        raise ValueError(
            f"num_moe_experts={E} is no multiple of expert_model_parallel_size={size} times "
            f"expert_tensor_parallel_size={width}, over which experts are dealt whole; set "
            "expert_tensor_parallel_size=1"
        )
    folded = copy.copy(groups)
    folded.ep = groups.tp_ep
    return folded
