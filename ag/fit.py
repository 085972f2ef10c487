"""Train: ``python -m ag.fit recipe=NAME key=value ...``."""

from __future__ import annotations

import os
import sys

from ag.config import Config
from ag.config.command_line import command, parse
from ag.errors import UserError

EXIT_NOT_FINITE = 3


@command("ag.fit")
def main(argv: list[str]) -> int:
    """Run the command line; returns the exit code.

    Codes: 0 done; 2 an error in the configuration, the data, the model, the run to resume or the disk (one line on
    stderr); 3 a loss or gradient was not finite; 143, 130 and 138 stopped by SIGTERM, Ctrl-C and SIGUSR1, after
    a checkpoint where training had begun.
    """
    invocation = parse(argv, Config, "ag.fit")
    if invocation.config.plan:
        from ag.training.memory_plan import report  # imports the fake tensors of PyTorch's compiler

        print(report(invocation.config))
        return 0
    from ag.callbacks import NonFiniteError, Stopped  # loads torch and Lightning, which no help needs
    from ag.run import fit

    try:
        fit(invocation.config, invocation.dry_run)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(str(error)) from error
    except NonFiniteError as error:
        # when another process fails first, Lightning's launcher kills the first one, and its exit code is lost
        return _fail(f"error: {error}", EXIT_NOT_FINITE if os.environ.get("LOCAL_RANK", "0") == "0" else 0)
    except Stopped as stopped:
        return _fail(str(stopped), int(stopped.code or 0))
    return 0


def _fail(message: str, code: int) -> int:
    print(f"ag.fit: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
