"""A training run on the machines of a Ray cluster: ``python -m ag.fit cluster=local trainer.devices=2``.

Ray Train starts the ranks as torchrun does. They share the run folder: after the loss of a rank Ray starts all ranks
again, and the run continues from its last checkpoint.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from ag import cluster
from ag.callbacks import NonFiniteError, Stopped
from ag.callbacks.stop import SIGNALS, how_to_continue
from ag.config import Config
from ag.errors import UserError
from ag.plugins import load
from ag.versions import versions

EXIT_FAILED, EXIT_USER_ERROR, EXIT_NOT_FINITE = 1, 2, 3
LOOK_SECONDS = 0.5
LOG = "log.txt"  # output of the first rank, in the run folder; the command prints it too

T = TypeVar("T")


class RunControl:
    """An actor through which the command and its ranks exchange signals and errors."""

    def __init__(self) -> None:
        self._signalled, self._signum = asyncio.Event(), 0
        self._failure = 0, ""

    async def send_signal(self, signum: int) -> None:
        """Pass a signal of the command on to all ranks."""
        self._signum = self._signum or signum
        self._signalled.set()

    async def wait_signal(self) -> int:
        """Wait for a signal; returns its number."""
        await self._signalled.wait()
        return self._signum

    async def report_failure(self, code: int, message: str) -> None:
        """Record an error that another attempt would repeat, as an exit code of ``ag.fit`` and a message."""
        self._failure = code, message

    async def failure(self) -> tuple[int, str]:
        """Return the recorded exit code and message; code 0 means no error."""
        return self._failure


@dataclass(frozen=True)
class Rank:
    """The work of each rank."""

    fit: Callable[..., object]  # :func:`ag.run.fit`
    config: Config
    folder: Path | None  # the run folder; all machines see it under this path. None: a dry run
    working_dir: str  # the working folder
    control: Any  # an actor of class :class:`RunControl`
    versions: Mapping[str, str]  # versions of the libraries where the command runs

    def __call__(self) -> tuple[int, str]:
        """Train as one of the ranks; returns an exit code and a message.

        Raises:
            RuntimeError: this rank failed. Ray then ends all ranks, and starts them again.
        """
        import ray

        code, message = ray.get(self.control.failure.remote())
        if code:  # from an earlier attempt
            return code, message
        sent, leaving = self.control.wait_signal.remote(), False

        def stop_signal() -> int:
            nonlocal leaving
            leaving = ray.train.get_preemption_info() is not None  # a collective: every rank calls it every time
            if ray.wait([sent], timeout=0)[0]:
                return int(ray.get(sent))
            return signal.SIGTERM if leaving else 0

        try:
            self._train(stop_signal)
        except Stopped as stopped:
            if ray.wait([sent], timeout=0)[0]:
                return 128 + stopped.signum, str(stopped)
            if leaving:  # Ray ends the ranks with their machine, and starts them on another
                threading.Event().wait()
            raise RuntimeError(str(stopped)) from None
        except (UserError, NonFiniteError) as error:
            code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_NOT_FINITE
            ray.get(self.control.report_failure.remote(code, str(error)))
            raise RuntimeError(str(error)) from None
        except Exception:
            raise RuntimeError(traceback.format_exc()) from None  # many exceptions cannot be pickled
        return 0, ""

    def _train(self, stop_signal: Callable[[], int]) -> None:
        cluster.check_versions(self.versions)
        os.chdir(self.working_dir)
        load(self.config.plugins)
        folder = self.folder
        if folder is not None and not (folder / "config.yaml").is_file():
            raise UserError(
                f"cluster: {socket.gethostname()} does not see {folder.absolute()}: expected output= to be a "
                "folder that all machines share under one path."
            )
        # Lightning then treats these ranks like torchrun's
        os.environ |= {"TORCHELASTIC_RUN_ID": "ray", "GROUP_RANK": os.environ["NODE_RANK"]}
        with ExitStack() as redirected:
            if folder is not None and os.environ["RANK"] == "0":
                log = redirected.enter_context((folder / LOG).open("a", buffering=1))
                redirected.enter_context(redirect_stdout(log))
                redirected.enter_context(redirect_stderr(log))
            self.fit(self.config, folder is None, folder, stop_signal)


def run_on_cluster(config: Config, make_folder: Callable[[], Path | None], fit: Callable[..., object]) -> int:
    """Train on the machines of ``config.cluster`` by ``fit``, :func:`ag.run.fit`; returns the exit code of ``ag.fit``.

    ``make_folder`` is called when the cluster has room. It makes the run folder, or returns None for a dry run.

    Raises:
        UserError: a rank raised it, the cluster does not exist, or it has no room.
    """
    with cluster.connected(config.cluster or "local"), tempfile.TemporaryDirectory() as scratch:
        import ray
        from ray.train import ControllerError, WorkerGroupError

        scaling = _scaling(config)
        folder = make_folder()
        control: Any = ray.remote(num_cpus=0)(RunControl).remote()
        rank = Rank(fit, config, folder, os.getcwd(), control, versions(*cluster.LIBRARIES))
        try:
            with _signals(control):
                code, message = _run_and_follow_log(lambda: _run_ranks(rank, scaling, scratch), folder and folder / LOG)
        except ControllerError as error:
            raise UserError(f"cluster={config.cluster}: the ranks cannot be started: {error}") from None
        except WorkerGroupError as error:
            code, message = ray.get(control.failure.remote())
            if not code:  # if several ranks ended, the error of the rank that died says most
                failures = [getattr(x, "_base_exc", x) for _, x in sorted(error.worker_failures.items())]
                died = str(min(failures, key=lambda x: isinstance(x, RuntimeError))).strip()
                code, message = EXIT_FAILED, f"{died}; ranks ended once more than failures={config.failures} allows"
                message += "" if folder is None else f"; {how_to_continue(folder)}"
    if code == EXIT_USER_ERROR:
        raise UserError(message)
    if message:
        print(f"ag.fit: {'error: ' * (code in (EXIT_FAILED, EXIT_NOT_FINITE))}{message}", file=sys.stderr)
    return int(code)


def _scaling(config: Config) -> Any:
    """Return the resources of the ranks.

    Raises:
        UserError: the cluster has less.
    """
    from ray.train import ScalingConfig

    trainer, on_gpu = config.trainer, cluster.on_gpu(config.trainer.accelerator)
    ranks, room = trainer.world_size, cluster.Resources(gpus=int(on_gpu))
    hosts = [room.hosts(machine) for machine in cluster.machines()]
    one_machine = on_gpu and trainer.num_nodes == 1  # Lightning counts a machine's GPUs; CPU ranks may be anywhere
    if (max(hosts) if one_machine else sum(hosts)) < ranks:
        raise UserError(
            f"cluster={config.cluster}: it has {cluster.described()}; each of the {ranks} ranks of "
            f"trainer.devices={trainer.devices}, trainer.num_nodes={trainer.num_nodes} takes {room}"
            f"{', all on one machine' * one_machine}: add a {'larger ' * one_machine}machine, or ask for less."
        )
    return ScalingConfig(
        num_workers=ranks,
        use_gpu=on_gpu,
        resources_per_worker={"CPU": room.cpus, "GPU": room.gpus} if on_gpu else {"CPU": room.cpus},
        placement_strategy="STRICT_PACK" if one_machine else "PACK",
    )


def _run_ranks(rank: Rank, scaling: Any, scratch: str) -> tuple[int, str]:
    """Run the ranks, and again after the loss of a rank; return the result of the first rank.

    Raises:
        ray.train.TrainingFailedError: ranks cannot be started, or were lost more often than ``failures``.
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # or each line is printed twice

    train: Any = ray.train  # its type hints belong to version 1

    class Trainer(cast(Any, TorchTrainer)):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            # this callback waits 12 seconds for the dashboard, which does not run
            unwanted = "PlacementGroupCleanerCallback"
            return [each for each in super()._create_default_callbacks() if type(each).__name__ != unwanted]

    run_config = train.RunConfig(
        storage_path=scratch,
        failure_config=train.FailureConfig(
            max_failures=rank.config.failures, controller_failure_limit=rank.config.failures
        ),
        logging_config=train.LoggingConfig(log_level="WARNING"),
    )
    returned: tuple[int, str] = Trainer(rank, scaling_config=scaling, run_config=run_config).fit().return_value
    return returned


@contextmanager
def _signals(control: Any) -> Iterator[None]:
    """Pass the first signal on to the ranks, which save and end; the second signal ends this process."""
    signals: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)
        signals.append(signum)
        control.send_signal.remote(signum)

    handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_and_follow_log(work: Callable[[], T], log: Path | None) -> T:
    """Run ``work`` in a thread, and print new lines of a log file meanwhile; return its result or raise its error.

    In the main thread Ray Train would handle Ctrl-C. The thread is a daemon: a second Ctrl-C ends the process.
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
        finished, _ = wait([result], timeout=LOOK_SECONDS)
        if log is not None and log.exists():
            with log.open("rb") as file:
                file.seek(shown)
                sys.stdout.write(file.read().decode(errors="replace"))
                sys.stdout.flush()
                shown = file.tell()
        if finished:
            return result.result()
