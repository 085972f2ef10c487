"""What only a CUDA device can show; the rest of the suite covers the same code on CPU."""

import pytest
import torch
from gates_for import gates_for

import ag
from ag.kernels.gated_attention.chunked import chunked_gated_attention
from ag.kernels.gated_attention.reference import reference_gated_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=str)
def test_gated_attention_and_its_gradients(dtype, bound):
    torch.manual_seed(0)
    shapes = [(2, 6, 301, 64), (2, 2, 301, 64), (2, 2, 301, 64)]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    tensors.append((torch.rand(2, 2, 301, device="cuda") > 0.5).float())
    valid = torch.ones(2, 301, dtype=torch.bool, device="cuda")
    valid[1, :40] = False
    options = {"key_valid": valid, "scaling": 0.125, "recent": 5, "sinks": 3, "window": 200}
    weight = torch.randn(2, 6, 301, 64, device="cuda").to(dtype)

    def run(function, arguments):
        arguments = [x.clone().requires_grad_() for x in arguments]
        out = function(*arguments, **options)
        (out * weight.to(out.dtype)).sum().backward()
        return [out, *(x.grad for x in arguments)]

    got = run(chunked_gated_attention, tensors)
    want = run(reference_gated_attention, [x.double() for x in tensors])
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_generates_the_text_of_single_prompts(tiny_llama, dtype):
    model = tiny_llama().to("cuda", dtype)
    ag.attach(model, gates_for(model, scope="prompt"))
    row = torch.randint(3, 128, (1, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    ids = torch.cat([row, torch.cat([torch.zeros_like(row[:, :9]), row[:, 9:]], 1)])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = ag.EvictionCache(model, "gates")
    text = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    alone = ag.EvictionCache(model, "gates")
    single = model.generate(row[:, 9:], past_key_values=alone, max_new_tokens=8, do_sample=False)
    kept = [[head.tolist() for head in heads] for heads in cache.kept_positions(1)]
    assert 0 < cache.kept_share() < 1
    if dtype == torch.float32:  # in bf16 a flag near the threshold may differ between batches
        assert text[1, 40:].tolist() == single[0, 31:].tolist()
        assert [[p - 9 for p in head] for head in kept[1]] == [h.tolist() for h in alone.kept_positions(1)[0]]


def test_evicted_memory_is_free_on_the_device(tiny_llama):
    model = tiny_llama(max_position_embeddings=40_000).to("cuda")
    gates = gates_for(model)
    ids = torch.randint(3, 128, (1, 30_000), device="cuda")
    held = {}
    for name in ("full", "gates"):
        if name == "gates":
            ag.attach(model, gates)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = ag.EvictionCache(model, name)
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        bookkeeping = 6 * cache.kept_share() * ids.numel() * 6  # ranks and marks, 5 bytes a token and head
        held[name] = torch.cuda.memory_allocated() - before
        assert cache.nbytes <= held[name] <= cache.nbytes * 1.05 + bookkeeping + 1e6
        share = cache.kept_share()
    assert 0.05 < share < 0.95
    assert held["gates"] < held["full"] * (share + 0.1)
