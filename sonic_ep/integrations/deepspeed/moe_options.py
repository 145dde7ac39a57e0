"""How our layer treats every argument of deepspeed.moe.layer.MoE: honoured, or without effect, with a warning.

docs/deepspeed.md shows this table.
"""

import inspect
from collections.abc import Mapping

from deepspeed.moe.layer import MoE as StockMoE

from sonic_ep.config import MAX_E, MAX_K
from sonic_ep.integrations.fields import Field, check_field, honoured, markdown, warn_of, without_effect

_POLICIES = (None, "None", "Jitter", "RSample")
_DEFAULTS = {name: each.default for name, each in inspect.signature(StockMoE.__init__).parameters.items()}


def _ignored(how: str, *names: str) -> tuple[Field, ...]:
    return without_effect(how, **{name: _DEFAULTS[name] for name in names})


OPTIONS: tuple[Field, ...] = (
    *honoured("d", "hidden_size"),
    *honoured("a template that kernels compute (Templates, below)", "expert"),
    *honoured(f"E, 1 to {MAX_E}, a multiple of ep_size", "num_experts"),
    *honoured("DeepSpeed's expert-parallel group of that size", "ep_size"),
    *honoured(f"experts a token, 1 to {MAX_K}", "k"),
    *without_effect("True: this layer never drops tokens, and computes as drop_tokens=False", drop_tokens=False),
    *_ignored(
        "nothing is dropped, so there is no capacity to set", "capacity_factor", "eval_capacity_factor", "min_capacity"
    ),
    *_ignored("nothing is dropped, at random or otherwise", "use_rts"),
    *honoured("residual MoE: the template itself is the dense MLP", "use_residual"),
    *honoured("None, 'Jitter' and 'RSample', which DeepSpeed reads for k=1 alone", "noisy_gate_policy"),
    *_ignored("the layer has kernels of its own", "use_tutel"),
    *honoured(
        "it has an effect only with tensor parallelism, with which the layer is refused, see below",
        "enable_expert_tensor_parallelism",
    ),
    *honoured(
        "with k=2; DeepSpeed's default samples the second expert, in evaluation too. torch.compile leaves that out of "
        "its graphs",
        "top2_2nd_expert_sampling",
    ),
)


def table() -> list[str]:
    """Returns OPTIONS as a Markdown table."""
    return markdown("argument", OPTIONS)


def check(arguments: Mapping[str, object]) -> None:
    """Raises ValueError, with argument, value and fix, for what the layer cannot honour. Warns about what it ignores.

    One warning names all ignored arguments. Python shows equal warnings of one line once.
    """
    problem, k = _problem(arguments), arguments["k"]
    if problem is not None:
        raise ValueError(problem)
    ignored = [check_field(option, arguments[option.name]) for option in OPTIONS]
    if arguments["noisy_gate_policy"] == "RSample" and k != 1:
        ignored.append(f"noisy_gate_policy='RSample' (DeepSpeed reads it only for k=1, k={k} here)")
    warn_of(ignored, "MoE")


def _problem(arguments: Mapping[str, object]) -> str | None:
    numbers: dict[str, int] = {}
    for name, limit in (("hidden_size", None), ("num_experts", MAX_E), ("ep_size", None), ("k", MAX_K)):
        value = arguments[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (limit is not None and value > limit):
            wanted = "an integer >= 1" if limit is None else f"an integer in 1..{limit}"
            return f"{name}={value!r} must be {wanted}" + (
                "; give every layer its own number" if isinstance(value, list) else ""
            )
        numbers[name] = value
    experts, ep_size, k = numbers["num_experts"], numbers["ep_size"], numbers["k"]
    if experts % ep_size:
        return f"num_experts={experts} is not a multiple of ep_size={ep_size}; use an ep_size that divides it"
    if k > experts:
        return f"k={k} experts a token exceed num_experts={experts}; lower k"
    policy = arguments["noisy_gate_policy"]
    if policy not in _POLICIES:
        return f"noisy_gate_policy={policy!r} is none of DeepSpeed's; set one of {', '.join(map(str, _POLICIES))}"
    return None
