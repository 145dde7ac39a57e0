"""A kernel that is kept on disk is as old as the sources it was made from: quack's, and where it is ours, ours."""

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sonic_ep.kernels.common.sources import digest_of, modules_of, sources_of
from tests.helpers.machine_code import needs_compilers

EXPERTS = "sonic_ep.kernels.experts"


def test_the_digest_is_of_what_a_module_imports_and_of_nothing_else() -> None:
    row_gemm, wgrad = modules_of(f"{EXPERTS}.sm90.row_gemm"), modules_of(f"{EXPERTS}.sm90.wgrad")
    shared = {f"{EXPERTS}.{name}" for name in ("quack_compat", "sm90.tile_prefetch", "sm90.gather_producer")}
    assert row_gemm.keys() > shared | {f"{EXPERTS}.{name}" for name in ("sm90.varlen_m", "sm90.epilogue")}
    assert wgrad.keys() > shared
    assert not [name for name in row_gemm | wgrad if ".route." in name or ".dispatch." in name or "tile_table" in name]
    assert sources_of(f"{EXPERTS}.sm90.wgrad") == digest_of(wgrad)


@pytest.mark.parametrize("change", ["content", "name", "new", "gone", "moved"])
def test_any_change_shows(change: str) -> None:
    modules = {"a": b"x = 1\n", "b": b"y = 2\n"}
    before = digest_of(modules)
    assert digest_of(dict(reversed(modules.items()))) == before
    match change:
        case "content":
            modules["a"] = b"x = 2\n"
        case "name":
            modules["c"] = modules.pop("a")
        case "new":
            modules["c"] = b""
        case "gone":
            del modules["b"]
        case _:  # from the end of one to the start of the other
            modules = {"a": b"", "b": b"x = 1\ny = 2\n"}
    assert digest_of(modules) != before


@needs_compilers
def test_kernels_of_changed_epilogues_are_kept_by_it() -> None:
    quack_compat: Any = import_module("sonic_ep.kernels.experts.quack_compat")
    mod = import_module("quack.epilogue.library").identity_epi

    def digest(of: str) -> str:
        with patch.object(quack_compat, "sources_of", lambda _: of):
            return quack_compat.OverriddenEpiMod(mod, type("Change", (), {}), "a change").semantic_digest

    assert digest("these") == digest("these")
    assert len({mod.semantic_digest, digest("these"), digest("those")}) == 3


@needs_compilers
def test_epilogues_of_ours_are_kept_by_what_they_are_and_refer_to() -> None:
    """By quack, in kernels that we do not change, as on Blackwell."""
    gated: Any = import_module("sonic_ep.kernels.experts.gated_epilogues")
    operations: Any = import_module("sonic_ep.kernels.experts.grouped_gemm")
    gemm_epilogue = import_module("quack.epilogue.frontend").gemm_epilogue
    ours = [mod for epilogues in gated.EPILOGUES.values() for mod in epilogues] + [operations._bias_epilogue]
    assert len({mod.semantic_digest for mod in ours}) == len(ours)
    again, up = gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair"), gated.EPILOGUES["swiglu_oai"].up
    assert again(up.fn).semantic_digest == up.semantic_digest
    with patch.object(gated, "_GPT_OSS_LIMIT", 8.0):
        assert again(up.fn).semantic_digest != up.semantic_digest


@needs_compilers
def test_weight_gemms_are_kept_by_it() -> None:
    weight_gemm: Any = import_module("sonic_ep.kernels.experts.sm90.wgrad")
    tile = import_module("sonic_ep.kernels.experts.tile_table").TileConfig(128, 128, True)
    rows, out = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((64, 256), (2, 64, 128)))
    given: list[tuple[Any, ...]] = []
    with (
        patch.object(weight_gemm, "_compile_weight_gemm", lambda *arguments: given.append(arguments)),
        patch.object(weight_gemm, "get_device_capacity", lambda _: (9, 0)),
        patch.object(weight_gemm, "max_active_clusters", lambda *_, **__: 1),
    ):
        weight_gemm.WeightGemm(rows, out, tile)
    assert [arguments[-1] for arguments in given] == [sources_of(f"{EXPERTS}.sm90.wgrad")]


@needs_compilers
def test_quacks_own_kernels_are_not() -> None:
    """Or its compile workers, which do not know ours, would put them where nobody looks."""
    import_module("sonic_ep.kernels.experts.grouped_gemm")
    assert import_module("quack.cache").EXTRA_SOURCE_DIRS == []
