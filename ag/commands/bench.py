"""Measure speed and memory: ``python -m ag.bench decode context=[2048,8192] keep=[0.2]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ag.commands.shared import KVDtype, SharedModel
from ag.config.command_line import main_from_schema
from ag.config.policies import FLAGS
from ag.config.sections import key
from ag.config.spec import PolicySpec, check_policy
from ag.errors import UserError

Backend = Literal["flash", "cudnn", "efficient", "math"]
COMPARED = ("decode", "prefill", "memory")  # modes that measure policies


@dataclass
class BenchConfig(SharedModel):
    """The keys of ``python -m ag.bench``."""

    mode: Literal["decode", "stream", "prefill", "train", "memory"] = key(
        "decode", "the measurement; may also be the first word"
    )
    threads: int | None = key(None, "CPU threads; null means torch's default", ge=1)
    context: list[int] = key([2048], "tokens of the prompt, or of a training row; stream: cached tokens")
    sdpa: list[Backend] = key(
        [],
        "backends that torch's attention is pinned to in plain transformers, a row each; others are compared with the "
        "first; empty means flash (in float32 on a GPU torch's choice)",
    )
    static: list[Backend] = key(
        [],
        "decode: backends, as sdpa, for transformers with a static cache under torch.compile, in addition to its "
        "dynamic cache",
    )
    keep: list[float] = key([0.2], "shares of the prompt that policies keep")
    batch: list[int] = key([1], "sequences in a batch")
    policy: list[str] = key(
        ["random"],
        "policies in addition to full; flags uses random gates that keep the same shares (prefill, memory)",
        holds="policy",
    )
    schedule: str = key("prefill", "when policies evict")
    kv_dtypes: list[KVDtype] = key(
        ["float"], "how this engine's caches store keys and values, a row each: float (the model's type), int8"
    )
    uneven: bool = key(
        False,
        "decode, prefill, memory: heads keep different numbers of tokens, which policy=random then draws",
    )
    fill: bool | None = key(
        None,
        "decode, memory: fill the cache with random keys and values instead of reading a prompt; null means in decode "
        "only",
    )
    kinds: list[str] = key(["attention", "mlp"], "stream: kinds of gates that decide on every generated token")
    recent: int = key(128, "stream: newest tokens that no gate evicts, and the window of attention gates", ge=1)
    steps: int = key(16, "decode, stream, memory: tokens generated in a round", ge=1)
    interleaved: bool = key(
        False, "decode: contestants take turns token by token, with all caches in memory at once; for noisy machines"
    )
    rounds: int = key(5, "measurements of every contestant, which take turns", ge=1)
    warmup: int = key(1, "warm-up rounds, which do not count", ge=0)
    seed: int = key(0, "seed of tokens, gates and uneven heads", ge=0, le=2**32 - 1)
    output: str = key("runs/bench", "folder for MODE.json and MODE.md", holds="output")

    def check(self) -> None:
        """Refuse sizes, shares and policies that cannot be measured.

        Raises:
            UserError: names the value, the expected values and the fix.
        """
        too_small = [value for values in (self.context, self.batch) for value in values if value < 1]
        if too_small or not (self.context and self.batch):
            raise UserError(f"context={self.context}, batch={self.batch}: expected numbers of at least 1.")
        shares = [share for share in self.keep if not 0 < share <= 1]
        if shares:
            raise UserError(f"keep={shares[0]}: expected shares of the prompt, above 0 and up to 1.")
        if self.mode == "stream" and min(self.context) <= self.recent:
            raise UserError(
                f"context={min(self.context)}: expected more than the {self.recent} recent tokens; give a longer one, "
                "or recent=N."
            )
        if self.static and (self.mode != "decode" or self.interleaved):
            raise UserError(f"static=[{','.join(self.static)}]: a static cache runs in decode with interleaved=false.")
        for text in self.policy if self.mode in COMPARED else []:
            spec = PolicySpec.parse(text)
            if text == FLAGS and (self.mode == "decode" or self.fill):
                raise UserError("policy=flags: random gates decide nothing while decoding or filling; use random.")
            if spec.reads_gates and spec.path is None and text != FLAGS:
                raise UserError(
                    f"policy={text}: expected gates:EXPORT, or flags of random gates that keep the same shares."
                )
            for share in self.keep if text != FLAGS else []:
                check_policy(spec, float(share), self.schedule)


main = main_from_schema("ag.bench", BenchConfig, "ag.bench.run:run", first="mode", check=BenchConfig.check)
