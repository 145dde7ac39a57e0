"""Reinforcement learning with TRL's GRPOTrainer: a model of transformers with sonic_ep's experts, which also generates.

    python examples/trl_grpo.py                    a tiny Qwen3-MoE with random weights learns to say even numbers
    python examples/trl_grpo.py --model FOLDER --data FILE   a model with its tokenizer; a line {"prompt": ...} a row
    python examples/trl_grpo.py --lora             LoRA on experts and attention, through PEFT (fuse_lora)
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/trl_grpo.py --ep-size 2

Training computes each token by the experts that generated it (docs/replay_and_padding.md). Processes, devices, the run
folder and what it needs are as in trl_sft.py. A task of your own replaces `share_of_even`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel import Mesh
from sonic_ep import record_routing
from sonic_ep.routers.given_routing import UNSET
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
    """The one place where generation and training meet: the experts that generated a token also train on it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from sonic_ep.integrations.transformers import recorded_experts, replay_routing

    class ReplayingTrainer(GRPOTrainer):
        """Notes which experts each token has in generation, and gives them to the forward that computes the loss."""

        given: Tensor | None = None  # of the next forward of the model
        generated: Tensor

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            with record_routing() as record:
                completions = super()._generate_single_turn(*arguments, **options)
            self.generated = recorded_experts(model, record, len(arguments[0]))
            return completions

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            mask_BL = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            # The last token of all was drawn, but went through no layer.
            routed_experts = self.generated.new_full((*mask_BL.shape, *self.generated.shape[2:]), UNSET)
            routed_experts[:, :-1] = self.generated[:, : mask_BL.shape[1] - 1]
            batch["routed_experts"] = routed_experts.masked_fill(mask_BL[:, :, None, None] == 0, UNSET)
            return batch

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.given = inputs["routed_experts"]
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.given = None

    trainer = ReplayingTrainer(
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
    replay_routing(model)

    def add_experts(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if trainer.given is None else (args, {**kwargs, "routed_experts": trainer.given})

    model.register_forward_pre_hook(add_experts, with_kwargs=True, prepend=True)
    return trainer


if __name__ == "__main__":
    main()
