"""Which architectures of transformers can be trained and served: each with tiny random weights, and the table in docs.

``python -m tests.model.test_architectures`` writes docs/architectures.md anew: under the newest transformers all of its
columns but the last, and then under the oldest the last one.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import ag
from ag.errors import UserError
from ag.model.structure import UnsupportedModelError, decoder_of, lm_logits
from tests.support.bounds import hold, of_logits

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
SMALL: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}
MLA = {  # of attention with compressed keys and values, which have as many heads as queries
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
DELTA = {  # a layer of linear attention
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
MAMBA = {  # a layer of a state space
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_expand": 2, "attn_layer_indices": [1]},
}
SHARED = {  # two layers with keys and values, two that read them
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
UNNAMED = "per_layer_config", "global_head_dim", "num_global_key_value_heads"  # that configurations take all the same
#: Model types of transformers, with what their configuration needs to be tiny.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "ministral", "ministral3", "qwen2", "qwen2_moe"), {}),
    **dict.fromkeys(("qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "vaultgemma", "phi", "phi3"), {}),
    **dict.fromkeys(("phimoe", "olmo", "olmo2", "olmo3", "olmoe", "flex_olmo", "granite", "granitemoe"), {}),
    **dict.fromkeys(("smollm3", "cohere", "cohere2", "gpt_oss", "gpt_neox", "starcoder2", "stablelm"), {}),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "helium", "nemotron", "exaone4", "ernie4_5", "seed_oss"), {}),
    **dict.fromkeys(("arcee", "apertus", "hunyuan_v1_dense", "persimmon", "bitnet", "afmoe", "nanochat"), {}),
    **dict.fromkeys(("opt", "gpt_bigcode", "diffllama", "doge", "jetmoe", "falcon"), {}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), MLA),
    **dict.fromkeys(
        ("gemma3_text", "olmo3", "cohere2", "gpt_oss"), {"layer_types": ["sliding_attention", "full_attention"]}
    ),
    **dict.fromkeys(("granite", "granitemoe"), {"logits_scaling": 8.0}),
    # linear attention, state spaces and convolutions beside attention; chunks; shared keys and values
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), DELTA),
    **dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1"), MAMBA),
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4},
        **{"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    },
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": MLA
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4},
    },
    "llama4_text": {
        **{"no_rope_layers": [1, 0], "attention_chunk_size": 44, "intermediate_size_mlp": 48},
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gemma3n_text": SHARED | {"altup_num_inputs": 2, "laurel_rank": 4, "intermediate_size": [48] * 4},
    "gemma4_text": SHARED | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **dict.fromkeys(("lfm3", "bailing_hybrid", "lara_mini"), {"layer_types": ["linear_attention", "full_attention"]}),
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "bailing_hybrid": MLA | {"layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("minimax_m2", "beam", "aria_text", "apertus1p5_text", "cohere2_moe", "cwm", "ernie4_5_moe"), {}),
    **dict.fromkeys(("exaone", "exaone_moe", "flint", "gemma4_unified_text", "granite_swa", "granitemoe_swa"), {}),
    **dict.fromkeys(("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder"), {}),
    **dict.fromkeys(("jais2", "kolibri1", "laguna", "mellum", "minimax_m3_vl_text", "moshi", "sarvam_moe"), {}),
    **dict.fromkeys(("solar_open", "mimo_v2_flash", "gpt_neo", "bloom", "modernbert-decoder", "hrm_text"), {}),
    **dict.fromkeys(("deepseek_v4", "dory", "inkling_text", "qwen4_exp_text", "mamba", "rwkv", "xlstm"), {}),
    **dict.fromkeys(("recurrent_gemma", "falcon_mamba", "biogpt", "bert", "cpmant", "gpt_neox_japanese"), {}),
    **dict.fromkeys(("glm4_moe_lite", "axk1", "minicpm3", "sarvam_mla", "youtu", "axk2", "deepseek_v32"), MLA),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), MLA),
}
#: Those whose logits are more than the product of the head: it is scaled, or capped.
MORE_THAN_A_HEAD = {"gemma2", "gemma3n_text", "vaultgemma", "granite", "granitemoe", "nanochat", "beam", "minicpm3"}
MORE_THAN_A_HEAD |= {"cohere", "cohere2", "cohere2_moe"}
#: Windows, caps, sink logits, compressed keys, layers without RoPE, and refusals; the others run nightly.
BY_DAY = {"gemma2", "gpt_oss", "deepseek_v3", "cohere2", "nemotron", "opt"}
COLUMNS = ("gates", "`h2o`", "`expected_attention`", "`positions=slot`")  # of the newest transformers
NEWEST, OLDEST = "5.24", "5.17"  # transformers of the page; its last column is of the oldest
HERE = ".".join(transformers.__version__.split(".")[:2])
SAME, ABSENT = "the same", "no such type"  # in the last column
PROMPT, NEW = 40, 6
SUMS = 32  # bound of what orders of summation do, in units of what rounding does to the model's own logits
LARGEST, LENGTH = 3_000_000, 24  # parameters of a model, tokens


def tiny(name: str, **more: Any) -> Any:
    """A model of a type, as small as its configuration allows, drawn from a seed; ``more`` are words of that."""
    kind = type(AutoConfig.for_model(name))
    known = {word for base in kind.__mro__ for word in getattr(base, "__annotations__", {})}
    known |= {*inspect.signature(kind.__init__).parameters, *UNNAMED}
    given = SMALL | ARCHITECTURES.get(name, {}) | more
    config = kind(**{word: value for word, value in given.items() if word in known})
    config._experts_implementation = "eager"  # the others lack float64, in which bounds are computed
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    assert name in ARCHITECTURES or size < LARGEST, "its configuration has other names of sizes"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 120, (length,), generator=torch.Generator().manual_seed(seed))


def trained(model: Any) -> ag.AttentionGates:
    """Gates after two steps on the loss of the last tokens of a row, all of which moved."""
    torch.manual_seed(0)
    gates = ag.AttentionGates(model.config, ag.GateConfig(num_heads=2, bias=0.0, recent_tokens=2, sink_tokens=1))
    ag.attach(model.requires_grad_(False), gates)
    before = [parameter.detach().clone() for parameter in gates.parameters()]
    optimizer = torch.optim.SGD(gates.parameters(), lr=1.0)
    row, valid = text(PROMPT, 1)[None], torch.ones(1, PROMPT, dtype=torch.bool)
    for _ in range(2):
        gating = ag.Gating(gates, valid, torch.tensor([PROMPT - 8]))
        logits = model(input_ids=row, gating=gating, use_cache=False).logits
        loss = F.cross_entropy(logits[0, -9:-1].float(), row[0, -8:])
        if not loss.requires_grad:  # torch refuses such a loss
            raise UnsupportedModelError(f"{type(model).__name__} does not hand gates on to its decoder")
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite()
        optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(before, gates.parameters(), strict=True))
    return gates.eval()


@torch.no_grad()
def served(model: Any, policy: str, **options: Any) -> None:
    """Evict, generate, batch and save, each against another way to the same."""
    rows = [text(PROMPT, 2), text(PROMPT - 9, 3)]
    full = ag.EvictionCache(model, "full")
    own = model(rows[0][None], use_cache=False).logits
    bound = SUMS * float((own - copy.deepcopy(model).double()(rows[0][None], use_cache=False).logits).abs().max())
    assert float((model(rows[0][None], past_key_values=full).logits - own).abs().max()) <= bound
    ids = torch.stack([rows[0], F.pad(rows[1], (9, 0))])
    mask = torch.stack([torch.ones(PROMPT), F.pad(torch.ones(PROMPT - 9), (9, 0))]).long()
    words = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    more = {"return_dict_in_generate": True, "output_logits": True}
    cache = ag.EvictionCache(model, policy, 0.5, **options)
    both = torch.stack(model.generate(ids, attention_mask=mask, past_key_values=cache, **words, **more).logits)
    assert 0.45 < cache.kept_share(prompt=True) < 0.85  # half, and all in layers with windows of their own
    for index, row in enumerate(rows):
        alone = ag.EvictionCache(model, policy, 0.5, **options)
        got = torch.stack(model.generate(row[None], past_key_values=alone, **words, **more).logits)[:, 0]
        assert float((got - both[:, index]).abs().max()) <= bound
        assert [kept.numel() for kept in alone.kept_positions(0)[0]] == [
            kept.numel() for kept in cache.kept_positions(0)[index]
        ]
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache")
        again = ag.EvictionCache.load(Path(folder) / "cache", model)
    token, longer = torch.tensor([[5], [6]]), F.pad(mask, (0, NEW), value=1)
    steps = [model(token, attention_mask=longer, past_key_values=one).logits for one in (cache, again)]
    assert torch.equal(*steps)


def gated(model: Any) -> None:
    """Train gates, write and read them, and serve under them."""
    gates = trained(model)
    with tempfile.TemporaryDirectory() as folder:
        gates.save_pretrained(folder)
        read = ag.AttentionGates.from_pretrained(folder)
    assert all(torch.equal(*pair) for pair in zip(gates.parameters(), read.parameters(), strict=True))
    served(model, "gates")


TRIED: tuple[Callable[[Any], None], ...] = (
    gated,
    lambda model: served(model, "h2o"),
    lambda model: served(model, "expected_attention"),
    lambda model: served(model, "h2o", positions="slot"),
)


def outcome(name: str) -> list[str]:
    """What the table says of an architecture: yes, or the reason why not, for each column."""
    model = tiny(name)
    said = []
    for run in TRIED:
        try:
            run(model)
            said.append("yes")
        except (UnsupportedModelError, UserError) as error:
            said.append(reason(str(error)))
    return said if len(set(said)) > 1 else said[:1]


def reason(message: str) -> str:
    """The part of a refusal that says what the model does."""
    message = re.sub(r"^(?:positions=slot|ag\.policy\(.*?\)): ", "", message)
    return re.split(r"[;.] [Uu]se |; expected|: expected", message)[0].rstrip(".")


def cells(said: list[str]) -> list[str]:
    """The outcome by column of the newest transformers; one outcome stands for all of them."""
    return said * len(COLUMNS) if said == ["yes"] else [*said, *[""] * (len(COLUMNS) - len(said))]


def last_cell(name: str, newest: list[str]) -> str:
    """What the last column would say of the transformers that runs, beside the newest's cells."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ABSENT
    said = outcome(name)
    if cells(said) == newest:
        return SAME
    both = zip(COLUMNS, cells(said), newest, strict=True)
    return said[0] if len(said) == 1 else "; ".join(f"{column}: {cell}" for column, cell, new in both if cell != new)


def rows_of_page() -> dict[str, list[str]]:
    """The cells of each architecture, the last one of the oldest transformers."""
    found = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: [cell.strip() for cell in row.split(" | ")] for name, row in found if name != "model_type"}


def by_day(*names: str) -> list[Any]:
    """Parameters of which those in BY_DAY alone run by day."""
    return [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in names]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", by_day(*ARCHITECTURES))
def test_the_table_in_docs_is_what_runs(name: str) -> None:
    *newest, oldest = rows_of_page()[name]
    found = last_cell(name, newest)
    assert found in {NEWEST: [SAME], OLDEST: [oldest]}.get(HERE, [SAME, oldest])


def test_the_table_in_docs_has_every_architecture() -> None:
    assert list(rows_of_page()) == list(ARCHITECTURES)
    assert all(len(row) == len(COLUMNS) + 1 for row in rows_of_page().values())


@torch.no_grad()
@pytest.mark.parametrize("name", by_day(*(name for name, row in rows_of_page().items() if "yes" in row)))
def test_logits_of_states_are_those_of_the_model(name: str) -> None:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, ids = tiny(name), torch.stack([text(9, 1), text(9, 2)])
    head = model.get_output_embeddings()
    head.weight.mul_(30)  # so that a cap changes logits by more than rounding does
    states = decoder_of(model)(ids, use_cache=False).last_hidden_state
    want, bound = model(ids, use_cache=False).logits, of_logits(model, *ids)
    hold(lm_logits(model, states), want, bound)
    hold(lm_logits(model, states[0, 3]), want[0, 3], bound)
    assert (float((head(states) - want).abs().max()) > bound) == (name in MORE_THAN_A_HEAD)


# ---- every other type of transformers

TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in ARCHITECTURES]  # those have a test each


@torch.no_grad()
def comes_of(name: str) -> str:
    """The outcome of a type: ``untried`` if the model does not run by itself, ``refused``, ``served`` or ``wrong``."""
    ids = text(LENGTH, 4)[None]
    try:
        model = tiny(name)
        own = model(ids, use_cache=False).logits
        more = model.double()(ids, use_cache=False).logits
        model.float()
    except Exception:  # of transformers, whatever it is
        return "untried"
    bound = SUMS * float((own - more).abs().max())
    try:
        cache = ag.EvictionCache(model, "full")
        got = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([LENGTH - 3, 2, 1], 1)], 1)
        evicting = ag.EvictionCache(model, "h2o", 0.5)
        model.generate(ids, past_key_values=evicting, max_new_tokens=2, do_sample=False)
    except UserError:
        return "refused"
    return "served" if float((got - own).abs().max()) <= bound else "wrong"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_type_of_transformers_is_served_right_or_refused() -> None:
    found: dict[str, str] = {}
    for name in TYPES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = comes_of(name)
            except Exception as error:  # every one is named at the end
                found[name] = f"{type(error).__name__}: {error}"[:200]
    strange = {name: said for name, said in found.items() if said not in ("untried", "refused", "served")}
    assert strange == {}
    assert {"served", "refused"} & set(found.values())  # some of them run


def write() -> None:
    """Write the columns of the transformers that runs anew, and keep what stands before the table."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    head = f"| `model_type` | {' | '.join(COLUMNS)} | under {OLDEST} |\n|---|{'---|' * (len(COLUMNS) + 1)}\n"
    before, known, lines = PAGE.read_text(encoding="utf-8").partition("| `model_type`")[0], rows_of_page(), []
    for name in ARCHITECTURES:
        *newest, oldest = known.get(name, [""] * (len(COLUMNS) + 1))
        newest, oldest = (newest, last_cell(name, newest)) if HERE == OLDEST else (cells(outcome(name)), oldest)
        lines.append(f"| `{name}` | {' | '.join([*newest, oldest])} |")
        print(lines[-1], flush=True)
    PAGE.write_text(before + head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
