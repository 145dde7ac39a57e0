"""transformers.Trainer on the model, the data and the run folder of examples/finetune_transformers.py.

To Trainer, a model with our experts is one as any other: nothing here is about experts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from corpus import Corpus
from metrics import loss_record
from parallel import Mesh
from run_folder import MAX_CHECKPOINTS, RunFolder
from train import FINAL_LR, say

CHECKPOINTS = "trainer"  # Trainer's own, in the run folder


class Windows(Dataset[dict[str, Tensor]]):
    """The windows of all steps, or of a validation, in the order of our own loop."""

    def __init__(self, corpus: Corpus, options: Any, *, training: bool) -> None:
        self._corpus, self._options, self._training = corpus, options, training
        self._step, self._windows = -1, torch.empty(0)

    def __len__(self) -> int:
        options = self._options
        return options.batch * (options.steps if self._training else options.eval_batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        options = self._options
        step, row = divmod(index, options.batch)
        if step != self._step:
            sizes = {"batch": options.batch, "seq": options.seq}
            if self._training:
                windows = self._corpus.training_windows(step + 1, seed=options.seed, **sizes)
            else:
                windows = self._corpus.validation_windows(step, batches=options.eval_batches, **sizes)
            self._step, self._windows = step, windows
        return {"input_ids": self._windows[row], "labels": self._windows[row]}


def newest_checkpoint(run: Path, steps: int) -> Path:
    """Trainer's newest checkpoint of a run. Raises ValueError if there is none, or nothing left to do."""
    from transformers.trainer_utils import get_last_checkpoint

    found = get_last_checkpoint(str(run / CHECKPOINTS)) if (run / CHECKPOINTS).is_dir() else None
    if found is None:
        raise ValueError(f"--resume {str(run)!r} holds no checkpoint of Trainer; start it again without --resume")
    if (done := _step_of(Path(found))) >= steps:
        raise ValueError(
            f"--resume {str(run)!r} is at step {done} of {steps}: nothing is left to do; give more --steps"
        )
    return Path(found)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def train_with_trainer(
    run: RunFolder, options: Any, mesh: Mesh, model: Any, corpus: Corpus, checkpoints: Sequence[Path]
) -> None:
    """Train from the first step, or from the first checkpoint, to the last.

    Several processes write no checkpoints: Trainer has none of a model that is sharded when it is loaded.
    """
    from transformers import PrinterCallback, Trainer, TrainingArguments

    start = _step_of(checkpoints[0]) if checkpoints else 0
    run.open(options, None, world_size=mesh.world.size, step=start)
    say(mesh, f"{run.path}: steps {start + 1} to {options.steps}")
    on_gpu = mesh.device.type == "cuda"
    arguments = TrainingArguments(
        output_dir=str(run.path / CHECKPOINTS),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // mesh.world.size,
        per_device_eval_batch_size=options.batch // mesh.world.size,
        learning_rate=options.lr,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": FINAL_LR},
        warmup_steps=options.warmup,
        adam_beta2=0.95,
        max_grad_norm=options.clip,
        seed=options.seed,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=options.log_every,
        eval_strategy="steps",
        eval_steps=options.eval_every,
        save_strategy="steps" if mesh.world.size == 1 else "no",
        save_steps=options.save_every or options.steps,
        save_total_limit=MAX_CHECKPOINTS,
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(corpus, options, training=True),
        eval_dataset=Windows(corpus, options, training=False),
        callbacks=[_records(run, mesh, corpus.unigram_bits_per_byte())],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(checkpoints[0]) if checkpoints else None)


def _records(run: RunFolder, mesh: Mesh, unigram: float) -> Any:
    """What writes Trainer's figures to the run folder and prints them."""
    from transformers import TrainerCallback

    class Records(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            logs = logs or {}
            if "loss" in logs:
                figures = {"lr": logs["learning_rate"], "grad_norm": logs["grad_norm"]}
                run.log(loss_record("train", state.global_step, logs["loss"], **figures))
                say(mesh, f"step {state.global_step}: loss {logs['loss']:.3f}")
            elif "eval_loss" in logs:
                record = loss_record("validation", state.global_step, logs["eval_loss"], unigram_bits_per_byte=unigram)
                run.log(record)
                say(mesh, f"step {state.global_step}: validation {record['bits_per_byte']:.3f} bits per byte")

    return Records()
