"""Recognises a template module as one of the MLPs that our kernels compute. DeepSpeed accepts any module and copies it.

Linear layers are found by their names. The activation is found by a trial: a copy of the template with random weights
is run in float64 on the CPU, and its output is compared with the output of each of our activations. So the module's
code decides, not the names in it. Any other template is refused: experts that run module by module are no faster than
DeepSpeed's own (dev/LOG.md).

Legend: H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonic_ep.kernels.experts.activations import ACTIVATIONS

# down is last; of three, gate is first. Llama-like models, Mixtral; then MLPs of two layers, nn.Sequential among them.
_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("w1", "w2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("0", "2"),
)
_SUPPORTED = (
    "Kernels compute down(act(gate(x)) * up(x)) with linear layers named gate_proj, up_proj, down_proj or w1, w3, w2, "
    "and fc2(act(fc1(x))) with linear layers named up_proj, down_proj or fc1, fc2 or w1, w2 or dense_h_to_4h, "
    "dense_4h_to_h or nn.Sequential(linear, act, linear); with or without biases, nothing else that has parameters "
    f"or buffers; act * up one of {', '.join(n for n, a in ACTIVATIONS.items() if a.gated)}, act one of "
    f"{', '.join(n for n, a in ACTIVATIONS.items() if not a.gated)} (gelu, geglu: GELU's tanh approximation, with _erf "
    "exact)"
)
_TRIAL_ROWS = 16
_PERIOD = 1_048_583  # of the random numbers in a trial's weights. Prime, so that no two rows are equal.


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a recognised template.

    first: names of the linear layers before the activation, (gate, up) or (up,). down: name of the one after it.
    activation: our name of the activation. bias1: True if the layers of `first` have biases. bias2: True if `down` has
    one. width: I.
    """

    first: tuple[str, ...]
    down: str
    activation: str
    bias1: bool
    bias2: bool
    width: int

    @property
    def gated(self) -> bool:
        return len(self.first) == 2

    def values(self, expert: nn.Module) -> dict[str, Tensor]:
        """Returns w1 (J, H), w2 (H, I) and, if there are biases, b1 (J,), b2 (H,) of an expert, as the kernels need."""
        first, down = [expert.get_submodule(name) for name in self.first], expert.get_submodule(self.down)
        values = {"w1": _in_turn([_tensor(each.weight) for each in first]), "w2": _tensor(down.weight)}
        if self.bias1:
            values["b1"] = _in_turn([_tensor(each.bias) for each in first])
        if self.bias2:
            values["b2"] = _tensor(down.bias)
        return values

    def entries(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `values`: returns views of its tensors, under the names of the expert's state dict."""
        step, entries = len(self.first), {}
        for kind, first, down in (("weight", "w1", "w2"), ("bias", "b1", "b2")):
            if first in values:
                entries |= {f"{name}.{kind}": values[first][at::step] for at, name in enumerate(self.first)}
            if down in values:
                entries[f"{self.down}.{kind}"] = values[down]
        return entries


def read_template(expert: nn.Module, hidden_size: int) -> Template:
    """Returns the Template of a module. Raises ValueError for one that no kernel computes, with the reason."""
    found = _found(expert, hidden_size)
    if isinstance(found, Template):
        return found
    raise ValueError(
        f"no kernel computes expert={type(expert).__name__}: {found}. Take one that they compute, or for this one "
        f"DeepSpeed's own layer. {_SUPPORTED}"
    )


@torch.no_grad()
def _found(expert: nn.Module, hidden_size: int) -> Template | str:
    """Returns the Template of a module, or why there is none."""
    generator, names = torch.Generator().manual_seed(0), _linear_names(expert)
    x = torch.randn(_TRIAL_ROWS, hidden_size, generator=generator, dtype=torch.float64, device="cpu")
    copied, out, error = _tried(expert, x, generator)
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if error is None and shape != x.shape:
        return f"it returns {shape} for rows of shape {tuple(x.shape)}, wanted rows of hidden_size={hidden_size}"
    if names is None:
        return error or "it is none of the MLPs below"
    *first, down = (expert.get_submodule(name) for name in names)
    width = _tensor(first[0].weight).shape[0]
    problem = _problem_with_sizes(first, down, width, hidden_size) or error or _problem_with_parameters(first)
    if problem is not None:
        return problem
    found = Template(tuple(names[:-1]), names[-1], "", first[0].bias is not None, down.bias is not None, width)
    values = found.values(copied)
    for name, activation in ACTIVATIONS.items():
        if activation.gated == found.gated:
            h = activation.forward(F.linear(x, values["w1"], values.get("b1")))
            y = F.linear(h, values["w2"], values.get("b2"))
            if torch.allclose(_tensor(out), y, rtol=1e-7, atol=1e-7):
                return replace(found, activation=name)
    return f"it computes something else with its linear layers {', '.join(names)}"


def _tried(expert: nn.Module, x: Tensor, generator: torch.Generator) -> tuple[nn.Module, object, str | None]:
    """Returns a copy of the module with random weights, in float64 on the CPU, what it returns for x, and None.

    Or the module, None, and why it cannot be called.
    """
    numbers = torch.randn(_PERIOD, generator=generator, dtype=torch.float64, device="cpu")
    parameters: dict[int, object] = {}  # of the copy, by id of the original
    for parameter in expert.parameters():
        # Pre-activations have magnitudes of a few units, so that clamps and tails of activations show.
        spread = 4 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 1.0
        values = (numbers * spread).repeat(-(-parameter.numel() // _PERIOD))[: parameter.numel()]
        parameters[id(parameter)] = nn.Parameter(values.view(parameter.shape), requires_grad=False)
        numbers = numbers.roll(1)
    try:
        copied = copy.deepcopy(expert, parameters).train()  # so that dropout changes the output
        with torch.random.fork_rng(devices=[]):
            out = copied(x)
    except Exception as error:  # noqa: BLE001  # any code of the user's
        return expert, None, f"it could not be tried on {tuple(x.shape)} float64 rows: {error}"
    return copied, out[0] if isinstance(out, tuple) else out, None  # as DeepSpeed does


def _linear_names(expert: nn.Module) -> tuple[str, ...] | None:
    """Returns the entry of _NAMES that covers all parameters of the module, or None. None also if it has buffers."""
    owned = {name for name, _ in expert.named_parameters()}
    if any(True for _ in expert.buffers()):
        return None
    modules = dict(expert.named_modules())
    for names in _NAMES:
        wanted = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
        found = all(_is_linear(modules.get(name)) for name in names)
        if found and owned <= wanted:
            return names
    return None


def _is_linear(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and hasattr(module, "bias")


def _problem_with_sizes(first: list[nn.Module], down: nn.Module, width: int, hidden_size: int) -> str | None:
    for each in first:
        shape = tuple(_tensor(each.weight).shape)
        if shape != (width, hidden_size):
            return f"a first linear layer has weight {shape}, wanted (width, hidden_size={hidden_size}), all alike"
    shape = tuple(_tensor(down.weight).shape)
    if shape != (hidden_size, width):
        return f"the last linear layer has weight {shape}, wanted {(hidden_size, width)}"
    return None


def _problem_with_parameters(first: list[nn.Module]) -> str | None:
    if len({each.bias is None for each in first}) > 1:
        return "of gate and up only one has a bias"
    for kind in ("weight", "bias"):
        if len({getattr(getattr(each, kind), "requires_grad", None) for each in first}) > 1:
            return f"of gate and up only one has a frozen {kind}, and a kernel reads them as one parameter"
    return None


def _in_turn(parts: list[Tensor]) -> Tensor:
    """Interleaves the rows of the parts. Returns a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 1)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value
