"""A pass under an interceptor reaches every layer once and changes nothing for others, or is refused in words."""

import copy
import logging
import threading
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, GenerationConfig, Phi3Config, Phi3ForCausalLM
from transformers.models.doge import DogeConfig, DogeForCausalLM
from transformers.utils import logging as transformers_logging

import ag
from ag.engine.decode import decode
from ag.engine.prompt import read_prompt
from ag.engine.step_runner import StepRunner
from ag.errors import UserError
from ag.evaluate.tasks.follow import feed
from ag.model.decoder_pass import IGNORED_KWARGS
from ag.model.interceptor import cache_argument
from ag.model.products import thread_state
from ag.model.structure import UnsupportedModelError, decoder_of
from tests.support.batches import read, row
from tests.support.bounds import hold, of_logits
from tests.support.gates_for import gates_for
from tests.support.refused import refuses
from tests.support.shapes import shaped

IDS = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@torch.no_grad()
def logits(model, ids, cache=None, **options):
    given = {} if cache is None else {"past_key_values": cache}
    return model(ids, **given, **options).logits


# ---- threads


@torch.no_grad()
def answer(model, cache, seed):
    """The logits of a prompt and of twelve steps, each of the token that follows the last."""
    out = [logits(model, row(40, seed)[None], cache)[:, -1:]]
    for _ in range(12):
        out.append(logits(model, out[-1].argmax(-1), cache))
    return torch.cat(out, 1)


@pytest.mark.slow
@pytest.mark.nightly
def test_threads_share_a_model(tiny_llama):
    """Two eviction caches, a cache of transformers, and a pass that records gradients."""
    model = tiny_llama(num_hidden_layers=8)

    def caches():
        return ag.EvictionCache(model, "tova", 20, "every"), ag.EvictionCache(model, "full"), DynamicCache()

    model.requires_grad_(True)
    wanted = [answer(model, cache, seed) for seed, cache in enumerate(caches())]
    weight = model.model.layers[0].mlp.up_proj.weight

    def gradient():
        return torch.autograd.grad(model(row(1, 9)[None], use_cache=False).logits.square().sum(), weight)[0]

    slope, found, wrong = gradient(), [[], [], []], []

    def answers(place):
        for _ in range(6):
            found[place].append(answer(model, caches()[place], place))

    def gradients():
        for _ in range(60):
            wrong.append(not torch.equal(gradient(), slope))

    threads = [threading.Thread(target=answers, args=(place,)) for place in range(3)]
    threads.append(threading.Thread(target=gradients))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for want, got in zip(wanted, found, strict=True):
        assert [torch.equal(want, one) for one in got] == [True] * 6
    assert wrong == [False] * 60


# ---- every layer attends once


def test_a_layer_that_attends_by_itself_is_named(tiny_llama):
    """As where a model drops the cache from its arguments on the way."""
    model = tiny_llama()
    name = cache_argument(type(model))
    cache = ag.EvictionCache(model, "full")

    def forget(module, args, kwargs):
        return args, kwargs | {name: None}

    handle = model.model.layers[1].register_forward_pre_hook(forget, with_kwargs=True)
    with refuses(UnsupportedModelError, "layer 1", "LlamaAttention"):
        logits(model, IDS, cache)
    handle.remove()
    with refuses(UserError, "cache.reset()"):
        logits(model, IDS, cache)


def test_a_mask_of_its_own_is_refused():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128}
    model = DogeForCausalLM(DogeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    with refuses(UnsupportedModelError, "DogeAttention", "mask"):
        logits(model, IDS, ag.EvictionCache(model, "full"))


def test_an_argument_that_changes_attention_is_refused(tiny_llama):
    model = tiny_llama()
    with refuses(UnsupportedModelError, "LlamaAttention", "position_bias"):
        logits(model, IDS, ag.EvictionCache(model, "full"), position_bias=torch.ones(1))


def test_what_is_called_harmless_changes_nothing(tiny_llama):
    """Neither here nor in the model's own attention, which is given it too."""
    model = tiny_llama()
    want, bound = logits(model, IDS), of_logits(model)
    values = {"return_dict": True, "use_cache": True, "logits_to_keep": 0, "cache_position": torch.arange(24)}
    for name in IGNORED_KWARGS - {"dropout", "scaling", "position_ids", "is_causal"}:
        hold(logits(model, IDS, ag.EvictionCache(model, "full"), **{name: values.get(name)}), want, bound, name)


def test_attention_that_is_not_causal_is_refused(tiny_llama):
    model = tiny_llama()
    with refuses(UnsupportedModelError, "LlamaAttention", "is_causal=False"):
        logits(model, IDS, ag.EvictionCache(model, "full"), is_causal=False)
    model = tiny_llama()
    model.model.layers[1].self_attn.is_causal = False
    with refuses(UnsupportedModelError, "layer 1", "LlamaAttention"):
        ag.EvictionCache(model, "full")


# ---- attention functions


@pytest.mark.parametrize("name", ["eager", "flex_attention"])
def test_a_prompt_is_causal_whatever_the_implementation(tiny_llama, name):
    want = logits(tiny_llama(), IDS)
    model = tiny_llama(attn_implementation=name)
    cache = ag.EvictionCache(model, "full")
    hold(logits(model, IDS, cache), want, of_logits(tiny_llama()))  # which flex attention cannot compute


def test_a_function_that_a_user_registered_is_refused(tiny_llama, monkeypatch):
    def mine(module, query, key, value, attention_mask, scaling=None, **_):
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "mine", mine)
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    model.config._attn_implementation = "mine"
    with refuses(UnsupportedModelError, "attn_implementation=mine", "sdpa"):
        logits(model, IDS, cache)


def test_gradient_checkpointing_takes_no_cache(tiny_llama):
    """The model's layers would run without it, and see later tokens; a cache is as it was."""
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    logits(model, IDS[:, :10], cache)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    with refuses(UserError, "gradient checkpointing", "model.eval()"):
        model(IDS[:, 10:], past_key_values=cache)
    model.eval()
    hold(logits(model, IDS[:, 10:], cache), logits(model, IDS)[:, 10:], of_logits(model))


# ---- a cache sees what the model reads


@pytest.fixture
def phi3():
    """A tiny Phi-3 whose RoPE changes behind 32 tokens, where it drops its cache."""
    torch.manual_seed(0)
    factors = [1.0, 1.2, 1.4, 1.6]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": [2 * x for x in factors]}
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    limits = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "sliding_window": None}
    return Phi3ForCausalLM(Phi3Config(**sizes, **heads, **limits, rope_parameters=rope)).eval()


@pytest.mark.parametrize("length", [30, 50])
def test_a_cache_is_used_or_the_model_says_why_not(phi3, length):
    cache = ag.EvictionCache(phi3, "full")
    ids = row(length)[None]
    crossing = length <= 32
    with refuses(UserError, "Phi3Model", "cache.reset()") if crossing else nullcontext():
        text = phi3.generate(ids, past_key_values=cache, **GREEDY)
    if not crossing:
        assert cache.seen_tokens == length + 5
        assert torch.equal(text, phi3.generate(ids, **GREEDY))


@pytest.mark.parametrize("turn", ["prompt", "step"])
def test_a_pass_that_was_broken_off_is_not_gone_on_from(tiny_llama, turn):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "tova", 20, "every")
    texts = {"prompt": [IDS], "step": [IDS, IDS[:, :1]]}[turn]
    for part in texts[:-1]:
        logits(model, part, cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, texts[-1], cache)
    handle.remove()
    for use in (
        lambda: logits(model, IDS[:, :1], cache),
        lambda: model.generate(IDS, past_key_values=cache, **GREEDY),
        lambda: cache.crop(-1),
        lambda: cache.save("never"),
    ):
        with refuses(UserError, "EvictionCache", "cache.reset()"):
            use()
    assert cache.rewind(IDS) == 0  # which reads the text anew
    want = answer(model, ag.EvictionCache(model, "tova", 20, "every"), 1)
    assert torch.equal(answer(model, cache, 1), want)
    assert not thread_state.products and not thread_state.norms


def test_a_tuple_ends_a_pass_as_well(tiny_llama):
    model = tiny_llama()
    one, other = (ag.EvictionCache(model, "h2o", 0.25) for _ in range(2))
    with torch.no_grad():
        want = model.model(IDS, past_key_values=one).last_hidden_state
        got = model.model(IDS, past_key_values=other, return_dict=False)
    assert isinstance(got, tuple) and torch.equal(got[0], want) and other.kept_share() == one.kept_share()


# ---- what is refused at the call


def test_what_a_pass_cannot_give_is_refused(tiny_llama):
    model = tiny_llama(attn_implementation="eager")
    cache = ag.EvictionCache(model, "full")
    for given, named in (
        ({"output_attentions": True}, "output_attentions=True"),
        ({"use_cache": False}, "use_cache=False"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, "[1, 1, 24, 24]"),
    ):
        with refuses(UserError, named):
            logits(model, IDS, cache, **given)
    model.config.output_attentions = True
    with refuses(UserError, "output_attentions=True"):
        logits(model, IDS, cache)
    model.config.output_attentions = False
    assert cache.seen_tokens == 0 and logits(model, IDS, cache).shape == (1, 24, 128)


@torch.no_grad()
def test_router_logits_of_a_prompt_that_is_read_in_parts_are_refused():
    """A loss would be computed from those of the last part."""
    model, ids = shaped("mixtral"), row(24)[None]
    want = model(ids, output_router_logits=True).router_logits
    got = model(ids, output_router_logits=True, past_key_values=ag.EvictionCache(model, "full")).router_logits
    assert [x.shape for x in got] == [x.shape for x in want]
    cache = ag.EvictionCache(model, "h2o", 8, "blocks:8")
    with refuses(UserError, "output_router_logits=False", "blocks"):
        model(ids, output_router_logits=True, past_key_values=cache)
    cache.reset()
    assert model(ids, past_key_values=cache).logits.shape[1] == 24


def test_weights_in_another_type_are_refused_in_words(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", 10)
    logits(model, IDS, cache)
    model.bfloat16()
    with refuses(UserError, "torch.float32", "torch.bfloat16", "cache.reset()"):
        logits(model, IDS[:, :1], cache)
    model.float()
    with refuses(UserError, "torch.bfloat16", "cache.reset()"), torch.autocast("cpu", torch.bfloat16):
        logits(model, IDS[:, :1], cache)
    assert logits(model, IDS[:, :1], cache).dtype == torch.float32
    cache.reset()
    assert logits(model.bfloat16(), IDS, cache).dtype == torch.bfloat16


def test_inference_mode_is_kept_or_refused_in_words(tiny_llama):
    model = tiny_llama()
    cache, want = ag.EvictionCache(model, "h2o", 10), answer(model, ag.EvictionCache(model, "h2o", 10), 3)
    with torch.inference_mode():
        assert torch.equal(answer(model, cache, 3), want)
    with refuses(UserError, "torch.inference_mode()", "torch.no_grad()"):
        logits(model, IDS, cache)
    cache.reset()
    assert torch.equal(answer(model, cache, 3), want)


@pytest.mark.parametrize("case", ["made", "reset", "in one pool", "loaded"])
def test_a_cache_is_used_outside_of_inference_mode_too(tiny_llama, tmp_path, case):
    """Texts of more blocks than a pool counts at first."""
    model = tiny_llama()
    pool, long = ag.Pool(model, 2**22), IDS[:1].repeat(1, 40)
    with torch.inference_mode(case == "made"):
        cache = ag.EvictionCache(model, "h2o", 10, pool=pool)
    with torch.inference_mode():
        first = cache if case == "reset" else ag.EvictionCache(model, "full", pool=pool)
        logits(model, long, first)
    if case == "reset":
        cache.reset()
    with torch.no_grad():
        logits(model, long, cache)
        want = logits(model, IDS[:1, :1], copy.deepcopy(cache))
        if case == "loaded":
            cache.save(tmp_path / "cache")
            with torch.inference_mode():
                cache = ag.EvictionCache.load(tmp_path / "cache", model)
        assert torch.equal(logits(model, IDS[:1, :1], cache), want)


def test_a_pool_that_closed_up_in_inference_mode_is_used_outside_of_it(tiny_llama, monkeypatch):
    monkeypatch.setattr("ag.engine.block_pool.RESERVES", False)
    model = tiny_llama()
    cache, want = ag.EvictionCache(model, "h2o", 10), logits(model, IDS, ag.EvictionCache(model, "h2o", 10))
    with torch.inference_mode():
        logits(model, row(400)[None], cache)
    cache.reset()
    assert torch.equal(logits(model, IDS, cache), want)


def test_a_refused_pass_leaves_the_cache_outside_of_inference_mode(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    with torch.no_grad():
        logits(model, IDS, cache)
        with torch.inference_mode(), refuses(UserError, "attention_mask", "(1, 7)"):
            model(IDS[:, :1], attention_mask=torch.ones(1, 7), past_key_values=cache)
        logits(model, IDS[:, :1], cache)


@torch.no_grad()
def test_a_refused_crop_leaves_the_cache_outside_of_inference_mode(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "h2o", 10)
    logits(model, IDS, cache)
    with torch.inference_mode(), refuses(UserError, "crop at most 0"):
        cache.crop(-5)
    logits(model, IDS[:, :1], cache)


CHANGED = {
    "copied": lambda cache: copy.deepcopy(cache),
    "cropped": lambda cache: cache.crop(-2),
    "selected": lambda cache: cache.batch_select_indices([0]),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_under_inference_mode_goes_on_there(tiny_llama, name):
    model = tiny_llama()
    cache, want = (ag.EvictionCache(model, "full") for _ in range(2))
    for each in (cache, want):
        logits(model, IDS, each)
    with torch.inference_mode():
        cache = CHANGED[name](cache) or cache
    CHANGED[name](want)
    with refuses(UserError, "copied or cropped under torch.inference_mode()", "torch.no_grad()"):
        logits(model, IDS[:, :1], cache)
    with torch.inference_mode():
        assert torch.equal(logits(model, IDS[:, :1], cache), logits(model, IDS[:, :1], want))


@torch.no_grad()
def test_caches_that_were_read_in_other_types_are_not_added(tiny_llama):
    model = tiny_llama()
    pool = ag.Pool(model, 2**22)
    one, other = (ag.EvictionCache(model, "full", pool=pool) for _ in range(2))
    logits(model, IDS, one)
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, IDS, other)
    with refuses(UserError, "add", "data types", "one type"):
        one.add(other)
    assert logits(model, IDS[:, :1], one).isfinite().all()


def test_adapters_that_put_something_before_the_text_are_refused(tiny_llama):
    base = tiny_llama()
    cache = ag.EvictionCache(base, "full")
    for kind, made in {"PREFIX_TUNING": PrefixTuningConfig, "PROMPT_TUNING": PromptTuningConfig}.items():
        model = get_peft_model(base, made(task_type="CAUSAL_LM", num_virtual_tokens=4))
        with refuses(UserError, kind, "LoRA"):
            ag.EvictionCache(model, "full")
        with refuses(UserError, kind, "LoRA"):
            model.generate(IDS, past_key_values=cache, **GREEDY)


def test_what_the_recorded_loop_does_not_do_is_refused(tiny_llama):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    for given, named in (
        ({"inputs": IDS, "past_key_values": cache, "num_beams": 2}, "num_beams"),
        ({"inputs": IDS, "past_key_values": cache, "prompt_lookup_num_tokens": 2}, "assisted_generation"),
        ({"inputs_embeds": model.get_input_embeddings()(IDS), "past_key_values": cache}, "inputs_embeds"),
        ({"inputs": IDS}, "ag.EvictionCache"),
    ):
        with refuses(UserError, "custom_generate=decode", named):
            model.generate(custom_generate=decode, **GREEDY, **given)


# ---- names


@contextmanager
def nothing_deprecated():
    """Expect no warning and no line of transformers' log that calls something deprecated."""
    said, logger = [], logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
    assert [line for line in [*said, *(str(one.message) for one in caught)] if "deprecated" in line] == []


@pytest.mark.parametrize(("name", "what"), [("past_key_values", "model"), ("cache", "decoder"), ("cache", "adapted")])
def test_a_pass_takes_a_cache_under_either_name(tiny_llama, name, what):
    model = tiny_llama()
    cache, called = ag.EvictionCache(model, "full"), decoder_of(model) if what == "decoder" else model
    if what == "adapted":
        called = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        want = called(input_ids=IDS)[0]
        with nothing_deprecated():
            got = torch.cat([called(input_ids=part, **{name: cache})[0] for part in IDS.split([15, 9], 1)], 1)
    hold(got, want, of_logits(tiny_llama()))
    assert cache.seen_tokens == 24


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("past_key_values", {}),
        ("cache", {"num_beams": 2}),
        ("cache", {"custom_generate": decode}),
        ("past_key_values", {"prefill_chunk_size": 8}),
    ],
)
def test_generate_takes_a_cache_under_either_name(tiny_llama, name, how):
    model = tiny_llama()
    cache = ag.EvictionCache(model, "full")
    with nothing_deprecated():
        text = model.generate(IDS, **{name: cache}, **how, **GREEDY)
    assert cache.seen_tokens == 29
    beams = {"num_beams": 2} if "num_beams" in how else {}
    assert torch.equal(text, model.generate(IDS, **beams, **GREEDY))


def test_generate_takes_its_settings_without_a_name(tiny_llama):
    """Its second argument says which token is padding."""
    model, pad = tiny_llama(), 127
    ids = torch.cat([torch.full((1, 3), pad), IDS[IDS.ne(pad)][None]], 1)
    settings = GenerationConfig(pad_token_id=pad, eos_token_id=2, **GREEDY)
    cache = ag.EvictionCache(model, "full")
    assert torch.equal(model.generate(ids, settings, past_key_values=cache), model.generate(ids, settings))


def test_what_this_library_calls_is_not_deprecated(tiny_llama):
    """The passes of a prompt read for several policies, of a repetition, of steps and of answers."""
    model = tiny_llama()
    ag.attach(model, gates_for(model))
    name = cache_argument(type(model))
    with nothing_deprecated(), torch.no_grad():
        for cache, _ in read_prompt(model, ["full", ag.policy("kvzip", 0.5), ag.policy("gates")], IDS):
            StepRunner(model, cache)(IDS[:, :1])
            feed(model, cache, IDS[:, 1:4])
            assert cache.seen_tokens == 28
        out = model(IDS, **{name: ag.EvictionCache(model, "full")})
        assert name in out and isinstance(out[name], ag.EvictionCache)


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.nightly
def test_a_compiled_model_takes_a_cache(tiny_llama):
    """One that ran before the cache came, too."""
    model, plain = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    logits(compiled, IDS)
    cache = ag.EvictionCache(compiled, "snapkv", 12)
    want = read(plain, IDS, "snapkv", 12)
    hold(logits(compiled, IDS, cache), logits(plain, IDS), of_logits(plain))
    assert cache.kept_positions(0)[0][0].tolist() == want.kept_positions(0)[0][0].tolist()
    torch._dynamo.reset()
