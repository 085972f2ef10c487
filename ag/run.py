"""A training run from its configuration to its export."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import disable_possible_user_warnings
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import StrategyRegistry
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ag import callbacks, data
from ag.callbacks.checkpoint_files import checkpoints, newest_valid, step_of
from ag.config import Config
from ag.config.command_line import Invocation
from ag.config.data import TextKeys
from ag.config.gate import TOKEN_KINDS
from ag.config.loss import ReplayConfig
from ag.config.recipes import dump
from ag.data import DataModule, early
from ag.errors import UserError, nearest
from ag.files import locked, replacing
from ag.gates import export
from ag.gates.gate import AttentionGates, gate_kind
from ag.model import base as models
from ag.model.quiet import quiet
from ag.model.structure import decoder_of
from ag.model.support import check_attention
from ag.run_on_cluster import EXIT_NOT_FINITE, run_on_cluster
from ag.training import preflight, replay
from ag.training.loggers import build_loggers, log_export
from ag.training.memory_plan import GIB
from ag.training.module import GatedLM
from ag.training.objectives import objective
from ag.training.sharded import ShardedStrategy, gather
from ag.wheels import hub_name

RESTART = 60.0  # seconds to wait for the end of a rank that a cluster replaces
#: A run sets these for the ranks that it starts, Lightning all but the first. A later run in this process, or in one
#: that inherits its environment, would take itself for such a rank, and wait for the others.
LAUNCH_VARIABLES = ("AG_RUN", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
#: Keys of ``gate`` that determine the shapes of its weights, and what is computed from them.
GATE_KEYS = ("kind", "granularity", "num_heads", "head_dim", "hidden", "shortcut", "layer_offset", "first_layer")


def run(invocation: Invocation[Config]) -> int:
    """Train, as ``python -m ag.fit`` does; returns the exit code.

    Codes: 0 done; 2 an error in the configuration, the data, the model, the run to resume or the disk (one line on
    stderr); 3 a loss or gradient was not finite; 143, 130 and 138 after SIGTERM, Ctrl-C and SIGUSR1, with a checkpoint
    if training had begun.
    """
    config = invocation.config
    if config.cluster is not None:
        return run_on_cluster(config, lambda: None if invocation.dry_run else run_folder(config), fit)
    try:
        fit(config, invocation.dry_run)
    except callbacks.NonFiniteError as error:
        print(f"ag.fit: error: {error}", file=sys.stderr)
        # Lightning's launcher kills the first process when another one fails, and its exit code is lost
        return EXIT_NOT_FINITE if os.environ.get("LOCAL_RANK", "0") == "0" else 0
    except callbacks.Stopped as stopped:
        print(f"ag.fit: {stopped}", file=sys.stderr)
        return int(stopped.code or 0)
    return 0


@quiet()
def fit(
    config: Config, dry_run: bool = False, folder: Path | None = None, stop_signal: Callable[[], int] | None = None
) -> Path | None:
    """Train and export.

    Args:
        config: the whole configuration.
        dry_run: build everything, run one training and one validation batch, write nothing.
        folder: an existing run folder; the run continues from its last checkpoint if there is one. None: a new folder.
        stop_signal: returns the number of a signal that stops all ranks, or 0; called after each step.

    Returns:
        The run folder, or None after a dry run.

    Raises:
        UserError: (ModelError, DataError, ExportError, ...) names the wrong value and the fix.
        ag.callbacks.NonFiniteError: a loss or gradient was not finite; the last checkpoint is kept.
        ag.callbacks.Stopped: on SIGTERM, SIGUSR1 or Ctrl-C, after a checkpoint.
        KeyboardInterrupt: on Ctrl-C before the first step, and on a second Ctrl-C.
    """
    existing = folder or (None if config.resume is None else Path(config.resume))  # None: made once all is loaded
    with ExitStack() as stack:
        stack.enter_context(kept_environment(LAUNCH_VARIABLES))
        if existing is not None and not dry_run:
            _lock(existing, stack, RESTART if folder is not None else 0)
        if dry_run:
            config = without_caches(config)
        disable_possible_user_warnings()  # tips of Lightning, by names of its API, until `quiet` ends
        check_parts(config)
        L.seed_everything(config.seed, workers=True, verbose=False)
        base, tokenizer = load_base(config)
        context = base.config.get_text_config().max_position_embeddings
        datamodule = data.build(config.data, config.seed, tokenizer, context)
        if isinstance(config.loss, ReplayConfig):
            replay.check_rows(datamodule.train_rows)
        module = make_module(config, base)
        run_dir, checkpoint = _where(config, folder, dry_run)
        if existing is None and run_dir is not None:
            _lock(run_dir, stack)
        trainer = build_trainer(config, run_dir, stop_signal, 0 if checkpoint is None else step_of(checkpoint))
        if trainer.is_global_zero:
            print_start(datamodule, checkpoint)
        train(trainer, module, datamodule, checkpoint, run_dir)
        if run_dir is not None:
            finish(trainer, module, datamodule, run_dir, base, tokenizer)
        elif trainer.is_global_zero:
            print(f"memory at its peak: {peak_memory()}")
            print("ready: one training and one validation batch ran, and nothing was written")
        return run_dir


def _where(config: Config, folder: Path | None, dry_run: bool) -> tuple[Path | None, Path | None]:
    """Return the folder of a run, which is made if there is none, and the checkpoint that the run continues.

    A dry run has neither: Lightning's dry run has one epoch, and refuses a checkpoint of a later one. If it resumes, it
    needs an intact checkpoint all the same.
    """
    continue_from = folder if folder is not None and checkpoints(folder) else config.resume
    checkpoint = None if continue_from is None else newest_valid(Path(continue_from))
    return (None, None) if dry_run else (folder or run_folder(config), checkpoint)


@contextmanager
def kept_environment(names: Collection[str]) -> Iterator[None]:
    """Give environment variables the values at the end that they had at the beginning."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def without_caches(config: Config) -> Config:
    """Return the configuration of a dry run, which writes neither contexts nor tokenised rows."""
    rows, loss = config.data, config.loss
    return replace(
        config,
        data=replace(rows, cache=None) if isinstance(rows, TextKeys) else rows,
        loss=replace(loss, contexts=None) if isinstance(loss, ReplayConfig) else loss,
    )


def check_parts(config: Config) -> None:
    """Refuse parts of a run that do not exist, before anything is loaded."""
    check_trainer(config)
    data.check(config.data)
    early.check(config.data)
    check_kind(config)
    objective(config.loss.objective)


def load_base(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model and its tokenizer; refuse a model that is too large, or that gates do not support."""
    needed = preflight.check_memory(config)
    try:
        base, tokenizer = models.load_base(config.model)
    except models.ModelError as error:
        if not needed:
            raise
        raise models.ModelError(f"{error}. {needed}") from error
    (decoder_of if config.train == "lora" else check_attention)(base)  # before the data are read
    preflight.warn_of_slow_bfloat16(config)
    return base, tokenizer


def make_module(config: Config, base: PreTrainedModel) -> GatedLM:
    """Make the gates and the adapters of a run on its base model; refuse what could not be exported."""
    gates = None if config.train == "lora" else make_gates(base, config)
    model = base if config.train == "gates" else models.add_lora(base, config.lora)
    module = GatedLM(config, model, gates)
    export.check(
        gates,
        model if isinstance(model, PeftModel) else None,
        path=None if config.resume is None else Path(config.resume) / "export",
        merge=config.export.merge,
    )
    return module.train()  # Lightning does not change the mode, and activation checkpointing needs training mode


def print_start(datamodule: DataModule, checkpoint: Path | None) -> None:
    """Print the rows that a run reads, warnings about them, and the checkpoint that it continues."""
    lines, warned = datamodule.splits.report()
    print("\n".join(lines), flush=True)
    for line in warned:
        print(f"ag.fit: warning: {line}", file=sys.stderr)
    if checkpoint is not None:
        print(f"on from {checkpoint}")


def train(
    trainer: L.Trainer, module: GatedLM, datamodule: DataModule, checkpoint: Path | None, run_dir: Path | None
) -> None:
    """Train. An error of Lightning's settings becomes a ``UserError``, and Ctrl-C says how to continue."""
    if run_dir is not None:
        os.environ["AG_RUN"] = run_dir.name  # the ranks that Lightning starts inherit it
    try:
        trainer.fit(module, datamodule, ckpt_path=checkpoint, weights_only=True)
    except MisconfigurationException as error:
        raise UserError(str(error)) from error
    except SystemExit as leave:
        if isinstance(leave.__context__, KeyboardInterrupt):  # Lightning leaves with 1
            raise KeyboardInterrupt(*([] if run_dir is None else [callbacks.how_to_continue(run_dir)])) from None
        raise


def finish(
    trainer: L.Trainer, module: GatedLM, datamodule: DataModule, run_dir: Path, base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    """Validate, unless the last step was validated, and write the export of the last or the best checkpoint."""
    config = module.config
    if module.validated.get("step") != trainer.global_step:
        trainer.validate(module, datamodule, verbose=False)
    gather(module)
    if config.checkpoint.patience and (run_dir / "checkpoints" / "best.ckpt").exists():
        load_best(module, run_dir, config.checkpoint.monitor)
    if trainer.is_global_zero:
        picture = run_dir / "figures" / f"keep-0-{int(module.validated['step']):06d}.png"
        write_export(run_dir / "export", module, base, tokenizer, picture if picture.exists() else None)
        log_export(trainer.loggers, run_dir / "export", config.recipe, module.validated)
        print(f"run folder: {run_dir}")
        if config.export.push_to_hub:
            print(f"uploaded: {export.push(run_dir / 'export', config.export.push_to_hub)}")
    trainer.strategy.barrier()


def peak_memory() -> str:
    """Return the peak of GPU memory so far; without a GPU, the peak of this process's memory."""
    if peak := torch.cuda.max_memory_allocated():  # 0 without a GPU
        return f"{peak / GIB:.2f} GiB of the GPU"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f"{peak / GIB:.2f} GiB of this process"


def check_kind(config: Config) -> None:
    """Refuse an unknown kind of gates, and a kind without flags, which cannot be trained."""
    if gate_kind(config.gate.kind).decays and config.train != "lora":
        raise UserError(
            f"gate.kind={config.gate.kind}: its scores fall with a token's age, and have no flags to train under: "
            "expected a kind with flags, such as gate.kind=mlp."
        )


def make_gates(base: PreTrainedModel, config: Config) -> AttentionGates:
    """Make the gates of a run, new or with the weights of the export ``init``, which a checkpoint would replace."""
    gates = AttentionGates(base.config, config.gate)
    if config.init is not None and config.resume is None:
        start = AttentionGates.from_pretrained(config.init)
        if start.adapter is not None and not start.adapter.count_in(base):
            raise UserError(
                f"init={config.init}: its gates were trained together with a LoRA adapter, which model.name="
                f"{config.model.name} lacks: expected the model that the adapter was merged into (export.merge=true "
                "writes one)."
            )
        if not _take_weights(gates, start):
            old, new = (
                x.fingerprint | {f"gate.{key}": getattr(x.config, key) for key in GATE_KEYS} for x in (start, gates)
            )
            differing = [
                f"{name}={old[name]}, here {name}={new[name]}" for name in new if new[name] != old.get(name, new[name])
            ]
            raise UserError(
                f"init={config.init}: its gates have {'; '.join(differing)}: expected gates of the same kind and "
                "sizes; take its base model and its gate.* keys, or leave init out."
            )
    return gates


def _take_weights(gates: AttentionGates, start: AttentionGates) -> bool:
    """Give gates the weights of others. Returns whether kind and sizes agree; window, scope and bias may differ."""
    keys = ["kind", "layer_offset"]  # shapes do not tell these, nor the number of heads in an attention block
    keys += [] if gates.config.kind in TOKEN_KINDS else ["num_heads"]
    if any(getattr(gates.config, key) != getattr(start.config, key) for key in keys):
        return False
    try:
        gates.load_state_dict(start.state_dict())
    except RuntimeError:
        return False
    return True


def check_trainer(config: Config) -> None:
    """Refuse an unknown strategy, and what needs a GPU where there is none, before anything is loaded."""
    strategy, accelerator = config.trainer.strategy, config.trainer.accelerator
    strategies = ["auto", "fsdp2", *StrategyRegistry.available_strategies()]
    if strategy not in strategies:
        hint = nearest(strategy, strategies) or "; --help lists the keys"
        raise UserError(f"trainer.strategy={strategy}: expected auto, fsdp2 or a strategy of Lightning, as ddp{hint}")
    if strategy.startswith("deepspeed"):
        raise UserError(
            f"trainer.strategy={strategy}: its checkpoints are folders, from which a run could not be resumed or "
            "exported: expected another strategy that divides the base among the GPUs: trainer.strategy=fsdp2."
        )
    init_params = StrategyRegistry[strategy]["init_params"] if strategy in StrategyRegistry else {}
    if init_params.get("start_method", "popen") != "popen":
        raise UserError(
            f"trainer.strategy={strategy}: it trains in copies of this process, whose metrics would not get into the "
            "run folder and its export: expected a strategy that starts the command once a device, such as "
            "trainer.strategy=ddp."
        )
    if accelerator == "gpu" and not CUDAAccelerator.is_available():
        raise UserError(
            "trainer.accelerator=gpu: PyTorch finds no CUDA device here; use trainer.accelerator=cpu or auto, or look "
            "at the driver and the build of torch."
        )
    if config.trainer.precision == "16-mixed" and not CUDAAccelerator.is_available():
        raise UserError(
            "trainer.precision=16-mixed: float16 needs a GPU, and PyTorch finds no CUDA device here; use "
            "trainer.precision=bf16-mixed or 32-true."
        )


def run_folder(config: Config) -> Path:
    """Make the folder of a run, ``OUTPUT/RECIPE/TIME``, and write its config.yaml. All ranks use one folder.

    Raises:
        UserError: torchrun started several processes without a common id, or with the id of another run.
    """
    if config.resume is not None:
        return Path(config.resume)
    name = os.environ.get("AG_RUN") or os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":
        raise UserError("torchrun has no id for this run: start it with torchrun --rdzv-id=NAME.")
    folder = Path(config.output) / config.recipe / (name or time.strftime("%Y-%m-%d_%H-%M-%S"))
    if not is_first_rank():
        return folder
    if name is not None and folder.exists():
        raise UserError(
            f"{folder} is there already: continue it with resume={folder}, or give this run a name of its own by the "
            "environment variable AG_RUN (AG_RUN=second ag fit ...)."
        )
    while True:
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:  # two runs in one second
            folder = folder.with_name(f"{folder.name}-1")
    write_config(folder, config)
    return folder


def write_config(run_dir: Path, config: Config) -> None:
    """Write the settings of a run into its folder; the first rank does."""
    if is_first_rank():
        with replacing(run_dir / "config.yaml") as new:
            new.write_text(dump(config), encoding="utf-8")


def is_first_rank() -> bool:
    """Whether this process is the first rank, by the environment, before there is a trainer."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("LOCAL_RANK") or 0) == 0


def _lock(run_dir: Path, stack: ExitStack, wait: float = 0) -> None:
    """Lock a run folder for this run. The first rank, which writes the checkpoints, has the lock."""
    if is_first_rank():
        refusal = (
            f"{run_dir}: another process trains in this run folder: wait for it, or stop it; then continue with "
            f"resume={run_dir}."
        )
        stack.enter_context(locked(run_dir, refusal, wait))


def build_trainer(
    config: Config, run_dir: Path | None, stop_signal: Callable[[], int] | None = None, step: int = 0
) -> L.Trainer:
    """Return the trainer. Without a run folder it runs one training and one validation batch, and writes nothing.

    ``step`` is the number of optimiser steps in the checkpoint that the run continues.
    """
    options = config.trainer
    sharded = options.strategy == "fsdp2"
    parts: list[L.Callback] | None = None
    if run_dir is not None:
        parts = callbacks.build(config.trainer, config.checkpoint, run_dir, stop_signal)
        if config.resume is not None:  # keys that have changed are those of the next resume too
            write = partial(write_config, run_dir, replace(config, resume=None))
            # callbacks come before the module, and a run that is refused writes nothing
            parts.append(LambdaCallback(on_train_start=lambda _, module: (module.check_length(), write())))
    try:
        return L.Trainer(
            accelerator="cuda" if options.accelerator != "cpu" and CUDAAccelerator.is_available() else "cpu",
            devices=options.devices,
            num_nodes=options.num_nodes,
            strategy=ShardedStrategy(options.world_size) if sharded else options.strategy,
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
            callbacks=parts,
            logger=build_loggers(config.logger, run_dir, config.wandb, asdict(config), step) if run_dir else False,
            plugins=[callbacks.AtomicCheckpointIO()],
            default_root_dir=run_dir,
            fast_dev_run=run_dir is None,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            enable_progress_bar=run_dir is not None,  # a callback prints lines for trainer.progress=false
            enable_model_summary=False,
        )
    except (ImportError, ValueError, MisconfigurationException) as error:
        raise UserError(
            f"trainer.accelerator={options.accelerator}, trainer.strategy={options.strategy}, "
            f"trainer.devices={options.devices}: {error}"
        ) from error


def write_export(
    folder: Path, module: GatedLM, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, picture: Path | None
) -> None:
    """Write the gates with their adapter, or the baseline's adapter; with ``export.merge`` also a merged model."""
    adapter = module.model if isinstance(module.model, PeftModel) else None
    measured = {x.removeprefix("val/"): value for x, value in module.validated.items() if x.startswith("val/")}
    if "evicted" in measured:
        measured["kept"] = 1 - measured["evicted"]
    if module.gates is not None:
        export.save(
            folder,
            module.gates,
            base_model=hub_name(module.config.model.name),
            base_revision=models.base_revision(base),
            adapter=adapter,
            metrics=measured,
            figure=picture,
            weights=module.config.export.weights,
        )
    elif adapter is not None:
        export.save_adapter(folder, adapter, base_model=hub_name(module.config.model.name))
    if module.config.export.merge and adapter is not None:
        shutil.rmtree(folder.parent / "merged", ignore_errors=True)  # from this run before it was resumed
        export.save_merged(adapter, folder.parent / "merged", tokenizer, folder)


def load_best(module: GatedLM, run_dir: Path, monitor: str) -> None:
    """Load the best checkpoint and the results of its validation, unless the last step has a lower ``monitor``."""
    best = torch.load(run_dir / "checkpoints" / "best.ckpt", map_location="cpu", weights_only=True)
    if module.validated[monitor] < best.get("validated", {}).get(monitor, -math.inf):
        return
    module.load_state_dict(best["state_dict"], strict=False)
    module.load_validation(best)
    if not module.validated:  # a checkpoint of an earlier version; the export has no metrics then
        module.validated = {"step": best["global_step"]}
