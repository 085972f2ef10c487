"""A training run on the machines of a Ray cluster: ``python -m ag.fit cluster=local trainer.devices=2``.

Ray Train starts the ranks, each a process of a machine, which find one another as those that torchrun starts. What they
share is the run folder: a run that loses a rank is started again by Ray and goes on from its last checkpoint.
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
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ag import cluster
from ag.callbacks import NonFiniteError, Stopped
from ag.callbacks.stop import SIGNALS, how_to_continue
from ag.config import Config
from ag.errors import UserError
from ag.plugins import load
from ag.versions import versions

EXIT_FAILED, EXIT_USER_ERROR, EXIT_NOT_FINITE = 1, 2, 3
LOOK_SECONDS = 0.5
LOG = "log.txt"  # in the run folder: what the first rank prints, which the command shows

T = TypeVar("T")


class Desk:
    """What the command and its ranks tell one another; an actor."""

    def __init__(self) -> None:
        self._rung, self._signum = asyncio.Event(), 0
        self._verdict = 0, ""

    async def ring(self, signum: int) -> None:
        """Tell all ranks of a signal that came to the command."""
        self._signum = self._signum or signum
        self._rung.set()

    async def heard(self) -> int:
        """Wait for a signal; returns its number."""
        await self._rung.wait()
        return self._signum

    async def judge(self, code: int, said: str) -> None:
        """Note what no other attempt mends: an exit code of ``ag.fit``, and why."""
        self._verdict = code, said

    async def verdict(self) -> tuple[int, str]:
        """Return what no other attempt mends; code 0 means that nothing is known."""
        return self._verdict


@dataclass(frozen=True)
class Rank:
    """What each rank is told.

    Attributes:
        fit: trains, :func:`ag.run.fit`.
        config: of the run.
        folder: the run folder, of which all machines see the same path; None for a dry run.
        place: the working folder.
        desk: the actor :class:`Desk`.
        versions: of the libraries where the command runs.
    """

    fit: Callable[..., object]
    config: Config
    folder: Path | None
    place: str
    desk: Any
    versions: Mapping[str, str]

    def __call__(self) -> tuple[int, str]:
        """Train, as one of the ranks; returns an exit code and what there is to say of it.

        Raises:
            RuntimeError: for all that is not agreed with the other ranks. Ray ends these, and starts all again.
        """
        import ray

        code, said = ray.get(self.desk.verdict.remote())
        if code:  # of an attempt before this one
            return code, said
        heard, going = self.desk.heard.remote(), False

        def told() -> int:
            nonlocal going
            going = ray.train.get_preemption_info() is not None  # waits for all ranks: each asks it each time
            if ray.wait([heard], timeout=0)[0]:
                return int(ray.get(heard))
            return signal.SIGTERM if going else 0

        try:
            self._train(told)
        except Stopped as stopped:
            if ray.wait([heard], timeout=0)[0]:
                return 128 + stopped.signum, str(stopped)
            if going:  # Ray ends the ranks with the machine, and starts them on others
                threading.Event().wait()
            raise RuntimeError(str(stopped)) from None
        except (UserError, NonFiniteError) as error:
            code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_NOT_FINITE
            ray.get(self.desk.judge.remote(code, str(error)))
            raise RuntimeError(str(error)) from None
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None  # many exceptions cannot be sent
        return 0, ""

    def _train(self, told: Callable[[], int]) -> None:
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
        desk: Any = ray.remote(num_cpus=0)(Desk).remote()
        rank = Rank(fit, replace(config, cluster=None), folder, os.getcwd(), desk, versions(*cluster.LIBRARIES))
        try:
            with _signals(desk):
                code, said = _waited(lambda: _started(rank, scaling, scratch), folder and folder / LOG)
        except ControllerError as error:
            raise UserError(f"cluster={config.cluster}: the ranks cannot be started: {error}") from None
        except WorkerGroupError as error:
            code, said = ray.get(desk.verdict.remote())
            if not code:  # of ranks that end together the one that died tells most
                failures = [getattr(x, "_base_exc", x) for _, x in sorted(error.worker_failures.items())]
                died = str(min(failures, key=lambda x: isinstance(x, RuntimeError))).strip()
                code, said = EXIT_FAILED, f"{died}; ranks ended once more than failures={config.failures} allows"
                said += "" if folder is None else f"; {how_to_continue(folder)}"
    if code == EXIT_USER_ERROR:
        raise UserError(said)
    if said:
        print(f"ag.fit: {'error: ' * (code in (EXIT_FAILED, EXIT_NOT_FINITE))}{said}", file=sys.stderr)
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
    """Start the ranks, again where one is lost, and return what the first of them returns.

    Raises:
        ray.train.TrainingFailedError: when they cannot be started, or were lost more often than ``failures``.
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
        failure_config=train.FailureConfig(
            max_failures=rank.config.failures, controller_failure_limit=rank.config.failures
        ),
        logging_config=train.LoggingConfig(log_level="WARNING"),
    )
    returned: tuple[int, str] = Trainer(rank, scaling_config=scaling, run_config=own).fit().return_value
    return returned


@contextmanager
def _signals(desk: Any) -> Iterator[None]:
    """Pass the first signal on to the ranks, which save and end; a second one ends this process."""
    seen: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        seen.append(signum)
        desk.ring.remote(signum)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _printed(path: Path | None) -> Iterator[None]:
    """Have what this process prints added to a file; None means that it is printed as ever."""
    with ExitStack() as stack:
        if path is not None:
            file = stack.enter_context(path.open("a", buffering=1))
            stack.enter_context(redirect_stdout(file))
            stack.enter_context(redirect_stderr(file))
        yield


def _waited(work: Callable[[], T], log: Path | None) -> T:
    """Return what work returns, or raise what it raises; show what a file gains meanwhile.

    In a thread: Ray Train would take Ctrl-C for itself. It is a daemon, so that a second Ctrl-C ends the process.
    """
    result: Future[T] = Future()

    def do() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    shown = 0 if log is None or not log.exists() else log.stat().st_size
    threading.Thread(target=do, daemon=True).start()
    while True:
        ended, _ = wait([result], timeout=LOOK_SECONDS)
        if log is not None and log.exists():
            with log.open("rb") as file:
                file.seek(shown)
                sys.stdout.write(file.read().decode(errors="replace"))
                sys.stdout.flush()
                shown = file.tell()
        if ended:
            return result.result()
