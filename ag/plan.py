"""``python -m ag.plan``: see :mod:`ag.commands.plan`."""

from ag.commands.plan import PlanConfig as PlanConfig
from ag.commands.plan import main as main
from ag.commands.serve import ServeConfig
from ag.config.command_line import Invocation
from ag.hardware import Card


def show(invocation: Invocation[PlanConfig]) -> int:
    """Print the plan of a run, without loading weights; returns the exit code."""
    from ag.data.lengths import sample_rows
    from ag.training.memory_plan import outline_of, report

    config = invocation.config
    rows = sample_rows(config, outline_of(config).context)
    print(report(config, config.tflops, config.card, rows))
    if config.card is not None and config.share is not None:
        print(serving_text(config, config.card, config.share))
    return 0


def serving_text(config: PlanConfig, card: Card, share: float) -> str:
    """Return how many requests a server on a device holds at once, under a policy that keeps ``share`` of each prompt.

    Its memory is what the weights leave of the device. Weights, keys and values have the type ``model.dtype``: the
    server does not load NF4, whatever the run trains with.

    Raises:
        ModelError: the model's configuration cannot be read.
        UserError: the server does not run the model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ag.engine.cache import EvictionCache
    from ag.engine.policy import policy
    from ag.model.hooks import instrument
    from ag.serve.admission import Admission
    from ag.training.made_outline import read_geometry
    from ag.training.memory_plan import GIB, USABLE, outline_of

    memory = max(0, int(USABLE * card.gib * GIB - outline_of(config).nbytes["base"]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            read_geometry(config.model),
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
    instrument(model).goes_on = True  # else a cache would run a hybrid model, which has no weights here, to know it
    cache = EvictionCache(model, policy("full") if share == 1 else policy("h2o", share))
    admission = Admission(cache, model.config, ServeConfig.prefill_tokens)
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    text = admission.capacity_text(memory // cache.setup.pool.block_nbytes(), context_length)
    return f"a server with memory={memory / GIB:.1f}GiB that keeps {share:g} of each prompt: {text}"


if __name__ == "__main__":
    raise SystemExit(main())
