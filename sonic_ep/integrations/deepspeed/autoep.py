"""`AutoEP.install()` makes DeepSpeed's AutoEP build our layer instead of its own.

It wraps two functions of DeepSpeed: the one that replaces a Hugging Face block by a layer, and the one that loads
checkpoints, which would load optimizer state of another ep_size without an error. Written for deepspeed 0.19.8.
"""

import functools
from collections.abc import Callable

from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep import AutoEP as StockAutoEP
from deepspeed.runtime.engine import DeepSpeedEngine

from sonic_ep.integrations.deepspeed.autoep_layer import SonicEPAutoEPLayer
from sonic_ep.integrations.deepspeed.optimizer_states import refuse_other_autoep_size, wrap
from sonic_ep.integrations.options import SonicEPOptions

_UNDO: list[Callable[[], None]] = []


class AutoEP:
    """Switches our layer on and off, for this process. Existing engines are not changed."""

    @staticmethod
    def install(options: SonicEPOptions | None = None) -> None:
        """Switches our layer on. Call it on every rank before `deepspeed.initialize`; again to change the options.

        Example: AutoEP.install(); engine, *_ = deepspeed.initialize(model=hf_model, config={"expert_parallel": ...})
        """
        AutoEP.uninstall()
        layer = functools.partial(SonicEPAutoEPLayer, options=options or SonicEPOptions())
        replace = functools.partial(_replace, layer=layer)
        _UNDO.append(wrap(StockAutoEP, "_replace_moe_layer_without_retarget", replace))
        _UNDO.append(wrap(DeepSpeedEngine, "_load_checkpoint", _load_checkpoint))

    @staticmethod
    def uninstall() -> None:
        """Restores DeepSpeed's own layer."""
        while _UNDO:
            _UNDO.pop()()


def _replace(
    stock: Callable[..., object], *args: object, layer: Callable[..., SonicEPAutoEPLayer], **kwargs: object
) -> object:
    # Only during the call, because the engine uses this name in isinstance checks. Ours is a subclass.
    built_otherwise = auto_ep_layer.AutoEPMoELayer
    auto_ep_layer.AutoEPMoELayer = layer  # type: ignore[misc, assignment]
    try:
        return stock(*args, **kwargs)
    finally:
        auto_ep_layer.AutoEPMoELayer = built_otherwise


def _load_checkpoint(
    stock: Callable[..., object],
    engine: DeepSpeedEngine,
    load_dir: str,
    tag: str,
    *,
    load_optimizer_states: bool = True,
    load_module_only: bool = False,
    **options: object,
) -> object:
    if load_optimizer_states and not load_module_only and not engine.load_universal_checkpoint():
        modules = engine.module.modules()  # type: ignore[union-attr]
        ep_sizes = {module.ep_size for module in modules if isinstance(module, SonicEPAutoEPLayer)}
        refuse_other_autoep_size(engine, ep_sizes, load_dir, tag)
    options |= {"load_optimizer_states": load_optimizer_states, "load_module_only": load_module_only}
    return stock(engine, load_dir, tag, **options)
