"""Training of gates by ``transformers.Trainer`` and its subclasses, for example trl's ``SFTTrainer``.

:class:`GateCallback` puts gates on the Trainer's model and writes the export; :class:`GatedTrainer` gives the Trainer
the loss of :mod:`ag.training`. On a batch it computes the numbers of ``python -m ag.fit``::

    class GatedSFTTrainer(ag.hf.GatedTrainer, SFTTrainer):
        pass

    GatedSFTTrainer(model, ..., callbacks=[ag.hf.GateCallback(config, "export")]).train()
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ag.config import Config
from ag.config.exports import StrPath
from ag.data.collate import IGNORED
from ag.errors import UserError
from ag.gates import export
from ag.gates.adapters import check_written
from ag.gates.attach import attach, detach
from ag.gates.gate import AttentionGates
from ag.model import base as models
from ag.model.hooks import Attachment, instrument
from ag.run import make_gates
from ag.training.gated_loss import Batch, GatedLoss
from ag.training.module import make_loss
from ag.training.regress import RowRegression
from ag.training.validation import Validation
from ag.wheels import hub_name

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the base is the Trainer of the user's class

__all__ = ["GateCallback", "GatedTrainer"]

NAME = "ag_training"  # of the module on the base model
CHECKPOINT = "gates"  # folder of the export in each checkpoint of the Trainer
#: Arguments of a Trainer that cannot go with gates, and why.
REFUSED = {
    "compute_loss_func": "has its own loss: write an Objective instead.",
    "compute_metrics": "makes no predictions when it evaluates: leave it out; evaluate() returns the metrics of gates.",
    "model_init": "would get another model from it, after the gates were attached to the first: give model= instead.",
}


class GatedTrainer(Trainer):
    """A mixin that trains and evaluates gates; make it the first base of a class, before a Trainer.

    - The loss is a mean over the rows of a batch, ``objective + alpha * |mean gate - beta|``. Gates act on the tokens
      before the first label of a row, or on the whole row if its first or second token has a label.
    - Gates have the learning rate ``optim.gate_lr`` of the callback's configuration, and the Trainer's schedule.
    - ``evaluate`` measures under hard flags; its metrics are the metrics ``val/`` of ``ag.fit``, as ``eval_lm_loss``.
    - Checkpoints have an export in ``gates``; ``resume_from_checkpoint`` and ``load_best_model_at_end`` read it.

    Raises:
        UserError: there is no :class:`GateCallback`, or an argument that cannot go with gates: ``compute_loss_func``,
            ``compute_metrics`` or ``model_init``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, advice in REFUSED.items():
            if getattr(self, name) is not None:
                raise UserError(f"{name}= of a GatedTrainer, which {advice}")
        self.model_accepts_loss_kwargs = False  # the loss is a mean over one batch; the Trainer averages batches
        _trained_gates(self.model).has_loss = True

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a training batch; the model's forward pass computes it."""
        outputs = model(ag_batch=inputs, ag_step=self.state.global_step)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Add an evaluation batch to the metrics of :meth:`evaluation_loop`."""
        batch = _without_filling(self._prepare_inputs(inputs), self.accelerator)
        with torch.no_grad():
            model(ag_batch=batch, ag_step=None)
        return None, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the output has the metrics of :class:`ag.training.validation.Validation`."""
        trained = _trained_gates(self.model)
        trained.validation.reset()
        output: Any = super().evaluation_loop(*args, **kwargs)
        trained.measured = {name: float(value) for name, value in trained.validation.compute().items()}
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in trained.measured.items()})
        return output

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; exports keep the metrics and the calibration of the last evaluation."""
        trained = _trained_gates(self.model)
        measured, calibration = trained.measured, trained.gates.calibration
        try:
            return super().predict(*args, **kwargs)
        finally:
            trained.measured, trained.gates.calibration = measured, calibration

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the Trainer's optimiser, with a separate group for the gates."""
        has_optimizer, trained = self.optimizer is not None, _trained_gates(self.model)
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        gates = set(trained.gates.parameters())
        if has_optimizer:
            optimised = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if not gates <= optimised:
                raise UserError(
                    "optimizers=: the optimiser lacks the gates' parameters: leave it out, and set optim.gate_lr of "
                    "the callback's configuration."
                )
            return optimizer
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in gates]
        rates = {"lr": trained.config.optim.gate_lr, "weight_decay": self.args.weight_decay}
        optimizer.add_param_group({"params": list(trained.gates.parameters()), **rates})
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; adds the means of the training metrics since the last call."""
        if "loss" in logs:
            logs.update(_trained_gates(self.model).logged())
        super().log(logs, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        _trained_gates(self.model).load(Path(resume_from_checkpoint) / CHECKPOINT)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        _trained_gates(self.model).load(Path(str(self.state.best_model_checkpoint)) / CHECKPOINT)


class GateCallback(TrainerCallback):
    """Attaches gates to the Trainer's model before training, and writes the export after it.

    The base is frozen. PEFT's LoRA adapter ``default``, if there is one, is trained and exported with the gates; other
    adapters must not be active. Gates that are attached already are detached. After training
    ``ag.EvictionCache(model, "gates")`` uses the new gates.

    Args:
        config: ``gate``, ``init``, ``loss``, ``optim.gate_lr``, ``export.weights``, and for ``loss.objective=regress``
            also ``warmup.target``, ``scale`` and ``keep`` are read; the Trainer replaces all other keys.
        path: folder of the export, written by the main process.
        base_model: hub id or folder of the base model for the export. None: the name in the model's configuration.

    Raises:
        UserError: the configuration, the model or the arguments cannot be trained (when the Trainer is made), or the
            Trainer is not a :class:`GatedTrainer` (when training starts).
    """

    def __init__(self, config: Config, path: StrPath, base_model: str | None = None) -> None:
        if config.warmup.regress_steps:
            raise UserError(
                f"warmup.regress_steps={config.warmup.regress_steps} in a Trainer, which has one loss and one "
                "schedule: train with loss.objective=regress first, then from that export with init=EXPORT."
            )
        self.config, self.path, self.base_model = config, Path(path), base_model

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Make and attach the gates, and make the model's forward pass compute their loss."""
        model = kwargs["model"]
        _check_arguments(args)
        detach(model)
        if not isinstance(model, PeftModel):
            model.requires_grad_(False)
        if self.config.loss.replay:
            raise UserError(
                "loss.replay=true: the rows of a Trainer run whole: expected loss.replay=false; or use ag.fit."
            )
        gates = make_gates(_base(model), self.config)
        if args.save_strategy != "no" and Path(str(args.output_dir)).resolve() == self.path.resolve():
            raise UserError(
                f"GateCallback(path={str(self.path)!r}) is the Trainer's output_dir, whose checkpoints would be in "
                "the way of the export: expected another folder, such as one in it."
            )
        if not isinstance(model, PeftModel):
            check_written(self.path, model, None)
        export.check(gates, model if isinstance(model, PeftModel) else None, path=self.path)
        attach(model, gates)
        _TrainedGates(self.config, model, gates).install(instrument(model))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Refuse a Trainer that trains with another loss."""
        if not _trained_gates(kwargs["model"]).has_loss:
            raise UserError(
                "The Trainer has a GateCallback, but not the loss of gates: derive it as "
                "class Gated(ag.hf.GatedTrainer, SFTTrainer)."
            )

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write an export into the checkpoint."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / CHECKPOINT
            self._write(kwargs["model"], folder, "float32")  # exact weights for a resumed run

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write the export."""
        if state.is_world_process_zero:
            self._write(kwargs["model"], self.path, self.config.export.weights)

    def _write(self, model: nn.Module, folder: Path, weights: Literal["float32", "int8"]) -> None:
        trained, base = _trained_gates(model), _base(model)
        kept = {"kept": 1 - trained.measured["evicted"]} if "evicted" in trained.measured else {}
        with trained.detached():
            export.save(
                folder,
                trained.gates,
                base_model=hub_name(self.base_model or base.config.name_or_path),
                base_revision=models.base_revision(base),
                adapter=model if isinstance(model, PeftModel) else None,
                metrics=trained.measured | kept,
                weights=weights,
            )


class _TrainedGates(nn.Module):
    """A submodule of the base model while it is trained: the gates and their loss.

    The loss is computed inside the model's forward pass, where DistributedDataParallel and mixed precision apply.
    """

    def __init__(self, config: Config, model: nn.Module, gates: AttentionGates) -> None:
        super().__init__()
        self.config, self.gates = config, gates
        self.gated_loss = make_loss(config, model, gates)
        self.validation = Validation(self.gated_loss).to(next(model.parameters()).device)
        self.has_loss = False  # whether the Trainer is a GatedTrainer
        self.measured: dict[str, float] = {}  # metrics of the last evaluation
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def install(self, attachment: Attachment) -> None:
        """Add this module to the base model, until :func:`ag.detach` is called."""
        base: Any = attachment.base
        self.base = [base]  # in a list, and therefore not a submodule
        self._own = vars(base).get("forward")
        # a copy of the model copies the arguments of a partial, but not the variables of an inner function
        self._routed = functools.update_wrapper(partial(_routed, self, base.forward), base.forward)
        base.forward = self._routed
        base.add_module(NAME, self)
        self._ignored = base._keys_to_ignore_on_save
        keys = {f"{NAME}.{name}" for name in self.state_dict()}
        base._keys_to_ignore_on_save = {*(self._ignored or ()), *keys}  # checkpoints have an export instead
        attachment.handles.append(self)

    def remove(self) -> None:
        """Undo :meth:`install`. If another forward method wraps this module's method, it is kept."""
        [base] = self.base
        del base._modules[NAME]
        base._keys_to_ignore_on_save = self._ignored
        if vars(base).get("forward") is self._routed:
            del base.forward
            if self._own is not None:
                base.forward = self._own

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Remove this module from the base model while PEFT saves."""
        [base] = self.base
        del base._modules[NAME]
        try:
            yield
        finally:
            base.add_module(NAME, self)

    def forward(self, inputs: dict[str, Any], step: int | None) -> dict[str, Tensor]:
        """Return the loss of a training batch. A ``step`` of None: add an evaluation batch to the metrics."""
        batch = _batch(inputs, self.gated_loss)
        if step is None:
            self.validation.update(batch)
            return {}
        measured = self.gated_loss.loss(batch, step)
        for name, value in measured.values.items():
            self._values[name].append(value)
        return {"loss": measured.loss}

    def logged(self) -> dict[str, float]:
        """Return the means of the metrics since the last call, without the loss, which the Trainer logs."""
        values, self._values = self._values, defaultdict(list)
        return {name: float(torch.stack(x).mean()) for name, x in values.items() if name != "loss"}

    def load(self, folder: Path) -> None:
        """Load the weights of an export of these gates, and the metrics of its evaluation."""
        loaded, metrics = AttentionGates.from_pretrained(folder), export.read_info(folder)["metrics"]
        self.gates.load_state_dict(loaded.state_dict())
        self.gates.calibration = loaded.calibration
        self.measured = {name: value for name, value in metrics.items() if value is not None}  # null means not finite


def _routed(
    trained: _TrainedGates,
    forward: Callable[..., Any],
    *args: Any,
    ag_batch: Any = None,
    ag_step: int | None = None,
    **kwargs: Any,
) -> Any:
    """Run a model's own forward pass, or compute the loss of ``ag_batch``, see :meth:`_TrainedGates.forward`."""
    return forward(*args, **kwargs) if ag_batch is None else trained(ag_batch, ag_step)


def _batch(inputs: dict[str, Any], loss: GatedLoss) -> Batch:
    """Convert a batch of a Trainer to the form of :class:`ag.data.collate.Collator`.

    The prompt ends at the first label, unless the batch has ``prompt_length``. If the first or second token of a row
    has a label, the whole row is the prompt. Without an attention mask a document begins at each position 0 (trl's
    packing).
    """
    lacking = [name for name in ("input_ids", "labels") if inputs.get(name) is None]
    if lacking:
        raise UserError(f"A batch of the Trainer has no {' and no '.join(lacking)}: expected tokens and labels.")
    ids, labels = inputs["input_ids"], inputs["labels"]
    if _is_packed(inputs):
        return _packed(ids, labels, inputs["position_ids"], loss)
    mask = inputs.get("attention_mask")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    batch = {"input_ids": ids, "attention_mask": valid, "labels": labels}
    prompts = inputs.get("prompt_length")
    if prompts is None:
        prompts = _prompts(valid, labels != IGNORED, loss)
    return batch | ({"prompt_length": prompts} if bool(prompts.any()) else {})


def _is_packed(inputs: dict[str, Any]) -> bool:
    return inputs.get("attention_mask") is None and inputs.get("position_ids") is not None


def _without_filling(inputs: dict[str, Any], accelerator: Any) -> dict[str, Any]:
    """Remove the labels of the rows that accelerate adds to fill the last batches of several processes.

    No metric counts a row without labels. Packed rows are not changed: their number differs from the examples'.
    """
    state, labels = accelerator.gradient_state, inputs.get("labels")
    filled = accelerator.even_batches and state.end_of_dataloader and state.remainder > 0
    if labels is None or _is_packed(inputs) or not filled:
        return inputs
    rows = accelerator.process_index * len(labels) + torch.arange(len(labels), device=labels.device)
    return {**inputs, "labels": labels.masked_fill((rows >= state.remainder)[:, None], IGNORED)}


def _prompts(valid: Tensor, labelled: Tensor, loss: GatedLoss) -> Tensor:
    """Return the number of tokens before the first label of each row ``[B]``; 0 in all rows if no row has a prompt.

    If the first or second token of a row has a label, the whole row is the prompt. The first token's label does not
    matter, because no token predicts it.
    """
    assert loss.gates is not None
    config = loss.gates.config
    all_prompt = (labelled & valid & (valid.cumsum(1) <= 2)).any(1)
    prompts = (valid & (labelled.cumsum(1) == 0)).sum(1)
    if bool(all_prompt.all()):
        return torch.zeros_like(prompts)
    if bool(all_prompt.any()) and (config.scope == "prompt" or config.prefill == "dense"):
        count = int(all_prompt.sum())
        raise UserError(
            f"gate.scope={config.scope}, gate.prefill={config.prefill}: {count} of {len(all_prompt)} rows of a "
            "batch have labels from their start: expected a prompt without labels in each; leave such rows out, or use "
            "scope=causal with prefill=sparse."
        )
    return prompts.where(~all_prompt, valid.sum(1))


def _packed(ids: Tensor, labels: Tensor, positions: Tensor, loss: GatedLoss) -> Batch:
    starts = positions == 0
    gates = loss.gates
    assert gates is not None
    if isinstance(loss, RowRegression) or (
        gates.config.covers == "prompt" and bool((labels[~starts] == IGNORED).any())
    ):
        raise UserError(
            "packing: in a row of several documents gates cannot tell prompts from later queries; use packing=False, "
            "or, with another loss.objective than regress, pack plain text or set gate.covers=all."
        )
    columns = torch.arange(ids.shape[1], device=ids.device)
    # padding to a multiple has positions 0 too; a last document of one token, which has no loss, counts as padding
    valid = columns <= torch.where(starts, 0, columns).amax(1, keepdim=True)
    labels = labels.masked_fill(starts, IGNORED)
    return {"input_ids": ids, "attention_mask": valid, "labels": labels, "document_start": columns - positions}


def _check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that prevent the training of gates, or change it."""
    if sharded := next((name for name in ("deepspeed", "fsdp") if getattr(args, name, None)), None):
        raise UserError(
            f"{sharded} with a GateCallback, which trains in one process or by DistributedDataParallel: leave it out, "
            "or use python -m ag.fit trainer.strategy=fsdp2."
        )
    if args.n_gpu > 1:
        raise UserError(
            f"{args.n_gpu} GPUs in one process with a GateCallback, where transformers would copy the model by "
            "DataParallel: expected one GPU a process; start it by torchrun or accelerate launch, or with "
            "CUDA_VISIBLE_DEVICES=0."
        )
    if getattr(args, "loss_type", None) == "dft" or args.label_smoothing_factor:
        loss = (
            f"label_smoothing_factor={args.label_smoothing_factor}" if args.label_smoothing_factor else "loss_type=dft"
        )
        raise UserError(f"{loss} with a GateCallback, which has its own loss: leave it out, or write an Objective.")
    options = args.gradient_checkpointing_kwargs
    if args.gradient_checkpointing and isinstance(options, dict) and options.get("use_reentrant"):
        raise UserError(
            "gradient_checkpointing_kwargs={'use_reentrant': True} with a GateCallback: no gradient would reach the "
            "gates; leave it out."
        )


def _base(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _trained_gates(model: Any) -> _TrainedGates:
    """Return the module that the callback added to a model."""
    trained = getattr(_base(model), NAME, None)
    if not isinstance(trained, _TrainedGates):
        raise UserError("The Trainer's model has no gates: give it callbacks=[ag.hf.GateCallback(config, EXPORT)].")
    return trained
