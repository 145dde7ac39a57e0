"""Reinforcement learning with TRL's GRPOTrainer: a model of transformers with sonic_ep's experts, which also generates.

    python examples/trl_grpo.py                    a tiny Qwen3-MoE with random weights learns to say even numbers
    python examples/trl_grpo.py --model FOLDER --data FILE   a model with its tokenizer; a line {"prompt": ...} a row
    python examples/trl_grpo.py --lora             LoRA on experts and attention, through PEFT (fuse_lora)
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/trl_grpo.py --ep-size 2

Processes, devices, the run folder and what it needs are as in trl_sft.py. A task of your own replaces `share_of_even`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel import Mesh
from trl_sft import Rows, arguments_of, counting, figures, parser_of, train

GROUP = 8  # completions of a prompt, whose rewards are compared
LENGTH = 8  # tokens of a completion


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("trl_grpo.py", steps=20, batch=64, lr=5e-3, column="prompt")
    options = parser.parse_args(arguments)
    if options.batch % GROUP:
        parser.error(f"--batch {options.batch} is not a multiple of the {GROUP} completions of a prompt")
    train(parser, options, prompts, grpo_trainer)


def prompts(seed: int) -> Rows:
    """Rows such as "61 62 63 0"."""
    return [{"prompt": " ".join(row["text"].split()[:4])} for row in counting(seed)]


def share_of_even(completions: list[str], **_: Any) -> list[float | None]:
    """The toy reward: how many of LENGTH words are even numbers."""
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in text.split()) / LENGTH for text in completions]


def grpo_trainer(options: argparse.Namespace, mesh: Mesh, model: Any, tokenizer: Any, rows: Rows, folder: Path) -> Any:
    """The one place where generation and training meet. The training forward routes each token anew."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        reward_funcs=share_of_even,
        args=GRPOConfig(
            **arguments_of(options, mesh, folder),
            num_generations=GROUP,
            max_completion_length=LENGTH,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[figures(mesh, "reward")],
    )


if __name__ == "__main__":
    main()
