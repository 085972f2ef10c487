"""Write the tables of docs/planning.md from the planner: python benchmarks/plan_tables.py [MODEL ...]."""

import sys
from pathlib import Path

from ag.config import Config
from ag.config.recipes import resolve
from ag.training.memory_plan import GIB, TFLOPS, MemoryPlan, plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
MODELS = {f"llama-2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")}
GPUS = [1, 2, 4, 8, 16, 32, 64]
BASES = {"NF4, DDP": ("nf4", "ddp"), "bf16, DDP": ("none", "ddp"), "bf16, FSDP2": ("none", "fsdp2")}


def table(name: str) -> str:
    """Return the table of a model: memory of one GPU, and tokens a second of all."""
    head = f"| {name} | " + " | ".join(f"{count} GPU{'s' if count > 1 else ''}" for count in GPUS) + " |"
    lines = [head, "|---" * (len(GPUS) + 1) + "|"]
    plans: list[MemoryPlan] = []
    for base, (quantization, strategy) in BASES.items():
        plans = [plan(settings(name, quantization, strategy, count)) for count in GPUS]
        lines.append(f"| {base}: GiB | " + " | ".join(f"{found.total / GIB:.1f}" for found in plans) + " |")
    speed = (found.tokens * TFLOPS * 1e12 / found.flops for found in plans)
    lines.append("| tokens/s | " + " | ".join(f"{tokens:,.0f}" for tokens in speed) + " |")
    return "\n".join(lines)


def settings(name: str, quantization: str, strategy: str, count: int) -> Config:
    """Return the recipe for a model on a number of GPUs, eight to a machine."""
    nodes = max(1, count // 8)
    return resolve(
        Config,
        {
            "recipe": "redpajama_cpt",
            "model.name": MODELS[name],
            "model.quantization": quantization,
            "trainer.strategy": "auto" if count == 1 and strategy == "ddp" else strategy,
            "trainer.devices": str(count // nodes),
            "trainer.num_nodes": str(nodes),
        },
    )


def main() -> None:
    """Replace each table of the page by what the planner says now."""
    text = PAGE.read_text()
    for name in sys.argv[1:] or MODELS:
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{table(name)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
