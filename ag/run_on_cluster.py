"""A training run on the machines of a Ray cluster: ``python -m ag.fit cluster=local trainer.devices=2``.

Ray Train starts the ranks, each a process of a machine, which find one another as those that torchrun starts. What they
share is the run folder: a run whose machine is lost is started again and goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from ag import cluster
from ag.callbacks import NonFiniteError, Stopped
from ag.callbacks.stop import SIGNALS, how_to_continue
from ag.config import Config
from ag.errors import UserError, first_line
from ag.plugins import load
from ag.versions import versions

EXIT_FAILED, EXIT_USER_ERROR, EXIT_NOT_FINITE, EXIT_MOVED = 1, 2, 3, -1  # the last: its machine is about to go
LOOK_SECONDS = 0.5
LOG = "log.txt"  # in the run folder: what the first rank prints, which the command shows


class Ended(Exception):
    """A rank ended before the run was done: ``args`` are an exit code, as those of ``ag.fit``, and why."""


@dataclass(frozen=True)
class Rank:
    """What each rank is told.

    Attributes:
        fit: trains, :func:`ag.run.fit`.
        config: of the run.
        folder: the run folder, of which all machines see the same path; None for a dry run.
        place: the working folder.
        bell: its ``heard`` ends with the number of a signal that came to the command.
        versions: of the libraries where the command runs.
    """

    fit: Callable[..., object]
    config: Config
    folder: Path | None
    place: str
    bell: Any
    versions: Mapping[str, str]

    def __call__(self) -> tuple[int, str]:
        """Train, as one of the ranks; returns an exit code and what there is to say of it.

        Raises:
            Ended: for all that is not agreed with the other ranks.
        """
        import ray

        heard = self.bell.heard.remote()

        def told() -> int:
            going = ray.train.get_preemption_info()  # waits for all ranks: each asks it each time
            if ray.wait([heard], timeout=0)[0]:
                return int(ray.get(heard))
            return signal.SIGTERM if going else 0

        try:
            cluster.check_versions(self.versions)
            os.chdir(self.place)
            load(self.config.plugins)
            folder = self.folder
            if folder is not None and not (folder / "config.yaml").is_file():
                raise UserError(
                    f"cluster: {socket.gethostname()} does not see {folder.absolute()}: expected output= to be a "
                    "folder that all machines share under one path."
                )
            # Lightning takes these ranks for torchrun's
            os.environ |= {"TORCHELASTIC_RUN_ID": "ray", "GROUP_RANK": os.environ["NODE_RANK"]}
            with _printed(None if folder is None or os.environ["RANK"] != "0" else folder / LOG):
                self.fit(self.config, folder is None, folder, told)
        except Stopped as stopped:
            if not ray.wait([heard], timeout=0)[0]:
                raise Ended(EXIT_MOVED, f"a machine is about to go, after step {stopped.step}") from None
            return 128 + stopped.signum, str(stopped)
        except NonFiniteError as error:
            raise Ended(EXIT_NOT_FINITE, str(error)) from None
        except UserError as error:
            raise Ended(EXIT_USER_ERROR, str(error)) from None
        except Exception:
            raise Ended(EXIT_FAILED, traceback.format_exc()) from None  # many exceptions cannot be sent
        return 0, ""


class Bell:
    """Rings when a signal comes to the command; an actor, which the ranks listen to."""

    def __init__(self) -> None:
        self._rung, self._signum = asyncio.Event(), 0

    async def ring(self, signum: int) -> None:
        """Tell all who listen."""
        self._signum = self._signum or signum
        self._rung.set()

    async def heard(self) -> int:
        """Wait for it; returns the number of the signal."""
        await self._rung.wait()
        return self._signum


def run_on_cluster(config: Config, make_folder: Callable[[], Path | None], fit: Callable[..., object]) -> int:
    """Train on the machines of ``config.cluster``; returns the exit code of ``ag.fit``.

    Args:
        config: the whole configuration.
        make_folder: makes the run folder, where there is room for the run; returns None for a dry run.
        fit: trains, :func:`ag.run.fit`.

    Raises:
        UserError: what the ranks say, no such cluster, or no room on it.
    """
    with cluster.connected(config.cluster or "local"), tempfile.TemporaryDirectory() as scratch:
        import ray
        from ray.train import ControllerError, WorkerGroupError

        scaling = _scaling(config)
        folder = make_folder()
        log = None if folder is None else folder / LOG
        bell = ray.remote(num_cpus=0)(Bell).remote()
        rank = Rank(fit, replace(config, cluster=None), folder, os.getcwd(), bell, versions(*cluster.LIBRARIES))
        lost = 0
        with _signals(bell):
            while True:
                try:
                    code, said = _waited(lambda: _started(rank, scaling, scratch), log)
                    break
                except ControllerError as error:
                    raise UserError(f"cluster={config.cluster}: the ranks cannot be started: {error}") from None
                except WorkerGroupError as error:
                    code, said = _ended(error.worker_failures)
                if code == EXIT_USER_ERROR:
                    raise UserError(said)
                lost += code == EXIT_FAILED
                if code == EXIT_NOT_FINITE or lost > config.failures:
                    said = f"error: {said}"
                    if code == EXIT_FAILED and folder is not None:
                        said += f"; lost {lost} times (failures={config.failures}); {how_to_continue(folder)}"
                    break
                print(f"ag.fit: {said.splitlines()[-1]}; on from the last checkpoint", file=sys.stderr, flush=True)
    if said:
        print(f"ag.fit: {said}", file=sys.stderr)
    return int(code)


def _scaling(config: Config) -> Any:
    """Return what the ranks take of which machines, as Ray Train wants to be told.

    Raises:
        UserError: when the machines have less.
    """
    from ray.train import ScalingConfig

    trainer, on_gpu = config.trainer, cluster.on_gpu(config.trainer.accelerator)
    ranks, room = trainer.devices * trainer.num_nodes, cluster.Room(gpus=int(on_gpu))
    if room.hosts(cluster.resources()) < ranks:
        raise UserError(
            f"cluster={config.cluster}: it has {cluster.described()}; each of the {ranks} ranks of "
            f"trainer.devices={trainer.devices}, trainer.num_nodes={trainer.num_nodes} takes {room}: add a machine, or "
            "ask for less."
        )
    return ScalingConfig(
        num_workers=ranks,
        use_gpu=on_gpu,
        resources_per_worker={"CPU": room.cpus, "GPU": room.gpus} if on_gpu else {"CPU": room.cpus},
        # Lightning counts the GPUs of a machine; cores may be anywhere
        placement_strategy="STRICT_PACK" if on_gpu and trainer.num_nodes == 1 else "PACK",
    )


def _started(rank: Rank, scaling: Any, scratch: str) -> tuple[int, str]:
    """Start the ranks, once, and return what the first of them returns.

    Raises:
        ray.train.TrainingFailedError: when they cannot be started, or one ends in another way.
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # or each line is printed twice

    train: Any = ray.train  # whose types are those of its first version
    base: Any = TorchTrainer

    class Trainer(base):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            # this one asks a dashboard, which is not there, and takes 12 seconds to give up
            unwanted = "PlacementGroupCleanerCallback"
            return [each for each in super()._create_default_callbacks() if type(each).__name__ != unwanted]

    own = train.RunConfig(
        storage_path=scratch,  # of nothing that is kept
        # more is tried by the caller, who knows after which errors; a machine that is about to go is none
        failure_config=train.FailureConfig(max_failures=0, controller_failure_limit=rank.config.failures),
        logging_config=train.LoggingConfig(log_level="WARNING"),
    )
    returned: tuple[int, str] = Trainer(rank, scaling_config=scaling, run_config=own).fit().return_value
    return returned


def _ended(failures: Mapping[int, Exception]) -> tuple[int, str]:
    """Return the exit code and the reason that tell most: first what no other attempt mends, then what died."""
    told = [getattr(error, "_base_exc", error) for _, error in sorted(failures.items())]
    deaths = [(EXIT_FAILED, first_line(x)) for x in told if not isinstance(x, Ended)]
    order = [EXIT_USER_ERROR, EXIT_NOT_FINITE, EXIT_MOVED, EXIT_FAILED]
    return min([*deaths, *(x.args for x in told if isinstance(x, Ended))], key=lambda one: order.index(one[0]))


@contextmanager
def _signals(bell: Any) -> Iterator[None]:
    """Pass the first signal on to the ranks, which save and end; a second one ends this process."""
    seen: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        seen.append(signum)
        bell.ring.remote(signum)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _printed(path: Path | None) -> Iterator[None]:
    """Have what this process prints added to a file."""
    if path is None:
        yield
        return
    with path.open("a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        yield


def _waited(work: Callable[[], Any], log: Path | None) -> Any:
    """Return what work returns, or raise what it raises; show what a file gains meanwhile.

    In a thread: Ray Train would take Ctrl-C for itself.
    """
    result: list[Any] = []
    raised: list[BaseException] = []

    def do() -> None:
        try:
            result.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=do, daemon=True)
    shown = 0 if log is None or not log.exists() else log.stat().st_size
    thread.start()
    going = True
    while going:
        thread.join(LOOK_SECONDS)
        going = thread.is_alive()
        if log is not None and log.exists():
            with log.open("rb") as file:
                file.seek(shown)
                sys.stdout.write(file.read().decode(errors="replace"))
                sys.stdout.flush()
                shown = file.tell()
    if raised:
        raise raised[0]
    return result[0]
