"""How the ranks of experts divide them: whole, or each in parts.

Megatron cuts each expert's width over `expert_tensor_parallel_size` ranks, which by default is the tensor-parallel
size, and sums the parts. Here those ranks join the EP group and hold whole experts instead, and fewer of them: as much
memory, the same results, and no sum. Where there are fewer experts than ranks, or E is no multiple of their number,
each rank holds the parts that it has in Megatron: dispatch sends a row to all parts of an expert, and combine sums what
they return.

Legend: E experts, I expert width.
"""

import copy
from typing import Any, NamedTuple

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from sonic_ep.integrations.options import SonicEPOptions


class ExpertDivision(NamedTuple):
    """groups: Megatron's collection, in which `ep` divides the experts. dispatch: the process group in which rows are
    sent. parts: of each expert's width; part: this rank's.
    """

    groups: ProcessGroupCollection
    dispatch: Any
    parts: int
    part: int


def divide_experts(given: ProcessGroupCollection, config: TransformerConfig, options: SonicEPOptions) -> ExpertDivision:
    """Returns how the ranks of `given` divide the experts of `config`.

    Raises ValueError if E is no multiple of the number of ranks and the experts cannot be cut: I is no multiple of the
    expert-TP size, or there is rounding. (With expert TP, Megatron has no biases in experts.)
    """
    size, width = given.ep.size(), given.expt_tp.size()
    if width == 1:
        return ExpertDivision(given, given.ep, 1, 0)
    E, I = config.num_moe_experts, config.moe_ffn_hidden_size  # noqa: E741
    assert E is not None
    assert I is not None
    if E % (size * width) == 0:
        folded = copy.copy(given)
        folded.ep = given.tp_ep
        return ExpertDivision(folded, folded.ep, 1, 0)
    problems = {
        f"moe_ffn_hidden_size={I} is no multiple of that": I % width > 0,
        "options.rounding rounds the counts of whole experts": options.rounding is not None,
    }
    problem = next((text for text, holds in problems.items() if holds), None)
    if problem is not None:
        raise ValueError(
            f"num_moe_experts={E} is no multiple of expert_model_parallel_size={size} times "
            f"expert_tensor_parallel_size={width}, so that experts would be cut in {width} parts, but {problem}; set "
            "expert_tensor_parallel_size=1"
        )
    return ExpertDivision(given, given.tp_ep, width, given.expt_tp.rank())
