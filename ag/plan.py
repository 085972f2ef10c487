"""``python -m ag.plan``: see :mod:`ag.commands.plan`."""

from ag.commands.plan import PlanConfig as PlanConfig
from ag.commands.plan import main as main
from ag.config.command_line import Invocation


def show(invocation: Invocation[PlanConfig]) -> int:
    """Print the plan of a run, without loading weights; returns the exit code."""
    from ag.training.memory_plan import report

    config = invocation.config
    print(report(config, config.tflops, config.card))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
