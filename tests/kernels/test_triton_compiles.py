"""The Triton kernels compile to machine code of two cards, from the very calls that launch them; no GPU is needed.

Of the shapes of tiles that are timed, those are compiled up to the first that fits the card; one must. Triton keeps on
disk what it compiled, so that it does so once.
"""

import os
import re
from functools import partial

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
triton = pytest.importorskip("triton", reason="needs Triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from ag.kernels.attention_stats.triton import attention_stats  # noqa: E402
from ag.kernels.gated_attention.masks import Masks  # noqa: E402
from ag.kernels.gated_attention.triton import gated_attention  # noqa: E402
from ag.kernels.gated_prefill.triton import gated_prefill  # noqa: E402
from ag.kernels.kv_append.triton import kv_append  # noqa: E402
from ag.kernels.kv_compact.triton import kv_compact  # noqa: E402
from ag.kernels.paged_attention import triton as paged  # noqa: E402
from ag.kernels.pages import Pages  # noqa: E402
from ag.kernels.softmax import PLAIN, Softmax  # noqa: E402
from tests.support.paged import coded  # noqa: E402

SHARED = {89: 99, 90: 227}  # KiB of shared memory that a block may take


class Card:
    """What Triton's compiler asks a driver; nothing can be launched on it."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return -self.arch

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(request, monkeypatch):
    """Make launches compile instead; maps the kernels' names to what the compiler says of each shape."""
    seen, arch = {}, request.param

    def compile_only(function, *arguments, **shape):
        kernel = function.run(*arguments, grid=(1,), warmup=True, **shape)
        seen.setdefault(function.__name__, []).append(kernel)
        assert kernel.asm["cubin"]
        ptx = kernel.asm["ptx"]
        # of a float32 product three are made, of the operands' two parts
        assert len(re.findall(r"mma[^;]*\.tf32", ptx)) % 3 == 0 and ("cvt.rna.tf32" in ptx) == (".tf32.tf32" in ptx)
        return kernel.metadata.shared <= SHARED[arch] * 1024

    def compile_timed(self, *arguments, grid, warmup):
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        shapes = self.prune_configs({})
        assert any(compile_only(self.fn, *arguments, **x.all_kwargs()) for x in shapes), self.fn.__name__

    def compile_plain(function, *arguments, **shape):
        assert compile_only(function, *arguments, **shape), function.__name__

    monkeypatch.setattr(Autotuner, "run", compile_timed)
    monkeypatch.setattr(type(paged._combine), "__getitem__", lambda function, grid: partial(compile_plain, function))
    driver.set_active(Card(arch))
    yield seen
    driver._active = None


def draw(heads, dim, dtype=torch.bfloat16, length=300):
    return torch.randn(2, length, heads, dim).to(dtype).transpose(1, 2).requires_grad_()


def cases(*rows):
    """Parametrize a test by card, head size, type and whether every mask is given: the first row by day."""
    marked = []
    for row in rows:
        name = "-".join(map(str, ("sm", *row)))
        marked.append(pytest.param(*row, marks=pytest.mark.nightly if marked else (), id=name))
    return pytest.mark.parametrize(("compiled", "dim", "dtype", "masked"), marked, indirect=["compiled"])


HALF, WHOLE = torch.bfloat16, torch.float32
#: Each of two forms of a call meets every card, head size and type.
EVERY = [(90, 128, HALF, True), (89, 128, HALF, False), (89, 256, HALF, True), (90, 256, HALF, False)]
EVERY += [(89, 128, WHOLE, True), (90, 256, WHOLE, False)]


@pytest.mark.slow
@cases(*EVERY, (89, 128, HALF, True), (90, 256, WHOLE, True), (90, 60, torch.float16, False), (90, 64, WHOLE, None))
def test_gated_attention_compiles(compiled, dim, dtype, masked):
    keep = None if masked is None else torch.rand(2, 2, 300, requires_grad=True)
    masks, q, k, v = Masks(), draw(4, dim, dtype), draw(2, dim, dtype), draw(2, dim, dtype)
    if masked:
        first = torch.arange(300).expand(2, -1) // 70 * 70
        masks = Masks(torch.ones(2, 300, dtype=torch.bool), 4, 4, 100, torch.tensor([3, 4]), first)
    sinks = Softmax(None, torch.zeros(4, dtype=dtype)) if masked else PLAIN
    gated_attention(q, k, v, keep, masks, 0.1, sinks).sum().backward()
    assert set(compiled) == {"_forward", "_backward_queries", "_backward_keys"}
    assert all("mma" in kernel.asm["ptx"] for kernels in compiled.values() for kernel in kernels)


@pytest.mark.slow
@cases(*EVERY)
def test_attention_stats_compile(compiled, dim, dtype, masked):
    q, k, token_indices = draw(4, dim, dtype).detach(), draw(2, dim, dtype).detach(), torch.arange(300).expand(2, -1)
    given = {"window": 100, "skip": 4, "softmax": Softmax(50.0, torch.zeros(4))} if masked else {}
    for kind in ("max", "squares") if masked else ("sum",):
        attention_stats(kind, q, k, token_indices, token_indices[:, None], 0.1, **given)
    assert set(compiled) == {"_row_sums", "_columns"}


@pytest.mark.slow
@cases(*EVERY)
def test_gated_prefill_compiles(compiled, dim, dtype, masked):
    q, k, v = (draw(heads, dim, dtype).detach() for heads in (4, 2, 2))
    masks = Masks(torch.ones(2, 300, dtype=torch.bool), 3, 3, 100) if masked else Masks()
    sinks = Softmax(None, torch.zeros(4, dtype=dtype)) if masked else PLAIN
    gated_prefill(q, k, v, torch.rand(2, 2, 300) > 0.5, masks, 0.1, sinks)
    assert set(compiled) == {"_prefill"}


def in_pages(dim, dtype):
    """Four rows of two pages each."""
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    columns = (torch.randn(8, 16, dim).to(dtype), torch.randn(8, 16, dim).to(dtype), torch.zeros(8, 16).int())
    return Pages(*columns, torch.zeros(8, 16).bool(), table, torch.tensor([3, 0, 31, 16], dtype=torch.int32))


@pytest.mark.slow
@cases(*EVERY)
def test_paged_attention_compiles(compiled, dim, dtype, masked):
    """One query that sees all and is weighed, and several behind masks, beside sinks; of numbers and of codes."""
    q, token_indices, softmax = torch.randn(2, 4, 50, dim).to(dtype), torch.arange(50).expand(2, -1), PLAIN
    if masked:
        softmax = Softmax(50.0, torch.zeros(4, dtype=dtype))
    for pages in (in_pages(dim, dtype), coded(in_pages(dim, dtype))):
        paged.paged_attention(q[:, :, :1], pages, None, 0.1, softmax=softmax, weigh=True)
        paged.paged_attention(q, pages, token_indices, 0.1, *((20, 4) if masked else ()), softmax=softmax)
    assert set(compiled) == {"_attend", "_combine"}


@pytest.mark.slow
@cases((90, 128, HALF, True), (89, 60, HALF, False), (90, 256, WHOLE, False))
def test_kv_append_compiles(compiled, dim, dtype, masked):
    x, pages = torch.randn(2, 2, 50, dim).to(dtype), in_pages(dim, dtype)
    pages = coded(pages) if masked else pages
    kv_append(pages, x, x, torch.arange(50).expand(2, -1))
    kv_append(pages, x[:, :, :1], x[:, :, :1], torch.tensor([[7], [-1]]), torch.ones(2, 2, 1).bool())
    kv_append(pages._replace(gate=pages.gate.float()), x, x, torch.arange(50).expand(2, -1))
    assert set(compiled) == {"_append"}


@pytest.mark.slow
@cases((90, 128, HALF, True), (89, 60, HALF, True), (90, 256, WHOLE, True))
def test_kv_compact_compiles(compiled, dim, dtype, masked):
    keep_count, records = torch.ones(4).int(), [torch.zeros(4, 3, 32)]
    for nonfinite in (None, torch.zeros(4).int()):
        kv_compact(in_pages(dim, dtype), torch.randn(2, 2, 32), keep_count, records, nonfinite)
    assert set(compiled) == {"_plan_moves", "_move", "_move_records"}
