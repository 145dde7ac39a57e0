"""The only module that imports quack and private parts of CuTe-DSL.

Our kernels override methods of quack's kernel classes and call others by argument position. Neither is a stable
interface, so three checks detect a quack that differs from the one we wrote them for:

- importing this module raises ImportError if the installed versions differ from versions.py;
- before one of our kernels is compiled, `require_known_methods` compares quack's methods with quack_methods.json, which
  holds their signatures and digests of their sources. A kernel from the cache needs no comparison: quack's cache keys
  hold a digest of quack's sources. The comparison takes 0.1 s, too long for every import;
- our epilogue refuses kernel classes that need a hook it does not call (`require_no_dropped_hooks`).

After a deliberate change of version: read the diff of every method that the error names, adapt what overrides or calls
it, then renew the digests with

    python -m sonic_ep.kernels.experts.quack_compat
"""

import ast
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from sonic_ep.kernels.common.cache import problem_with_quack_cache, quack_cache_folder
from sonic_ep.kernels.common.lazy_dynamo import lazy_dynamo
from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.kernels.common.sources import sources_of
from sonic_ep.kernels.common.versions import problem_with_versions
from sonic_ep.kernels.program.trace import Slot

_LOG = logging.getLogger("sonic_ep.kernels")

if _problem := problem_with_versions():
    raise ImportError(_problem)

# quack reads it when it is imported. Its own default is a folder for temporary files, which a reboot empties.
os.environ.setdefault("QUACK_CACHE_DIR", str(quack_cache_folder()))
if _problem := problem_with_quack_cache():
    _LOG.warning("%s. Kernels are compiled anew in every process", _problem)
    os.environ["QUACK_CACHE_ENABLED"] = "0"

# quack decorates its autotuner and its quantizers, which we do not use.
with lazy_dynamo():
    from cutlass.experimental import primitives as _primitives
    from quack.activation import _maxnumf as max_with
    from quack.activation import _minnumf as min_with
    from quack.activation import _where_abs_le as where_abs_le
    from quack.activation import _where_le as where_le
    from quack.activation import dgelu_erf, dswiglu, dswiglu_oai, gelu_erf, swiglu, swiglu_oai
    from quack.cache import jit_cache
    from quack.copy_utils import partition_D_position_independent
    from quack.cute_dsl_utils import get_device_capacity, torch2cute_dtype_map
    from quack.epilogue.frontend import EpiMod, EpiPlan, gemm_epilogue
    from quack.epilogue.library import dact_mod, dgated_mod, identity_epi, linear_act_mod
    from quack.epilogue.math import pack, unpack
    from quack.epilogue.mixin import ComposableEpiMixin
    from quack.epilogue.ops import ColVecLoad, ColVecReduce, DStore, EpiOp, RowVecLoad
    from quack.gemm_base import GemmBase
    from quack.gemm_config import GemmConfig
    from quack.gemm_default_epi import GemmDefaultEpiMixin, GemmDefaultSm90, GemmDefaultSm100
    from quack.gemm_runtime import host as _host
    from quack.gemm_sm90 import GemmSm90
    from quack.gemm_tvm_ffi_utils import (
        compile_gemm_kernel,
        make_fake_gemm_tensors,
        make_fake_scheduler_args,
        make_fake_varlen_args,
        make_scheduler_args,
        make_varlen_args,
    )
    from quack.pipeline import PipelineTmaCpAsync
    from quack.rounding import RoundingMode
    from quack.sm90_utils import gemm_w_idx
    from quack.tile_scheduler import TileScheduler, VarlenMTileScheduler, WorkTileInfo
    from quack.varlen_utils import VarlenManager

CuteTensor = Any  # a cute.Tensor whose slice or layout is used: CuTe-DSL's types of these are unions, without methods
_METHODS = Path(__file__).with_name("quack_methods.json")
_DIGITS = 16  # hexadecimal digits of a digest in quack_methods.json


def problem_with_overrides() -> str | None:
    """Returns which of quack's methods differ from quack_methods.json and what to do about it, or None if none does."""
    differences = [
        f"{name} ({known['why']}): {difference}"
        for name, known in json.loads(_METHODS.read_text(encoding="utf-8")).items()
        if (difference := _difference(known, _description(name)))
    ]
    if not differences:
        return None
    return "\n".join(
        (
            "quack's source is not the one that our kernels were written for:",
            *differences,
            "Install the supported version: pip install --force-reinstall 'sonic-ep[cuda]'. If the change is meant: "
            "look at the diff of each method, adapt what overrides or calls it, then renew the digests with "
            "python -m sonic_ep.kernels.experts.quack_compat",
        )
    )


@functools.cache
def require_known_methods() -> None:
    """Raises RuntimeError if one of quack's methods differs from quack_methods.json. A process passes it once."""
    if problem := problem_with_overrides():
        raise RuntimeError(problem)


def _difference(known: dict[str, str], found: dict[str, str]) -> str | None:
    for what in ("signature", "sha256"):
        if known[what] != found[what]:
            return f"expected {what} {known[what]}, found {found[what]}"
    return None


def _description(name: str) -> dict[str, str]:
    """Returns the signature and digest of the function MODULE:QUALIFIED_NAME in the module's source file.

    It parses the file because `inspect` may see other code: CuTe-DSL 4.8.1 replaces the code of a method when it traces
    the method for the first time.
    """
    module, path = name.split(":")
    lines, found = _parsed(module)
    for part in path.split("."):
        named = [node for node in found.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not named:
            return dict.fromkeys(("signature", "sha256"), "nothing of this name")
        found = named[-1]
    assert isinstance(found, ast.FunctionDef)
    first = min(node.lineno for node in (found, *found.decorator_list))
    source = "\n".join(lines[first - 1 : found.end_lineno])
    return {"signature": _signature(found), "sha256": hashlib.sha256(source.encode()).hexdigest()[:_DIGITS]}


@functools.lru_cache(maxsize=1)  # one module suffices: names are sorted by module
def _parsed(module: str) -> tuple[list[str], ast.Module | ast.ClassDef | ast.FunctionDef]:
    spec = find_spec(module)
    text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


def _signature(function: ast.FunctionDef) -> str:
    """Returns the parameters with their kinds but without types. `=...` stands for any default."""
    given = function.args
    any_default = ast.Constant(...)

    def plain(parameters: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(parameter.arg) for parameter in parameters]

    parameters = ast.arguments(
        posonlyargs=plain(given.posonlyargs),
        args=plain(given.args),
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwonlyargs=plain(given.kwonlyargs),
        kw_defaults=[default and any_default for default in given.kw_defaults],
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=[any_default for _ in given.defaults],
    )
    return f"({ast.unparse(parameters)})"


def _renew_methods() -> None:
    """Writes the installed quack's signatures and digests into quack_methods.json and prints which have changed."""
    methods = json.loads(_METHODS.read_text(encoding="utf-8"))
    for name, known in methods.items():
        found = _description(name)
        if difference := _difference(known, found):
            sys.stdout.write(f"{name} ({known['why']}): {difference}\n")
        known |= found
    _METHODS.write_text(json.dumps(dict(sorted(methods.items())), indent=4) + "\n", encoding="utf-8")


def require_no_dropped_hooks(kernel: GemmDefaultSm90) -> None:
    """Raises NotImplementedError if a kernel needs one of the hooks that sm90/epilogue.py does not call.

    quack's epilogue (GemmBase.epilogue, 0.6.5) uses three hooks that ours does not: epi_needs_acc_prepass (a pass over
    all accumulators before the first is stored), _epi_store_quant (a codec that quantizes an output) and
    epi_tile_load_s2r (loads a tile of an operand other than C from shared memory to registers). In the kernels that we
    compile they do nothing, so leaving them out changes no result.

    kernel: an instance of one of quack's kernel classes, while it is traced.
    """
    of_quack, own = (GemmBase, ComposableEpiMixin), type(kernel)
    stored = ("D", *(op.name for op in kernel._epi_ops if op.is_tile_store()))
    needed = {
        "epi_needs_acc_prepass": kernel.epi_needs_acc_prepass,
        "_epi_store_quant": own._epi_store_quant not in [base._epi_store_quant for base in of_quack]
        or any(kernel._epi_store_quant(name) is not None for name in stored),
        "epi_tile_load_s2r": own.epi_tile_load_s2r not in [base.epi_tile_load_s2r for base in of_quack]
        or any(type(op).load_s2r is not EpiOp.load_s2r for op in kernel._epi_ops),
    }
    if hooks := [name for name, is_needed in needed.items() if is_needed]:
        raise NotImplementedError(
            f"{own.__name__} needs {', '.join(hooks)}, which kernels/experts/sm90/epilogue.py does not call; "
            "compile this kernel with quack's own epilogue or add the call there"
        )


class OverriddenEpiMod(EpiMod):
    """A quack epilogue whose kernel classes use our methods in place of quack's.

    mod: the epilogue; it is not changed. overrides: the class with our methods, which precedes quack's kernel class in
    the method resolution order. what: names the change; no other override of this epilogue may have the same name.

    quack caches compiled kernels, in memory and on disk, by `semantic_digest`. It therefore covers `what` and our
    sources.
    """

    def __init__(self, mod: EpiMod, overrides: type, what: str) -> None:
        self.__dict__.update(mod.__getstate__())  # without what was compiled for mod
        self._call_cache: dict[object, object] = {}
        self._mod, self._overrides = mod, overrides
        self.semantic_key = (*mod.semantic_key, what, sources_of(overrides.__module__))
        self.semantic_digest = hashlib.sha256(repr(self.semantic_key).encode()).hexdigest()
        self._ident = f"{mod.fn.__name__}_{self.semantic_digest[:16]}"

    def _mint(self, *key: object) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _overridden(self._mod._mint(*key), self._overrides)


@functools.cache
def _overridden(kernel: type, overrides: type) -> type:
    def __init__(self: object, *arguments: object, **options: object) -> None:  # noqa: N807
        require_known_methods()  # quack instantiates the class only to compile it
        super(both, self).__init__(*arguments, **options)

    both = type(f"{kernel.__name__}{overrides.__name__}", (overrides, kernel), {"__init__": __init__})
    return both


def max_active_clusters(ctas: int, capacity: tuple[int, int]) -> int:
    """Returns how many clusters of `ctas` CTAs fit the current device at once, according to the driver.

    capacity: the device's compute capability, (major, minor).
    """
    return _host.get_max_active_clusters(ctas, device_capacity=capacity)


def leave_clusters(plan: EpiPlan, share: int) -> None:
    """Makes the launches of a plan leave one of `share` clusters that fit the device to other kernels."""
    gemm = plan.gemm_plan
    clusters = gemm.max_active_clusters - gemm.max_active_clusters // share
    scheduler = gemm.scheduler_static  # None if each launch makes one
    if scheduler is not None:
        scheduler = make_scheduler_args(clusters, gemm.max_swizzle_size, None)
    plan.gemm_plan = gemm._replace(max_active_clusters=clusters, scheduler_static=scheduler)


class EpiLauncher:
    """Launches one plan of a GEMM over rows, in a fifth of the host time of quack's EpiPlan.run.

    names: of the epilogue's operands and outputs other than D, in the order in which `run` gets their tensors. Every
    launch of the plan has these.
    """

    def __init__(self, plan: EpiPlan, names: tuple[str, ...]) -> None:
        gemm = plan.gemm_plan
        unknown = [name for name, convert, _ in gemm.call_ops if convert is not None or name not in (*names, "D")]
        if unknown or not plan.b_kn or plan.swapped or gemm.cu_tiles_tile_m is not None or gemm.split_k > 1:
            raise NotImplementedError(f"a GEMM with {names} needs more of quack's EpiPlan.run (operands {unknown})")
        fields = list(gemm.arg_template)
        self._order = [names.index(field) if field in names else len(names) for field in fields]
        self._epilogue, self._gemm, self._launch = gemm.gemm_cls.EpilogueArguments._make, gemm, gemm.compiled_fn
        self.needs_counter = gemm.scheduler_static is None
        self._schedulers: dict[int, object] = {0: gemm.scheduler_static}  # by the address of the counter

    def run(
        self,
        A: Tensor,
        B: Tensor,
        D: Tensor,
        C: Tensor | None,
        operands: tuple[Tensor, ...],
        starts: Tensor,
        rows: Tensor | None = None,
        counter: Tensor | None = None,
    ) -> None:
        """Launches D = epilogue(A[rows] @ B) of each expert. B: (e, K, N). starts: expert_starts_e. counter: None
        unless `needs_counter`.
        """
        address = 0 if counter is None else counter.data_ptr()
        scheduler = self._schedulers.get(address)
        if scheduler is None:
            gemm = self._gemm
            scheduler = make_scheduler_args(gemm.max_active_clusters, gemm.max_swizzle_size, counter)
            self._schedulers[address] = scheduler
        given = *operands, None
        epilogue = self._epilogue([given[index] for index in self._order])
        launch_or_note(self._launch, A, B, D, C, epilogue, scheduler, make_varlen_args(starts, None, rows), None, None)


def launch_or_note(function: Callable[..., object], *arguments: object) -> None:
    """Calls a compiled GEMM, or notes the call if its first operand is one of a trace."""
    if isinstance(arguments[0], Slot):
        arguments[0].trace.foreign(getattr(function, "_tvm_ffi_function", function), arguments)
    else:
        function(*arguments)


@contextmanager
def without_launches(*launchers: type) -> Generator[None, None, None]:
    """Inside this context kernels are compiled but not launched. It needs no GPU.

    launchers: other classes whose method `run` launches a kernel. quack's own plan() also
    compiles without a launch, but it asks the driver how many clusters fit, which fails without a GPU.
    """
    with ExitStack() as stack:
        for launcher in (EpiPlan, EpiLauncher, *launchers):
            stack.enter_context(replaced(launcher, run=lambda *_, **__: None))
        stack.enter_context(replaced(_host, get_max_active_clusters=lambda *_, **__: 1))
        yield


def griddepcontrol_wait() -> None:
    """Traced. In a programmatic dependent launch (PDL), waits until the previous kernel has ended."""
    _primitives.griddepcontrol(_primitives.GridDepAction.WAIT)


def griddepcontrol_launch_dependents() -> None:
    """Traced. Lets the next kernel start while this one runs, if it is a programmatic dependent launch (PDL)."""
    _primitives.griddepcontrol(_primitives.GridDepAction.LAUNCH_DEPENDENTS)


if __name__ == "__main__":
    _renew_methods()
