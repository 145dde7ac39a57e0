"""The matrix of CuTe-DSL kernels compiles for Hopper and Blackwell without a GPU, onto tensor cores, without spills.

Rows of the matrix are layers that between them take every tile of the table and every epilogue.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from sonic_ep.kernels.experts.activations import ACTIVATIONS
from tests.helpers.machine_code import cubin, faults, needs_compilers

pytestmark = [needs_compilers, pytest.mark.slow]

OPERATIONS, OF_SPLIT_GATE_UP = 10, 4
# Published shapes by name; the others as (d, n, activation, bias).
LAYERS: dict[str, tuple[int, int, str, bool] | None] = {
    "qwen3_30b_a3b": None,
    "sonic_7b": None,
    "tiny": None,
    "wide": (7168, 256, "swiglu", False),
    "deep": (1536, 8192, "swiglu", True),
    "biased": (2304, 512, "swiglu", True),
    "swiglu_clamped": (512, 256, "swiglu_clamped", False),
    "swiglu_clamped_biased": (768, 384, "swiglu_clamped", True),
    "swiglu_clamped_7": (512, 256, "swiglu_clamped_7", False),
    "geglu": (512, 256, "geglu", False),
    "geglu_erf": (512, 256, "geglu_erf", False),
    "geglu_erf_biased": (768, 384, "geglu_erf", True),
    "reglu": (512, 256, "reglu", False),
    "gelu": (512, 256, "gelu", False),
    "gelu_erf": (768, 384, "gelu_erf", True),
    "silu": (512, 256, "silu", False),
    "relu": (768, 384, "relu", False),
    "relu2": (512, 256, "relu2", True),
    "swiglu_oai": (512, 256, "swiglu_oai", False),
    "gpt_oss_20b": None,
}
IN_HALF_PRECISION = "qwen3_30b_a3b"


class Matrix(NamedTuple):
    """processes: how many compile. gated: how many layers, in each dtype, have OF_SPLIT_GATE_UP operations more."""

    arch: str
    processes: int
    layers: Collection[str]
    gated: int
    least: int  # kernels: operations of one tile and epilogue share one


FEW = ["qwen3_30b_a3b", "biased", "geglu_erf_biased", "relu", "gpt_oss_20b"]
MATRICES = {
    "sm_90a": Matrix("sm_90a", 2, LAYERS, 11, 35),
    "sm_100a": Matrix("sm_100a", 1, FEW, 2, 15),
    "sm_100a, all": Matrix("sm_100a", 1, LAYERS, 11, 35),
}
PROGRAM = """
import sys
from sonic_ep import load_config
from sonic_ep.cli.compile import compile_aot
arch, cache, *layers = sys.argv[1:]
for layer in layers:
    config, dtype = layer.split(":")
    compile_aot(load_config(config), arch, dtype, cache)
assert "torch._dynamo" not in sys.modules, "slow to import"
"""


class Compiled(NamedTuple):
    lines: list[str]
    errors: list[str]
    faults: list[list[str]]  # of every kernel


def compile_matrix(matrix: Matrix, folder: Path) -> Compiled:
    """All layers into one cache, where equal kernels of different layers meet."""
    arch, processes, names, *_ = matrix
    layers, cache = layers_in(folder, names), folder / "cache"
    share = -(-len(layers) // processes)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    def compiled(first: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, arch, str(cache), *layers[first : first + share]]
        return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)

    with ThreadPoolExecutor(processes) as threads:
        runs = [*threads.map(compiled, range(0, len(layers), share))]
    errors = [run.stderr[-3000:] for run in runs if run.returncode != 0]
    return Compiled(
        [line for run in runs for line in run.stdout.splitlines()],
        errors,
        faults([cubin(path) for path in cache.rglob("*.o")], arch, tensor_core=True),
    )


def layers_in(folder: Path, names: Collection[str]) -> list[str]:
    layers = []
    for name in names:
        config, sizes = name, LAYERS[name]
        if sizes is not None:
            d, n, activation, bias = sizes
            path = folder / f"{name}.toml"
            path.write_text(
                f'[moe]\nd = {d}\nn = {n}\nE = 8\nK = 2\nactivation = "{activation}"\nbias = {str(bias).lower()}\n'
            )
            config = str(path)
        layers += [f"{config}:bfloat16", *([f"{config}:float16"] if name == IN_HALF_PRECISION else [])]
    return layers


@pytest.fixture(scope="session")  # the tests of other files run while it compiles (conftest.py)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Compiled]]]:
    """What the tests of this session ask for, all at once: two cores."""
    asked = [item.name for item in request.session.items]
    with ThreadPoolExecutor(len(MATRICES)) as threads:
        yield {
            name: threads.submit(compile_matrix, matrix, tmp_path_factory.mktemp("compiled"))
            for name, matrix in MATRICES.items()
            if f"test_every_kernel_compiles[{name}]" in asked
        }


@pytest.mark.usefixtures("compiled")  # starts the compilers: those who wait for them come last
def test_layers_have_every_activation() -> None:
    assert {sizes[2] for sizes in LAYERS.values() if sizes is not None} == set(ACTIVATIONS)


@pytest.mark.parametrize("name", ["sm_90a", "sm_100a", pytest.param("sm_100a, all", marks=pytest.mark.exhaustive)])
def test_every_kernel_compiles(name: str, compiled: dict[str, Future[Compiled]]) -> None:
    lines, errors, faults_of_kernels = compiled[name].result()
    matrix = MATRICES[name]
    assert errors == []
    assert len(lines) == OPERATIONS * (len(matrix.layers) + 1) + OF_SPLIT_GATE_UP * matrix.gated
    assert len(faults_of_kernels) >= matrix.least
    assert [fault for found in faults_of_kernels for fault in found] == []


LOW_RANK = """
import os, sys
arch, os.environ["QUACK_CACHE_DIR"] = sys.argv[1:]
os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"] = arch[3:-1], arch
import torch
from sonic_ep.kernels.experts import grouped_gemm
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.aot import Compilation, compile_all

def meta(*size, kind=torch.bfloat16):
    return torch.empty(size, dtype=kind, device="meta")

starts, rows = meta(3, kind=torch.int32), meta(512, 16)
calls = [
    lambda weights=weights: grouped_gemm.accumulate_product(meta(512, 2048), rows, weights, starts)
    for weights in (meta(2, 16, 2048), meta(2, 2048, 16).mT)
]
for name in ("swiglu", "swiglu_oai", "geglu_erf", "gelu_erf", "relu2"):
    act = activation_named(name)
    h, b1 = meta(512, 768 * (1 + act.gated)), meta(2, 768 * (1 + act.gated), 16)
    calls.append(lambda h=h, b1=b1, act=act: grouped_gemm.accumulate_up_projection(h, rows, b1.mT, starts, act))
compile_all([Compilation("accumulate", str(number), call) for number, call in enumerate(calls)], lambda *_: None)
"""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.exhaustive)])
def test_products_that_are_added_compile(arch: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", LOW_RANK, arch, str(tmp_path)], check=True, timeout=600, env=environment)
    found = faults([cubin(path) for path in tmp_path.rglob("*.o")], arch, tensor_core=True)
    assert len(found) == 7
    assert [fault for of_kernel in found for fault in of_kernel] == []


IN_ANOTHER_PROCESS = """
import json, os, sys
from pathlib import Path
from sonic_ep.kernels.common import compile_process
cache, gemms = Path(os.environ["QUACK_CACHE_DIR"]), compile_process.Gemms(64, 32, "swiglu", "bfloat16")
changes = json.loads(sys.argv[1])
gemms = gemms._replace(**{name: tuple(v) if name == "ranks" else v for name, v in changes.items()})
compile_process.start(gemms, (9, 0))
for operation in ("up", "down_backward", "down", "up_backward", "weight_up", "weight_down", "accumulate"):
    compile_process.wait_for(operation)
    assert compile_process.read_progress(next((cache / "sonic_ep").iterdir())).has(operation)
assert "quack" not in sys.modules
found = {path.name for path in cache.rglob("*.o")}
os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"] = "90", "sm_90a"
import torch
from sonic_ep.kernels.experts import aot, grouped_gemm as ops
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import RowLists
from sonic_ep.kernels.lora import low_rank

def meta(*size, kind=torch.bfloat16):
    return torch.empty(size, dtype=kind, device="meta")

def update(tile_aligned):
    (r1, r2), act = gemms.ranks, activation_named("swiglu")
    lora = low_rank.ExpertsLoRA(meta(2, r1, 64), meta(2, 64, r1), meta(2, r2, 32), meta(2, 64, r2))
    lists = RowLists(meta(512, kind=torch.int32), meta(3, kind=torch.int32), tile_aligned)
    x, h, y, u = meta(256, 64), meta(512, 64), meta(512, 64), meta(512, r2)
    a = low_rank.add_up_projection(ops, x, h, lora, lists, act)
    low_rank.add_down_projection(ops, a, y, lora, lists)
    low_rank.add_backward_hidden(ops, x, h, meta(512), (h, a, meta(512, 1)), lora, lists, act)
    low_rank.backward_down(ops, x, a, u, lora, lists)
    v = low_rank.backward_hidden_up(ops, h, lora, lists)
    low_rank.add_backward_pairs(ops, v, y, lora, lists)
    low_rank.backward_up(ops, x, h, v, lora, lists)

calls = aot.compilations(gemms._replace(ranks=(0, 0)))
low_rank.add_hidden_grads = lambda *_: None  # a kernel of Triton
if any(gemms.ranks):
    calls += [aot.Compilation("up", "update", lambda each=each: update(each)) for each in (False, True)]
aot.compile_all(calls, lambda *_: None)
print(len(found), len({path.name for path in cache.rglob("*.o")} - found))
"""
# Changes, and how many kernels there are: some operations of updates share one.
LAYOUTS = {"as usual": ({}, 6), "transposed": ({"transposed": True}, 6), "low-rank updates": ({"ranks": [8, 16]}, 13)}


@pytest.mark.parametrize(
    "name", ["as usual", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in LAYOUTS if each != "as usual")]
)
def test_what_another_process_compiled_is_found_here(tmp_path: Path, name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"QUACK_CACHE_DIR": str(tmp_path), "SONIC_EP_COMPILE_PROCESSES": "2"}
    changes, kernels = LAYOUTS[name]
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, json.dumps(changes)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert run.stdout == f"{kernels} 0\n", run.stderr
    assert "sonic_ep: compiling " in run.stderr
