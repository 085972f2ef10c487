"""Train: ``python -m ag.fit recipe=NAME key=value ...``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag import callbacks, data, export, models
from ag.callbacks.checkpoint_files import newest_valid
from ag.cli import parse
from ag.config import Config
from ag.configure import dump
from ag.errors import UserError
from ag.gate import AttentionGates
from ag.loggers import build_loggers
from ag.module import GatedLM

EXIT_USER_ERROR, EXIT_NOT_FINITE = 2, 3


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Codes: 0 done; 2 something is wrong with the configuration, the data, the model or the run to resume (one line on
    stderr); 3 a loss or gradient was not finite; 143 and 130 stopped by SIGTERM and Ctrl-C, after a checkpoint.
    """
    invocation = parse(sys.argv[1:] if argv is None else argv, Config, "ag.fit")
    try:
        fit(invocation.config, invocation.dry_run)
    except (UserError, MisconfigurationException) as error:
        return _fail(f"error: {error}", EXIT_USER_ERROR)
    except callbacks.NonFiniteError as error:
        # Lightning's launcher kills the first process, and its exit code, when it sees another one fail
        return _fail(f"error: {error}", EXIT_NOT_FINITE if os.environ.get("LOCAL_RANK", "0") == "0" else 0)
    except callbacks.Stopped as stopped:
        return _fail(str(stopped), int(stopped.code or 0))
    return 0


def fit(config: Config, dry_run: bool = False) -> Path | None:
    """Train and export.

    Args:
        config: the whole configuration.
        dry_run: build everything, run one training and one validation batch, write nothing.

    Returns:
        The run folder, None after a dry run.

    Raises:
        UserError: (ModelError, DataError, ExportError, ...) naming what is wrong and the fix.
        ag.callbacks.NonFiniteError: a loss or gradient was not finite; the last checkpoint is kept.
        ag.callbacks.Stopped: on SIGTERM or Ctrl-C, after a checkpoint.
    """
    L.seed_everything(config.seed, workers=True, verbose=False)
    base, tokenizer = models.load_base(config.model)
    context = base.config.get_text_config().max_position_embeddings
    batches = data.build(config, tokenizer, context)
    gates = None if config.train == "lora" else AttentionGates(base.config, config.gate)
    model = base if config.train == "gates" else models.add_lora(base, config.lora)
    module = GatedLM(config, model, gates)
    run_dir = None if dry_run else run_folder(config)
    trainer = build_trainer(config, run_dir)
    checkpoint = None if config.resume is None else newest_valid(Path(config.resume))
    module.train()  # Lightning keeps the mode it finds, and checkpointing of activations needs this one
    trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=True)
    if run_dir is None:
        return None
    if "val/loss" not in trainer.callback_metrics:  # stopped where a validation was due, which Lightning skips then
        trainer.validate(module, batches, verbose=False)
    if config.checkpoint.patience:
        load_best(module, run_dir)
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        write_export(run_dir / "export", module, base, tokenizer, metrics)
        if batches.truncated:
            print(f"{batches.truncated} prompts lost {batches.truncated_tokens} tokens on their left.")
        print(f"run folder: {run_dir}")
    trainer.strategy.barrier()
    return run_dir


def run_folder(config: Config) -> Path:
    """Make the folder of a run, ``OUTPUT/RECIPE/TIME``, the same on all ranks, and write its config.yaml.

    Raises:
        UserError: when several processes were started by torchrun without an id that they share.
    """
    if config.resume is not None:
        return Path(config.resume)
    name = os.environ.get("AG_RUN") or os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":
        raise UserError("torchrun has no id for this run: start it with torchrun --rdzv-id=NAME.")
    folder = Path(config.output) / config.recipe / (name or time.strftime("%Y-%m-%d_%H-%M-%S"))
    if int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0) == 0:
        while name is None and folder.exists():  # two runs in one second
            folder = folder.with_name(f"{folder.name}-1")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config))
    os.environ["AG_RUN"] = folder.name  # the ranks that Lightning starts inherit it
    return folder


def build_trainer(config: Config, run_dir: Path | None) -> L.Trainer:
    """Make the trainer; without a run folder it runs one batch of each kind and writes nothing."""
    options = config.trainer
    return L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=options.strategy,
        precision=options.precision,
        max_epochs=options.max_epochs if options.max_steps < 0 else -1,
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        val_check_interval=options.val_every * options.accumulate or None,
        check_val_every_n_epoch=None if options.val_every else 1,
        limit_val_batches=options.val_batches,
        log_every_n_steps=options.log_every,
        deterministic=options.deterministic,
        callbacks=callbacks.build(config, run_dir) if run_dir else None,
        logger=build_loggers(config, run_dir) if run_dir else False,
        plugins=[callbacks.AtomicCheckpointIO()],
        default_root_dir=run_dir,
        fast_dev_run=run_dir is None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=options.progress,
        enable_model_summary=False,
    )


def write_export(
    folder: Path,
    module: GatedLM,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    metrics: dict[str, float],
) -> None:
    """Write what was trained: gates with their adapter, or the adapter alone for the baseline.

    Args:
        folder: where to.
        module: the trained module.
        base: the base model, inside it.
        tokenizer: its tokenizer, for a merged copy of the model.
        metrics: the last metrics of the run.
    """
    adapter = module.model if isinstance(module.model, PeftModel) else None
    measured = {name.removeprefix("val/"): value for name, value in metrics.items() if name.startswith("val/")}
    if "evicted" in measured:
        measured["kept"] = 1 - measured["evicted"]
    figures = sorted((folder.parent / "figures").glob("keep-0-*.png"))
    if module.gates is not None:
        export.save(
            folder,
            module.gates,
            base_model=models.hub_name(module.config.model.name),
            base_revision=models.base_revision(base),
            adapter=adapter,
            metrics=measured,
            figure=figures[-1] if figures else None,
        )
    elif adapter is not None:
        adapter.save_pretrained(str(folder / "adapter"))
    if module.config.export.merge and adapter is not None:
        export.save_merged(adapter, folder.parent / "merged", tokenizer)


def load_best(module: GatedLM, run_dir: Path) -> None:
    """Put the weights of the best checkpoint into the module."""
    best = torch.load(run_dir / "checkpoints" / "best.ckpt", map_location="cpu", weights_only=True)
    module.load_state_dict(best["state_dict"], strict=False)


def _fail(message: str, code: int) -> int:
    print(f"ag.fit: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
