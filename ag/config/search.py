"""Runs whose values Optuna chooses by ``val/loss`` of those before: ``-m search=optuna trials=20``."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ag.config.keys import ConfigError, Key, short
from ag.config.sweep import Ended, Run, told

if TYPE_CHECKING:
    from optuna import Study

METRIC = "val/loss"
DEFAULTS = {"trials": "20", "asha": "false"}
LOOK_SECONDS = 1.0  # between two looks at the metrics of a run
NAME = "sweep"  # of the study in its file


@dataclass(frozen=True)
class Search:
    """What is searched.

    Attributes:
        trials: runs, those of the same command before included.
        asha: whether runs that are behind others after 1, 4, 16, ... validations are stopped (arXiv 1810.05934).
        space: texts to choose from by key, or the ends of a range; one text stays as it is.
    """

    trials: int
    asha: bool
    space: Mapping[str, list[str] | tuple[float, float]]

    def corners(self) -> list[dict[str, str]]:
        """Return overrides in which each text and each end of a range comes once, to be checked before any run."""
        texts = {
            name: [_text(end) for end in values] if isinstance(values, tuple) else values
            for name, values in self.space.items()
        }
        first = {name: values[0] for name, values in texts.items()}
        return [first, *(first | {name: text} for name, values in texts.items() for text in values[1:])]


def searched(overrides: Mapping[str, str], pieces: Mapping[str, list[str]], known: Mapping[str, Key]) -> Search | None:
    """Read ``search=optuna``, ``trials=``, ``asha=``, and keys with choices ``A,B`` or ranges ``LOW..HIGH``.

    Args:
        overrides: text by key.
        pieces: their comma lists.
        known: the keys that may be set, by name.

    Returns:
        None for a grid.

    Raises:
        ConfigError: for another search, a number of trials below 1, or nothing to choose.
    """
    kind, trials, asha = (overrides.get(n, default) for n, default in {"search": "grid", **DEFAULTS}.items())
    if kind == "grid":
        return None
    if kind != "optuna" or not trials.isdecimal() or int(trials) < 1 or asha not in ("true", "false"):
        raise ConfigError(
            f"search={short(kind)} trials={short(trials)} asha={short(asha)}: expected search=grid or search=optuna, a "
            "number of trials from 1, and asha=true or asha=false"
        )
    space = {n: _range(n, values, known.get(n)) for n, values in pieces.items() if n not in ("search", *DEFAULTS)}
    if all(len(values) == 1 for values in space.values()):
        raise ConfigError("search=optuna: nothing to choose; expected keys with choices (A,B) or ranges (LOW..HIGH)")
    return Search(int(trials), asha == "true", space)


def _range(name: str, pieces: list[str], key: Key | None) -> list[str] | tuple[float, float]:
    low, dots, high = pieces[0].partition("..")
    if len(pieces) > 1 or not dots:
        return pieces
    try:
        ends = tuple(int(end) if end.lstrip("-").isdecimal() else float(end) for end in (low, high))
    except ValueError:
        return pieces  # a path, perhaps
    if not ends[0] < ends[1]:
        raise ConfigError(f"{name}={short(pieces[0])}: expected LOW..HIGH with LOW below HIGH")
    if key is not None and key.accepts(ends[0] + 0.5):  # 0..1 of a share is not 0 or 1
        return float(ends[0]), float(ends[1])
    return ends[0], ends[1]


def search(asked: Search, config: Any, program: str) -> int:
    """Run the trials of a search, then print the table of a sweep; the same command goes on with what is not done.

    Args:
        asked: what is searched.
        config: the configuration of one of its runs.
        program: name for ``python -m``.

    Returns:
        As :func:`ag.config.sweep.sweep`.

    Raises:
        ConfigError: when Optuna is not installed, or the program trains nothing.
    """
    if not hasattr(config, "resume"):
        raise ConfigError(f"search=optuna: {program} has no {METRIC}; expected ag.fit")
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError("search=optuna: needs Optuna: pip install 'ag[cluster]'; or leave search= out") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {name: values for name, values in asked.space.items() if name != "cluster"}
    name = hashlib.sha256(json.dumps([program, space]).encode()).hexdigest()[:12]
    folder = Path(config.output) / "sweeps" / name
    folder.mkdir(parents=True, exist_ok=True)
    journal = str(folder / "trials.jsonl")
    study = _study(journal)
    runs = _Trials(study, asked, space, config, program, journal)
    print(f"{len(runs)} of {asked.trials} runs; which, and what came of them, is in {folder}", flush=True)

    def learned(ended: Iterator[Ended]) -> Iterator[Ended]:
        for one in ended:
            loss = _losses(one.run)[-1:]
            going = not study.get_trials(deepcopy=False)[one.run.index].state.is_finished()  # else asha stopped it
            if going and one.code == 0 and loss:
                study.tell(one.run.index, loss[0])
            yield one  # one that failed is tried again by the same command

    code = told(runs, asked.trials, config, learned)
    done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == optuna.trial.TrialState.COMPLETE]
    if done:
        best = min(done, key=lambda trial: trial.value or 0.0)
        said = shlex.join(f"{name}={_text(value)}" for name, value in best.params.items())
        print(f"\nbest: run {best.number + 1}, {METRIC} {best.value:.4f}: {said}")
    return code


class _Trials(Sequence[Run]):
    """The runs of a search that are not done, each chosen when it is about to start."""

    def __init__(
        self, study: Study, asked: Search, space: Mapping[str, Any], config: Any, program: str, journal: str
    ) -> None:
        self._study, self._space, self._config, self._program = study, space, config, program
        self._journal, self._asha = journal, asked.asha
        there = study.get_trials(deepcopy=False)
        self._todo = [i for i in range(asked.trials) if i >= len(there) or not there[i].state.is_finished()]
        self._made: dict[int, Run] = {}

    def __len__(self) -> int:
        return len(self._todo)

    def __getitem__(self, place: Any) -> Any:
        index = self._todo[place]
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    def _make(self, index: int) -> Run:
        there = self._study.get_trials(deepcopy=False)
        trial = there[index] if index < len(there) else self._study.ask(_distributions(self._space))
        chosen = {name: _text(values[0]) for name, values in self._space.items() if len(values) == 1}
        chosen |= {name: _text(value) for name, value in trial.params.items()}
        words = [f"{name}={text}" for name, text in chosen.items()]
        folder = Path(self._journal).parent
        return Run(
            index,
            (sys.executable, "-m", self._program, *words, "cluster=null"),
            self._config,
            f"sweep-{folder.name}-{index:04d}",
            os.getcwd(),
            str(folder / f"{index:04d}.log"),
            shlex.join(words),
            _Asha(self._journal) if self._asha else None,
        )


@dataclass(frozen=True)
class _Asha:
    """Waits for a run, and stops it where it is behind the others after as many validations."""

    journal: str

    def __call__(self, run: Run, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of the process; 0 where it was stopped."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = _study(self.journal)
        trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[run.index]._trial_id)
        seen = 0
        while True:
            try:
                return process.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                losses = _losses(run)
            for loss in losses[seen:]:
                seen += 1
                trial.report(loss, seen)
                if trial.should_prune():
                    process.terminate()
                    process.wait()
                    study.tell(run.index, state=optuna.trial.TrialState.PRUNED)
                    return 0


def _study(journal: str) -> Study:
    """Open the study of a file, which the machines of a cluster share."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(journal)),
        study_name=NAME,
        load_if_exists=True,
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4),
    )
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    return study


def _distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for name, values in space.items():
        if not isinstance(values, tuple):
            if len(values) > 1:
                found[name] = CategoricalDistribution(values)
            continue
        low, high = values
        kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
        found[name] = kind(low, high, log=0 < 10 * low <= high)
    return found


def _losses(run: Run) -> list[float]:
    """Return the losses of a run's validations, in their order."""
    try:
        with ((run.folder or Path()) / "metrics.csv").open(newline="") as file:
            return [float(row[METRIC]) for row in csv.DictReader(file) if row.get(METRIC)]
    except OSError:
        return []


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
