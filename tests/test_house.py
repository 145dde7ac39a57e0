"""The plan of the house, held by force: folders linked into the package, imports that only go down, small files."""

import ast
import os
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from sonic_ep.dispatch.protocol import Transport

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"kernels", "dispatch", "routers", "configs"}
ROOF = {"integrations", "examples", "benchmarks", "tests"}
GROUND = {
    "config",
    "routing",
    "groups",
    "checks",
    "extras",
    "first_order",
    "async_d2h",
    "graph",
    "initialization",
    "symmetric_memory",
}
# Which parts of sonic_ep each floor may import; the layer may import all but the roof, and the roof everything.
MAY_IMPORT = {
    "ground": GROUND,
    "kernels": GROUND | {"kernels"},
    "dispatch": GROUND | {"kernels", "dispatch"},
    "routers": GROUND | {"kernels", "routers"},
}
MAX_LINES = 500
MAX_ANY = 150  # lines of the product with this type, which says nothing
MAX_PARAMETERS = 12
# Those that have more, outside of kernels/: two are operations of torch.library, which take tensors and numbers alone,
# and two have the parameters of a whole layer.
MANY_PARAMETERS = {
    "sonic_ep/functional.py:moe",
    "sonic_ep/integrations/deepspeed/moe.py:__init__",
}
# The one file that imports quack and what CuTe-DSL does not make public. A benchmark times with quack's own tuner, of
# whatever version sonic-moe runs on, and another trains with its cross-entropy, which is public.
QUACK_COMPAT, TUNER = "kernels/experts/quack_compat.py", "benchmarks/short_tuning.py"
PRETRAINED = "benchmarks/pretrain_model.py"
# Words with several meanings here once, and a term of the field for each now (docs/design.md). In no name of ours.
OLD_WORDS = set(
    "ahead apart agree agreement announce aside beside everyone everyones forecast gates handover keep keeps kept "
    "launched meeting nobody opened owner owners patience receipt room rooms settle settled situation "
    "told unread whose".split()
)
FOREIGN_NAMES = {"keep_vars", "_get_current_graph_task_keep_graph"}  # torch's
# Of CuTe-DSL, beside names with an underscore.
NOT_PUBLIC = {"base_dsl", "compiler", "cutlass_dsl", "experimental", "impl_utils"}
# One path a file: rglob does not enter the links sonic_ep/<folder>.
GPU_PACKAGES = {"triton", "quack", "cutlass"}
PRODUCT = {"sonic_ep", "kernels", "dispatch", "routers"}
FILES = sorted(path for top in ("sonic_ep", *PACKAGES, *ROOF) for path in (ROOT / top).rglob("*.py"))
KERNELS = [path for path in FILES if path.is_relative_to(ROOT / "kernels")]


def floor_of(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    if top != "sonic_ep":
        return "roof" if top in ROOF else top
    return "roof" if rest[0] in ROOF else "ground" if rest[0] in GROUND else "layer"


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere below `tree`; relative ones with their leading dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_on_loading(node: ast.AST) -> Iterator[str]:
    """Imports that run when the module is loaded: not those in functions or under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from imports(child)
        else:
            yield from imports_on_loading(child)


def fault_of(name: str, floor: str) -> str | None:
    """What is wrong with importing `name` on `floor`, if anything."""
    top, *rest = name.split(".")
    if top == "" or top in PACKAGES:
        return f"write sonic_ep.{name.lstrip('.')}, in full"
    if floor == "roof":
        return None
    part = rest[0] if top == "sonic_ep" and rest else top
    if part in ROOF:
        return f"nobody imports {part}"
    if top == "sonic_ep" and part not in MAY_IMPORT.get(floor, {part}):
        return f"{floor} may import only sonic_ep.{{{','.join(sorted(MAY_IMPORT[floor]))}}}"
    return None


def imports_by_name(tree: ast.AST) -> Iterator[str]:
    """Names of modules that are imported by import_module("name")."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            yield from (str(text.value) for text in node.args if isinstance(text, ast.Constant))


def is_for_quack_compat(name: str) -> bool:
    """Is `name` one that only quack_compat.py may import?"""
    top, *parts = name.split(".")
    return top == "quack" or (top == "cutlass" and any(part in NOT_PUBLIC or part[0] == "_" for part in parts))


def imports_for_quack_compat(files: list[Path]) -> list[str]:
    """Which of the files import what only quack_compat.py may, each with the name."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    return [
        f"{path.name} imports {name}"
        for path, tree in trees.items()
        for name in (*imports(tree), *imports_by_name(tree))
        if is_for_quack_compat(name)
    ]


def test_folders_are_real_and_linked_into_the_package() -> None:
    for bound in PACKAGES:
        assert (ROOT / bound).is_dir()
        assert not (ROOT / bound).is_symlink()
        assert os.readlink(ROOT / "sonic_ep" / bound) == f"../{bound}"


def test_no_init_where_it_would_shadow_other_packages() -> None:
    assert [str(ROOT / bound) for bound in PACKAGES | {"examples"} if (ROOT / bound / "__init__.py").exists()] == []
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_imports_are_absolute_and_only_go_down() -> None:
    faults = [
        f"{path.relative_to(ROOT)} imports {name}: {fault}"
        for path in FILES
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if (fault := fault_of(name, floor_of(path)))
    ]
    assert faults == []


def gpu_modules() -> set[Path]:
    """Returns the modules of kernels/ that need Triton or quack to be loaded, whether they or what they import do."""
    needs = {path: {*imports_on_loading(ast.parse(path.read_text(encoding="utf-8")))} for path in KERNELS}
    found = {path for path, names in needs.items() if any(name.split(".")[0] in GPU_PACKAGES for name in names)}
    while True:
        loaded = {f"{name_of(path)}." for path in found}
        more = {path for path, names in needs.items() if any(f"{name}.".startswith(tuple(loaded)) for name in names)}
        if more <= found:
            return found
        found |= more


def name_of(path: Path) -> str:
    """Returns the dotted name by which a module of a top-level folder is imported."""
    return ".".join(("sonic_ep", *path.relative_to(ROOT).with_suffix("").parts))


def test_the_core_needs_torch_and_the_standard_library_alone() -> None:
    known = sys.stdlib_module_names | {"torch", "sonic_ep"}
    of_gpu = gpu_modules()
    faults = [
        f"{path.relative_to(ROOT)} imports {name} when it is loaded"
        for path in FILES
        if floor_of(path) != "roof" and path not in of_gpu
        for name in imports_on_loading(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[0] not in known
    ]
    assert faults == []


def test_gpu_modules_are_imported_by_each_other_alone() -> None:
    # They import their extras when they are loaded, so nothing else may load them but by import_module, after a check.
    of_gpu = gpu_modules()
    assert {path.stem for path in of_gpu} > {"triton", "grouped_gemm", "quack_compat", "signals", "fused"}
    assert not {path.stem for path in of_gpu} & {"reference", "backend", "signal_pad", "activations", "mlp"}
    loaded = tuple(f"{name_of(path)}." for path in of_gpu)
    faults = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if floor_of(path) != "roof" and path not in of_gpu
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if f"{name}.".startswith(loaded)
    ]
    assert faults == []


def test_folders_are_small() -> None:
    limits = {"kernels": 10, "sonic_ep": 20}
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in {path.parent for path in FILES if path.relative_to(ROOT).parts[0] in PRODUCT}
        if (count := len([*folder.glob("*.py")])) > limits.get(folder.relative_to(ROOT).parts[0], 15)
        and not (folder.relative_to(ROOT).parts[0] == "sonic_ep" and folder != ROOT / "sonic_ep" and count <= 15)
    }
    assert crowded == {}


def test_only_quack_compat_imports_quack_and_private_names_of_the_dsl() -> None:
    allowed = {ROOT / QUACK_COMPAT, ROOT / TUNER, ROOT / PRETRAINED}
    others = [path for path in FILES if path not in allowed and not path.is_relative_to(ROOT / "tests")]
    assert imports_for_quack_compat(others) == []
    assert imports_for_quack_compat([ROOT / QUACK_COMPAT]) != []


def test_mocks_are_for_tests() -> None:
    faults = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        if not path.is_relative_to(ROOT / "tests")
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("unittest")
    ]
    assert faults == []


def test_no_comparison_escapes_the_limit_on_tolerances() -> None:
    """tests/helpers/tolerances.py knows those of torch alone."""
    others = {"isclose", "assert_allclose", "assert_almost_equal", "assert_array_almost_equal"}
    faults = [
        f"{path.relative_to(ROOT)} calls {name}"
        for path in FILES
        if path.is_relative_to(ROOT / "tests")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        if (name := ast.unparse(node.func)).split(".")[-1] in others or name in ("np.allclose", "numpy.allclose")
    ]
    assert faults == []


def old_words_in(name: str) -> set[str]:
    """Returns which of a name's words are old ones; the name of a test is a sentence, and may have any."""
    if name in FOREIGN_NAMES or name.startswith("test_"):
        return set()
    return {word.lower() for word in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)} & OLD_WORDS


def test_no_name_has_an_old_word() -> None:
    found = set()
    for path in FILES:
        with tokenize.open(path) as file:
            names = {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}
        # Of a test file's name, `test_` is no sentence.
        found |= {f"{path.relative_to(ROOT)}: {name}" for name in names if old_words_in(name)}
        if old_words_in(path.stem.removeprefix("test_")):
            found.add(str(path.relative_to(ROOT)))
    assert found == set()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gates_N", {"gates"}),
        ("HandoverOfRooms", {"handover", "rooms"}),
        ("keep_vars", set()),
        ("keepdim", set()),
        ("test_what_nobody_takes", set()),
        ("_settle", {"settle"}),
    ],
)
def test_the_rule_of_old_words_itself(name: str, found: set[str]) -> None:
    assert old_words_in(name) == found


def test_the_layer_shows_its_steps() -> None:
    """What MoE runs fits on a screen: route, `moe` (dispatch, compute, combine), shared expert."""
    tree = ast.parse((ROOT / "sonic_ep" / "layer.py").read_text(encoding="utf-8"))
    lines = {
        node.name: (node.end_lineno or 0) - node.lineno for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    assert lines["_compute"] <= 30
    assert lines["forward"] <= 20


def callers(called: set[str]) -> set[tuple[str, str]]:
    """Returns (name as it is written, file) of every call in the product of one of these names."""
    return {
        (name, str(path.relative_to(ROOT)))
        for path in FILES
        if path.relative_to(ROOT).parts[0] in PRODUCT
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in called
    }


def test_forward_and_backward_of_the_experts_are_written_once() -> None:
    """steps/ runs and traces the same two functions."""
    tree = ast.parse((ROOT / "kernels" / "experts" / "mlp.py").read_text(encoding="utf-8"))
    steps = {f"mlp.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"mlp.forward_hidden", "mlp.backward_hidden", "mlp.backward_pairs"} <= steps
    assert callers(steps) == {(step, "sonic_ep/expert_parallel_mlp.py") for step in steps}
    both = {
        str(path.relative_to(ROOT))
        for path in FILES
        if "sonic_ep.expert_parallel_mlp.backward" in imports(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert both == {f"sonic_ep/steps/{name}.py" for name in ("layer_step", "experts_step", "experts_trace")}


def test_no_object_gets_another_class() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
    ]
    assert found == []


def test_a_transport_has_few_members() -> None:
    members = {name for name in dir(Transport) if not name.startswith("_")}
    assert {"prepare", "dispatch", "combine", "combine_scalars"} < members
    assert len(members) <= 9


def test_few_lines_of_the_product_say_any() -> None:
    lines = set()
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in PRODUCT:
            with tokenize.open(path) as file:
                tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME]
            lines |= {f"{path.relative_to(ROOT)}:{token.start[0]}" for token in tokens if token.string == "Any"}
    assert len(lines) <= MAX_ANY, sorted(lines)


def num_parameters(function: ast.FunctionDef) -> int:
    """Returns how many parameters a function has, without self or cls."""
    given = function.args
    named = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(named) + len([each for each in (given.vararg, given.kwarg) if each]) - (named[:1] in (["self"], ["cls"]))


def test_functions_have_few_parameters() -> None:
    many = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] in PRODUCT - {"kernels"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and num_parameters(node) > MAX_PARAMETERS
    }
    assert many == MANY_PARAMETERS


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("name", "floor", "allowed"),
    [
        ("sonic_ep.config.MoEConfig", "kernels", True),
        ("sonic_ep.kernels.experts.reference", "routers", True),
        ("sonic_ep.dispatch.plan", "routers", False),
        ("sonic_ep.routers.topk", "dispatch", False),
        ("sonic_ep.dispatch.plan", "kernels", False),
        ("sonic_ep.kernels.experts.tile_rows", "ground", False),
        ("sonic_ep.MoE", "routers", False),
        ("sonic_ep", "ground", False),
        ("sonic_ep.routers.topk", "layer", True),
        ("sonic_ep.integrations.megatron", "layer", False),
        ("tests.helpers.launch", "kernels", False),
        ("tests.helpers.launch", "roof", True),
        ("kernels.reference", "roof", False),
        (".tiles", "kernels", False),
        ("torch.distributed", "ground", True),
    ],
)
def test_the_rule_itself(name: str, floor: str, allowed: bool) -> None:
    assert (fault_of(name, floor) is None) is allowed


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("import cutlass", True),
        ("import cutlass.cute as cute", True),
        ("from cutlass import Int32, const_expr", True),
        ("from cutlass.cute.nvgpu import warpgroup", True),
        ("import torch, quack", False),
        ("from quack.epilogue.frontend import EpiMod", False),
        ("def load():\n    import_module('quack.cache')", False),
        ("from cutlass.experimental import primitives as prims", False),
        ("from cutlass.cute.experimental import iket", False),
        ("from cutlass.base_dsl.typing import Integer", False),
        ("import cutlass.cute._tvm_ffi_args_spec_converter", False),
        ("from cutlass import _mlir", False),
    ],
)
def test_the_rule_of_quack_compat_itself(line: str, allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(line)
    assert (imports_for_quack_compat([tmp_path / "some.py"]) == []) is allowed
