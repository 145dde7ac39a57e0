"""The model: causal, shaped as asked, and refusing shapes that cannot be."""

import math

import pytest
import torch

from language_model import LanguageModel, ModelConfig, next_byte_loss
from sonic_ep import EPGroup, MoEConfig

MOE = MoEConfig(d=32, n=16, E=8, K=2, name="small")


def small_model(config: ModelConfig) -> LanguageModel:
    return LanguageModel(config, seq=16, group=EPGroup.alone(), seed=0, device=torch.device("cpu"))


def test_later_bytes_do_not_reach_earlier_logits() -> None:
    model = small_model(ModelConfig(moe=MOE, layers=2, head_dim=16, shared_every=2)).eval()
    bytes_BS = torch.randint(256, (2, 16))
    changed_BS = bytes_BS.clone()
    changed_BS[:, 9] = (changed_BS[:, 9] + 1) % 256
    before, after = model(bytes_BS).logits_BSV, model(changed_BS).logits_BSV
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amin(1).amax() > 1e-4


def test_positions_matter() -> None:
    model = small_model(ModelConfig(moe=MOE, layers=1, head_dim=16, shared_every=0)).eval()
    logits = model(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])).logits_BSV
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_the_loss_starts_near_a_guess() -> None:
    """8 bits for 256 equally likely bytes, and log2(e) / 2 = 0.72 for logits of variance 1."""
    model = small_model(ModelConfig(moe=MOE, layers=1, head_dim=16, shared_every=0))
    windows = torch.randint(256, (4, 17))
    loss = next_byte_loss(model(windows[:, :-1]), windows)
    assert loss.item() / math.log(2) == pytest.approx(8.72, abs=0.5)


def test_the_seed_is_all_that_weights_depend_on() -> None:
    config = ModelConfig(moe=MOE, layers=2, head_dim=16, shared_every=2)
    first = small_model(config).state_dict()
    torch.manual_seed(99)
    for name, value in small_model(config).state_dict().items():
        torch.testing.assert_close(value, first[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("shared_n", "shared_every", "widths"),
    [(0, 2, [0, 16, 0, 16]), (24, 2, [0, 24, 0, 24]), (24, 0, [24] * 4), (0, 0, [0] * 4), (0, 1, [16] * 4)],
)
def test_which_blocks_have_a_shared_expert(shared_n: int, shared_every: int, widths: list[int]) -> None:
    config = ModelConfig(moe=MOE.replace(shared_n=shared_n), layers=4, head_dim=16, shared_every=shared_every)
    assert [config.moe_of_layer(layer).shared_n for layer in range(4)] == widths


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"head_dim": 24}, {"head_dim": 1}, {"shared_every": -1}])
def test_errors(wrong: dict[str, int]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} {value}"):
        ModelConfig(moe=MOE, **{"layers": 2, "head_dim": 16, "shared_every": 2, **wrong})
