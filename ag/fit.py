"""Train: ``python -m ag.fit recipe=NAME key=value ...``."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag import callbacks, data
from ag.callbacks.checkpoint_files import newest_valid
from ag.config import Config
from ag.config.command_line import parse
from ag.config.recipes import dump
from ag.errors import UserError
from ag.gates import export, hub
from ag.gates.calibration import Calibration
from ag.gates.gate import AttentionGates
from ag.model import base as models
from ag.model.hooks import decoder_of
from ag.training.loggers import build_loggers, read_metrics
from ag.training.module import GatedLM
from ag.training.sharded import ShardedStrategy, gather

EXIT_USER_ERROR, EXIT_NOT_FINITE = 2, 3


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Codes: 0 done; 2 an error in the configuration, the data, the model, the run to resume or the disk (one line on
    stderr); 3 a loss or gradient was not finite; 143, 130 and 138 stopped by SIGTERM, Ctrl-C and SIGUSR1, after
    a checkpoint.
    """
    invocation = parse(sys.argv[1:] if argv is None else argv, Config, "ag.fit")
    try:
        data.check(invocation.config.data)
        if invocation.config.plan:
            from ag.training.memory_plan import report  # imports the fake tensors of PyTorch's compiler

            print(report(invocation.config))
            return 0
        fit(invocation.config, invocation.dry_run)
    except (UserError, MisconfigurationException, OSError) as error:
        return _fail(f"error: {error}", EXIT_USER_ERROR)
    except callbacks.NonFiniteError as error:
        # when another process fails first, Lightning's launcher kills the first one, and its exit code is lost
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
        ag.callbacks.Stopped: on SIGTERM, SIGUSR1 or Ctrl-C, after a checkpoint.
    """
    data.check(config.data)
    L.seed_everything(config.seed, workers=True, verbose=False)
    base, tokenizer = models.load_base(config.model)
    decoder_of(base)  # raises for a model that gates cannot be attached to, before the data are read
    context = base.config.get_text_config().max_position_embeddings
    batches = data.build(config, tokenizer, context)
    gates = None if config.train == "lora" else make_gates(base, config)
    model = base if config.train == "gates" else models.add_lora(base, config.lora)
    module = GatedLM(config, model, gates)
    run_dir = None if dry_run else run_folder(config)
    trainer = build_trainer(config, run_dir)
    checkpoint = None if config.resume is None else newest_valid(Path(config.resume))
    module.train()  # Lightning does not change the mode, and activation checkpointing needs training mode
    if run_dir is not None:
        os.environ["AG_RUN"] = run_dir.name  # the ranks that Lightning starts inherit it
    try:
        trainer.fit(module, batches, ckpt_path=checkpoint, weights_only=True)
    finally:
        os.environ.pop("AG_RUN", None)
    if run_dir is None:
        return None
    if module.validated_step != trainer.global_step:
        trainer.validate(module, batches, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    gather(module)
    if config.checkpoint.patience and (run_dir / "checkpoints" / "best.ckpt").exists():
        metrics = load_best(module, run_dir)
    if trainer.is_global_zero:
        write_export(run_dir / "export", module, base, tokenizer, metrics)
        if batches.truncated:
            print(f"{batches.truncated} prompts lost {batches.truncated_tokens} tokens on their left.")
        if batches.skipped:
            print(f"{batches.skipped} rows of the data were left out: too short for a prompt, or too long.")
        print(f"run folder: {run_dir}")
        if config.export.push_to_hub:
            print(f"uploaded: {hub.push(run_dir / 'export', config.export.push_to_hub)}")
    trainer.strategy.barrier()
    return run_dir


def make_gates(base: PreTrainedModel, config: Config) -> AttentionGates:
    """Make the gates of a run, fresh or with the weights of an export.

    Raises:
        UserError: (ExportError) when the export cannot be read, or its gates have other sizes.
    """
    gates = AttentionGates(base.config, config.gate)
    if config.init is not None:
        start = AttentionGates.from_pretrained(config.init)
        try:
            gates.load_state_dict(start.state_dict())
        except RuntimeError as error:
            raise UserError(f"init={config.init}: its gates do not fit those of this run: {error}") from None
    return gates


def run_folder(config: Config) -> Path:
    """Make the folder of a run, ``OUTPUT/RECIPE/TIME``, the same on all ranks, and write its config.yaml.

    Raises:
        UserError: when several processes were started by torchrun without an id that they share, or the id of another
            run.
    """
    if config.resume is not None:
        return Path(config.resume)
    name = os.environ.get("AG_RUN") or os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":
        raise UserError("torchrun has no id for this run: start it with torchrun --rdzv-id=NAME.")
    folder = Path(config.output) / config.recipe / (name or time.strftime("%Y-%m-%d_%H-%M-%S"))
    if int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0) != 0:
        return folder
    if name is not None and folder.exists():
        raise UserError(f"{folder} is there already: continue it with resume={folder}, or give the run another id.")
    while True:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:  # two runs in one second
            folder = folder.with_name(f"{folder.name}-1")
    (folder / "config.yaml").write_text(dump(config))
    return folder


def build_trainer(config: Config, run_dir: Path | None) -> L.Trainer:
    """Make the trainer; without a run folder it runs one batch of each kind and writes nothing."""
    options = config.trainer
    sharded = options.strategy == "fsdp2"
    return L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=ShardedStrategy(options.devices * options.num_nodes) if sharded else options.strategy,
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
        folder: the folder to write.
        module: the trained module.
        base: the base model inside ``module.model``.
        tokenizer: saved with a merged copy of the model.
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
            weights=module.config.export.weights,
        )
    elif adapter is not None:
        export.save_adapter(folder, adapter, base_model=models.hub_name(module.config.model.name))
    if module.config.export.merge and adapter is not None:
        shutil.rmtree(folder.parent / "merged", ignore_errors=True)  # written by this run before it was resumed
        export.save_merged(adapter, folder.parent / "merged", tokenizer, folder)


def load_best(module: GatedLM, run_dir: Path) -> dict[str, float]:
    """Put the weights of the best checkpoint into the module; returns the metrics of its step."""
    best = torch.load(run_dir / "checkpoints" / "best.ckpt", map_location="cpu", weights_only=True)
    module.load_state_dict(best["state_dict"], strict=False)
    if module.gates is not None:
        table = best.get("calibration")
        module.gates.calibration = None if table is None else Calibration(**table)
    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.csv")}
    return rows[best["global_step"]]


def _fail(message: str, code: int) -> int:
    print(f"ag.fit: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
