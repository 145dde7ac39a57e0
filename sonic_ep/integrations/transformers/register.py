"""`register` adds our experts to the registry of transformers."""

from typing import Any

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.transformers.check import NAME
from sonic_ep.integrations.transformers.experts import LocalExperts
from sonic_ep.transports import transport_for


def register(options: SonicEPOptions | None = None) -> None:
    """Makes experts_implementation="sonic_ep" known to transformers, in this process.

    Example: register(); model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="sonic_ep")

    options:  those of a layer. transport.buffers="static" has a GPU's host never wait for sizes.
    Raises:   ValueError for options.rounding: rounding needs the scores of all experts, and the registry passes the
              chosen ones alone.
    Source:   huggingface/transformers, src/transformers/integrations/moe.py, `ExpertsInterface`.
    """
    from transformers.integrations.moe import ExpertsInterface

    options = options or SonicEPOptions()
    if options.rounding is not None and options.rounding.mode != "off":
        raise ValueError(
            f"options.rounding has mode={options.rounding.mode!r}, and the model's router passes only the experts that "
            "it chose; set rounding=None"
        )
    # Typed as a function of a module that returns a tensor.
    forward: Any = LocalExperts(transport_for(EPGroup.alone(), options.transport))
    ExpertsInterface.register(NAME, forward)
