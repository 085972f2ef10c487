"""Prompts in vLLM give the tokens of `ag.EvictionCache`, however vLLM reads, shares and takes back their blocks."""

import json
from dataclasses import asdict

import pytest

from ag.config.choice import Choice
from tests.vllm.conftest import TOKENS, prompts_of

pytest.importorskip("vllm", reason="needs vLLM: bash scripts/vllm_env.sh test")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def differing(prompts, got, reference, **options):
    """Lengths of the prompts, of those that vLLM evicts from, with other tokens than the reference."""
    pairs = [(p, g) for p, g in zip(prompts, got, strict=True) if len(p) > 128]
    assert len(pairs) > 2
    return [len(p) for p, g in pairs if g != reference(p, **options)]


def all_free(llm):
    free, blocks = llm.blocks
    return free == blocks


def test_batch_and_what_a_request_leaves(engine, prompts, reference):
    with engine() as llm:
        assert differing(prompts, llm.tokens(prompts), reference) == []
        assert llm.most_running == len(prompts) and all_free(llm)
        llm.core.step()  # by which the worker hears of the end
        assert llm.builder.packed == llm.builder.prompts == {}


def test_chunks_beside_answers(engine, prompts, reference):
    with engine(max_num_batched_tokens=128) as llm:
        assert differing(prompts, llm.tokens(prompts), reference) == []


@pytest.mark.parametrize("shares", [False, True])
def test_preemption(engine, reference, shares):
    """Answers grow until blocks lack: a request gives its own back, and reads its prompt and its answer again."""
    chosen, count = prompts_of([140] * 4, seed=1), 110
    with engine(
        num_gpu_blocks_override=25, max_num_batched_tokens=512, max_model_len=272, enable_prefix_caching=shares
    ) as llm:
        assert differing(chosen, llm.tokens(chosen, count), reference, count=count) == []
        assert llm.preempted and all_free(llm)


@pytest.mark.parametrize("blocks", [None, 70])
def test_shared_prefixes_cold_and_warm(engine, prompts, reference, blocks):
    """The second time the prompts' blocks are found, with the logits that the gates gave the first time."""
    with engine(
        enable_prefix_caching=True, num_gpu_blocks_override=blocks, max_num_batched_tokens=256, max_model_len=560
    ) as llm:
        for _ in range(2):
            assert differing(prompts, llm.tokens(prompts), reference) == []
        assert all_free(llm)
        longer = [p + p[:100] for p in prompts[1:4]]  # begin with blocks that other requests read
        assert differing(longer, llm.tokens(longer), reference) == []


def test_several_answers_to_a_prompt(engine, prompts, reference):
    with engine(enable_prefix_caching=True) as llm:
        chosen = prompts[1:5]
        greedy = [[list(x.token_ids) for x in out.outputs] for out in llm.outputs(chosen, n=1)]
        assert differing(chosen, [x[0] for x in greedy], reference) == []
        several = llm.outputs(chosen, n=3, temperature=1.0, seed=1, prompt_logprobs=1)
        answers = [[tuple(x.token_ids) for x in out.outputs] for out in several]
        assert all(len(set(x)) == 3 for x in answers)
        assert [len(out.prompt_logprobs) for out in several] == [len(x) for x in chosen]


def test_schema(engine, prompts):
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"b": {"enum": ["x", "y"]}}, "required": ["b"]}
    schema["additionalProperties"] = False
    with engine() as llm:
        constraint = StructuredOutputsParams(json=schema)
        found = llm.outputs(prompts[1:4], 40, structured_outputs=constraint, ignore_eos=False, min_tokens=0)
    texts = ["".join(out.outputs[0].text.split()) for out in found]  # a small model likes blank lines
    assert all(text.rstrip("}") in ('{"b":"x"', '{"b":"y"') for text in texts), texts
    ended = [out.outputs[0].text for out in found if out.outputs[0].finish_reason == "stop"]
    assert ended and all(json.loads(text)["b"] in ("x", "y") for text in ended)


def test_abort_while_a_prompt_is_read_and_behind_it(engine, prompts, reference):
    from vllm import SamplingParams

    with engine(max_num_batched_tokens=150) as llm:
        requests = llm.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
        for name, prompt in zip("abc", prompts[-3:], strict=True):
            requests.add_request(name, {"prompt_token_ids": prompt}, params)
        requests.step()
        requests.abort_request(["b"])  # has read nothing, or a part
        for _ in range(6):
            requests.step()
        requests.abort_request(["a"])  # answers
        done = []
        while requests.has_unfinished_requests():
            done += [x for x in requests.step() if x.finished and x.outputs[0].finish_reason == "length"]
        assert [x.request_id for x in done] == ["c"] and all_free(llm)
        assert list(done[0].outputs[0].token_ids) == reference(prompts[-1])
        assert all(x.startswith("c") for x in llm.builder.packed)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("gates:smollm2@uniform", {"budget": 0.3}),
        ("gates:smollm2", {"budget": 100}),
        ("gates:smollm2", {"budget": 0.4, "sinks": 2, "recent": 20}),
        ("knorm", {"budget": 0.5}),
        ("keydiff", {"budget": 0.5, "recent": 8}),
        ("streaming_llm", {"budget": 0.4}),
        ("random", {"budget": 0.5, "seed": 3}),
    ],
)
def test_other_policies(engine, prompts, reference, policy, options):
    with engine(ag={"policy": policy, **options}, max_num_batched_tokens=512) as llm:
        assert differing(prompts, llm.tokens(prompts), reference, policy=policy, **options) == []


def test_what_ag_choose_wrote(engine, prompts, reference, smollm2, tmp_path):
    """The file is read when the engine starts, and its folder may then go."""
    chosen = Choice(str(smollm2), "keydiff", 0.4, options={"sinks": 6})
    file = tmp_path / "choice.json"
    file.write_text(json.dumps({"choice": asdict(chosen)}))
    with engine(ag={"choice": str(file)}) as llm:
        file.unlink()
        assert differing(prompts, llm.tokens(prompts), reference, policy="keydiff", budget=0.4, sinks=6) == []


def test_protected_prompt(engine, prompts, reference):
    from vllm.exceptions import VLLMValidationError

    with engine(enable_prefix_caching=True) as llm:
        chosen = prompts[1:5]
        free = llm.tokens(chosen)
        got = llm.tokens(chosen, extra_args={"ag_protect": 70})
        assert differing(chosen, got, reference, protected=70) == []
        assert got != free
        whole = llm.tokens(chosen, extra_args={"ag_protect": 10_000})
        assert whole == [reference(p, policy="full", budget=None) for p in chosen]
        with pytest.raises(VLLMValidationError, match="ag_protect"):
            llm.tokens(chosen[:1], extra_args={"ag_protect": -1})


def test_larger_blocks(engine, prompts, reference):
    """In these a token's key lies in another order of numbers."""
    with engine(block_size=32) as llm:
        got = llm.tokens(prompts)
    longest = [(p, g) for p, g in zip(prompts, got, strict=True) if len(p) > 256]
    assert len(longest) == 2 and all(g == reference(p) for p, g in longest)


def test_compiled(engine, prompts, reference):
    with engine(enforce_eager=False) as llm:
        assert differing(prompts, llm.tokens(prompts), reference) == []


def test_plain_engine_beside_ours(engine, prompts, reference):
    """An engine without settings is vLLM's own, in a process that had one with settings."""
    with engine(ag=None, block_size=32) as llm:
        assert type(llm.scheduler).__module__.startswith("vllm.")
        got = llm.tokens(prompts[:3])
    assert got == [reference(p, policy="full", budget=None) for p in prompts[:3]]


def test_drafts_from_the_text(engine, prompts, reference):
    """The last test here: what drafts load makes vLLM fail to start another engine in this process."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with engine(speculative_config=drafts) as llm:
        assert differing(prompts, llm.tokens(prompts), reference) == []
