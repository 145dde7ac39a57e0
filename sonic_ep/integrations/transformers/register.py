"""`register` adds our experts and our expert parallelism to the registries of transformers."""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.options import SonicEPOptions
from sonic_ep.integrations.transformers.check import NAME
from sonic_ep.integrations.transformers.experts import compute_experts
from sonic_ep.transports import transport_for

PARALLEL = "transformers.distributed.expert_parallel"


def register(options: SonicEPOptions | None = None) -> None:
    """Makes the name "sonic_ep" known to transformers, in this process. Call it again to change the options.

    The name is for `experts_implementation`, and with transformers of 5.23 and later for `ep_implementation` of
    DistributedConfig.

    Example: register(); model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="sonic_ep")

    options:  of a layer. Models that were built before the call keep theirs under expert parallelism.
              options.rounding with mode="off" has the capacity_factor that bounds how many rows a rank receives in
              training, and that static buffers need. At ep_size and above it removes no pair, below it pairs of least
              weight.
    Raises:   ValueError for options.rounding of another mode, which needs the model: see `round_tokens`.
    Source:   huggingface/transformers, src/transformers/integrations/moe.py, `ExpertsInterface`, and
              src/transformers/distributed/expert_parallel.py, `EPImplementationInterface`.
    """
    from transformers.integrations.moe import ExpertsInterface

    options = options or SonicEPOptions()
    if options.rounding is not None and options.rounding.mode != "off":
        raise ValueError(
            f"options.rounding has mode={options.rounding.mode!r}, but rounding needs the model's routers; set "
            "rounding=None or RoundingConfig(mode='off', capacity_factor=...), and call round_tokens(model, rounding) "
            "once the model is built"
        )
    group, local = EPGroup.alone(), SonicEPOptions(record_launches=options.record_launches)
    # Typed as a function of a module that returns a tensor.
    forward: Any = partial(
        compute_experts, group=group, transport=transport_for(group, options.transport), options=local
    )
    ExpertsInterface.register(NAME, forward)
    if has_parallel_registry():
        from sonic_ep.integrations.transformers.expert_parallel import implementation_with

        import_module(PARALLEL).EPImplementationInterface.register(NAME, implementation_with(options))


def has_parallel_registry() -> bool:
    """Returns True if this transformers has a registry for expert parallelism: 5.23 and later."""
    return find_spec(PARALLEL) is not None and hasattr(import_module(PARALLEL), "EPImplementationInterface")
