"""The shipped shapes: they load, every value is cited, the table in configs/README.md agrees, and where the experts
make up nearly all of a model their parameters add up to its published size."""

import re
from pathlib import Path

import pytest

from sonic_ep import load_config
from sonic_ep.config import MoEConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
EXPECTED = {
    "sonic_1_4b", "sonic_7b", "sonic_30b", "sonic_120b", "olmoe", "qwen3_30b_a3b", "qwen3_235b_a22b",
    "qwen3_next_80b_a3b", "deepseek_v3", "gpt_oss_20b", "gpt_oss_120b", "kimi_k2", "mixtral_8x7b", "mixtral_8x22b",
    "tiny",
}  # fmt: skip

# name: (MoE layers, published parameters, of what). The models left out have too large a dense rest for a 3 % check.
PUBLISHED = {
    # config.json "num_hidden_layers"; model card: "Non-Embedding: 234B"
    "qwen3_235b_a22b": (94, 234e9, "non-embedding"),
    # config.json "num_hidden_layers"; model card: "Non-Embedding: 79B"
    "qwen3_next_80b_a3b": (48, 79e9, "non-embedding"),
    # arXiv 2412.19437, section 4.2: 61 layers, the first three dense; 671B
    "deepseek_v3": (58, 671e9, "total"),
    # MoonshotAI/Kimi-K2 README: 61 layers, 1 dense; arXiv 2507.20534: 1.04T
    "kimi_k2": (60, 1.04e12, "total"),
}

# arXiv 2508.10925, section 2 and table 1, in billions: layers, MLP, attention, embedding + unembedding (the latter half
# counts as active), active. Exact enough to miss the biases, were they missing.
GPT_OSS = {"gpt_oss_20b": (24, 19.12, 0.64, 1.16, 3.61), "gpt_oss_120b": (36, 114.71, 0.96, 1.16, 5.13)}


def moe_layer_parameters(config: MoEConfig, experts: int) -> int:
    """Parameters of one MoE layer with `experts` of its routed experts: routed, shared, gate and router."""
    bias = 2 * config.n + config.d if config.bias else 0
    routed = experts * (3 * config.d * config.n + bias)
    shared = 3 * config.d * config.shared_n + (config.d if config.shared_gate else 0)
    router = config.E * (config.d + (config.router.linear_bias or config.router.expert_bias))
    return routed + shared + router


def test_all_shapes_ship() -> None:
    assert set(NAMES) == EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_loads_by_name_and_by_path(name: str) -> None:
    config = load_config(name)
    assert config == load_config(CONFIGS / f"{name}.toml") == load_config(str(CONFIGS / f"{name}.toml"))
    assert config == MoEConfig.from_dict(config.to_dict())
    assert config.name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_cited(name: str) -> None:
    text = (CONFIGS / f"{name}.toml").read_text()
    assert "# Source: " in text.partition("[moe]")[0]
    values = [line for line in text.splitlines() if re.match(r"\w+ *=", line)]
    assert [line for line in values if not re.search(r"  # \w{3,}", line)] == []
    keys = [line.split()[0] for line in values]
    assert {"d", "n", "E", "K"} <= set(keys)


def test_readme_table_agrees() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| (\d+) \| (\w+)",
        (CONFIGS / "README.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(row[0] for row in rows) == NAMES
    for name, *sizes, granularity, shared_n, score in rows:
        config = load_config(name)
        assert [int(size) for size in sizes] == [config.d, config.n, config.E, config.K], name
        assert float(granularity) == pytest.approx(config.d / config.n, abs=0.05), name
        assert (int(shared_n), score) == (config.shared_n, config.router.score), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_expert_parameters_make_up_the_published_size(name: str) -> None:
    layers, published, part = PUBLISHED[name]
    config = load_config(name)
    share = layers * moe_layer_parameters(config, config.E) / published
    assert 0.97 <= share <= 1.001, f"{name}: {share:.4f} of the published {part} parameters"


@pytest.mark.parametrize("name", GPT_OSS)
def test_total_and_active_parameters_of_gpt_oss(name: str) -> None:
    layers, mlp, attention, embedding, active = GPT_OSS[name]
    config = load_config(name)
    assert round(layers * moe_layer_parameters(config, config.E) / 1e9, 2) == mlp
    active_mlp = layers * moe_layer_parameters(config, config.K) / 1e9
    assert active_mlp + attention + embedding / 2 == pytest.approx(active, rel=0.005)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[router]\nrenormalise = true", r"router\.renormalise; did you mean router\.renormalize\?"),
        ("[moe]\nactivaton = 'swiglu'\nd = 8\nn = 8\nE = 4\nK = 2", r"activaton; did you mean activation\?"),
        ("[rounding]\nM = 128", r"rounding\.M; known keys: mode, t, G"),
        ("[routing]\nscore = 'softmax'", r"\[routing\].*known tables: \[moe\], \[router\], \[rounding\]"),
    ],
)
def test_unknown_key_raises_with_a_suggestion(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "layer.toml"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FileNotFoundError, match=r"qwen3_30b.*deepseek_v3, .*tiny"):
        load_config("qwen3_30b")
