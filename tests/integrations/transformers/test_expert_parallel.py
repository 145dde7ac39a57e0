"""`DistributedConfig(ep_implementation="sonic_ep")` beyond the grid of test_grid.py: unequal batches, files, errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig
from sonic_ep.integrations.options import SonicEPOptions
from tests.helpers.launch import RankError, RankPool

pytest.importorskip("transformers")
from tests.helpers.hugging_face import batches, loss_of, model_of, quiet
from tests.helpers.transformers_families import tiny_model

pytestmark = pytest.mark.parallel_registry

Ranks = Callable[[int], RankPool]
CAPPED = SonicEPOptions(rounding=RoundingConfig(mode="off", capacity_factor=1.1))  # a rank loses pairs


class Layout(NamedTuple):
    """Sizes of DistributedConfig, for fsdp_size * tp_size ranks."""

    fsdp_size: int = 1
    tp_size: int = 1
    ep_size: int = 1


class Trained(NamedTuple):
    """losses, and norms of the gradients' shards on this rank, by step; logits: of the trained model, in evaluation."""

    losses: list[float]
    grad_norms: list[float]
    logits: Tensor


def load(path: Path, layout: Layout, name: str, experts: str = "eager", options: SonicEPOptions | None = None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from sonic_ep.integrations.transformers import register

    register(options)
    return AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation=experts,  # of stock's implementations alone: ours computes the experts itself
        attn_implementation="eager",
        distributed_config=DistributedConfig.from_dict({**layout._asdict(), "ep_implementation": name}),
    )


def train(model: Any, rank: int, steps: int, *, lengths: tuple[int, ...] = (12,)) -> Trained:
    """Each rank has a batch of its own length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
    losses, norms = [], []
    model.train()
    own = batches(rank, steps + 1, length=lengths[rank % len(lengths)])
    for ids in own[:steps]:
        loss = loss_of(model, ids)
        loss.backward()
        grads: list[Any] = [each.grad for each in model.parameters() if each.grad is not None]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in grads]
        norms.append(float(torch.stack([grad.norm() for grad in local]).norm()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    model.eval()
    with torch.no_grad():
        return Trained(losses, norms, model(input_ids=own[steps], use_cache=False).logits)


def both(rank: int, path: Path, layout: Layout, steps: int, lengths: tuple[int, ...], checkpointing: bool) -> Any:
    found = []
    with quiet():
        for name in ("sonic_ep", "all_to_all"):
            model = load(path, layout, name)
            if checkpointing:
                model.gradient_checkpointing_enable()
            found.append(train(model, rank // layout.tp_size, steps, lengths=lengths))
    return found


def assert_alike(results: list[Any]) -> None:
    for ours, stock in results:
        assert ours.losses == pytest.approx(stock.losses, abs=1e-5)
        assert ours.grad_norms == pytest.approx(stock.grad_norms, rel=1e-5)
        torch.testing.assert_close(ours.logits, stock.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["all_to_all", "all_reduce"])
def test_our_experts_under_dispatch_of_stock(implementation: str, ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(tmp_path)  # type: ignore[operator]
    assert_alike(ranks(2).run(stock_dispatch, tmp_path, implementation))


def stock_dispatch(rank: int, path: Path, implementation: str) -> list[Any]:
    with quiet():
        layout = Layout(tp_size=2, ep_size=2)
        return [train(load(path, layout, implementation, experts), 0, 2) for experts in ("sonic_ep", "eager")]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_unequal_batches(checkpointing: bool, ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    assert_alike(ranks(2).run(both, tmp_path, Layout(fsdp_size=2, ep_size=2), 3, (12, 3), checkpointing))


def test_a_token_for_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Both ranks of a TP group hold the one token, and only one of them has it in its slice."""
    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(tmp_path)  # type: ignore[operator]
    found = ranks(2).run(one_token, tmp_path)
    torch.testing.assert_close(found[0], found[1])
    stock: Any = model_of("qwen3_moe", num_key_value_heads=2).eval()
    with torch.no_grad():
        wanted = stock(input_ids=torch.tensor([[5]]), use_cache=False).logits
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)


def one_token(rank: int, path: Path) -> Tensor:
    with quiet(), torch.no_grad():
        model = load(path, Layout(tp_size=2, ep_size=2), "sonic_ep").eval()
        return model(input_ids=torch.tensor([[5]]), use_cache=False).logits


def test_saved_folders_load_without_us(ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model_of("qwen3_moe").save_pretrained(tmp_path / "start")  # type: ignore[operator]
    found = ranks(2).run(train_and_save, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "end", attn_implementation="eager").eval()
    for rank, logits in enumerate(found):
        with torch.no_grad():
            wanted = again(input_ids=batches(rank, 3)[2], use_cache=False).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def train_and_save(rank: int, path: Path) -> Tensor:
    with quiet():
        model = load(path / "start", Layout(fsdp_size=2, ep_size=2), "sonic_ep")
        trained = train(model, rank, 2)
        model.save_pretrained(path / "end")
    return trained.logits


def refused(rank: int, path: Path) -> None:
    with quiet():
        load(path, Layout(fsdp_size=2, ep_size=2), "sonic_ep")


def test_what_we_do_not_compute_raises_when_the_model_is_built(ranks: Ranks, tmp_path: Path) -> None:
    from sonic_ep.integrations.transformers.experts import uses_registry

    model: Any = tiny_model("deepseek_v4", uses_registry)
    model.config.swiglu_limit = 8.0
    model.save_pretrained(tmp_path)
    with pytest.raises(RankError, match=r"limit=8\.0\) that sonic_ep does not have"):
        ranks(2).run(refused, tmp_path)


def eager_and_compiled(rank: int, path: Path, options: SonicEPOptions | None) -> list[Trained]:
    found = []
    for compiles in (False, True):
        with quiet():
            model = load(path, Layout(fsdp_size=2, ep_size=2), "sonic_ep", options=options)
            for layer in model.model.layers if compiles else ():
                layer.mlp.compile(backend="aot_eager")  # FSDP of the experts breaks the graph
            found.append(train(model, rank, 3, lengths=(12, 3)))
    return found


@pytest.mark.parametrize("options", [None, CAPPED], ids=["every pair", "capped"])
def test_compiled_blocks_across_ranks(options: SonicEPOptions | None, ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    assert_alike(ranks(2).run(eager_and_compiled, tmp_path, options))
