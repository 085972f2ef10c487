"""The Triton kernels compile to machine code of two cards, from the very calls that launch them; no GPU is needed.

Every configuration of the table is compiled as a call under flags needs it, and the first of each entry under other
masks: it must fit the card and spill no register. One in float32 that two cards share is compiled for one of them: its
tiles have fewer rows than the instructions of sm_90 take, so that both get the same code. Triton keeps on disk what it
compiled, so that it does so once.
"""

import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)
triton = pytest.importorskip("triton", reason="needs Triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from ag.kernels.column_max.triton import triton_column_max  # noqa: E402
from ag.kernels.column_sums.triton import triton_column_sums  # noqa: E402
from ag.kernels.configurations import CONFIGURATIONS, SHARED  # noqa: E402
from ag.kernels.gated_attention.triton import triton_gated_attention  # noqa: E402
from ag.kernels.gated_prefill.triton import triton_gated_prefill  # noqa: E402
from ag.kernels.paged_attend.triton import triton_paged_attend  # noqa: E402
from ag.kernels.paged_decode import triton as paged  # noqa: E402
from ag.kernels.pages import New, Pages, Reach  # noqa: E402
from ag.kernels.pool_append.triton import triton_pool_append  # noqa: E402
from ag.kernels.row_worst.reference import Going  # noqa: E402
from ag.kernels.row_worst.triton import triton_row_going, triton_row_worst  # noqa: E402
from ag.kernels.softmax import Softmax  # noqa: E402
from ag.kernels.tuned import Tuned  # noqa: E402
from tests.support.paged import coded  # noqa: E402

COMPILER = "3.9"  # of the table: another Triton allots registers in another way
WARPGROUP = 64
SLACK = 64  # bytes of a thread that gated attention may keep on its stack under several masks
#: Bytes that float32 above a head size of 128 spills, at most, by kernel.
WIDE = {"_forward": 128, "_prefill": 128, "_split": 64, "_backward_queries": 256, "_backward_keys": 1280}
WIDE |= {"_row_sums": 256, "_columns": 0, "_attend": 64}
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


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


def spilled(kernel, folder):
    """Return the bytes of a thread's stack, where registers go that do not fit; nothing else of a kernel lies there."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    said = subprocess.run([TOOL, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:\d+ STACK:(\d+)", said)[1])


class Compiled(dict):
    """Maps the kernels' names to what the compiler says of each configuration, which may spill so many bytes.

    Or of so many of each kernel: the first is what a call takes that is not tuned.
    """

    spill = 0
    most: int | None = None


@pytest.fixture
def compiled(request, monkeypatch, tmp_path):
    """Make launches compile instead."""
    seen, arch = Compiled(), request.param

    def compile_only(function, *arguments, most=SLACK, **shape):
        kernel = function.run(*arguments, grid=(1,), warmup=True, **shape)
        seen.setdefault(function.__name__, []).append(kernel)
        assert kernel.asm["cubin"]
        tiles, ptx = f"{function.__name__} {shape}", kernel.asm["ptx"]
        # of a float32 product three are made, of the operands' two parts
        assert len(re.findall(r"mma[^;]*\.tf32", ptx)) % 3 == 0 and ("cvt.rna.tf32" in ptx) == (".tf32.tf32" in ptx), (
            tiles
        )
        assert kernel.metadata.shared <= SHARED[arch] * 1024, tiles
        if triton.__version__.startswith(COMPILER):
            assert spilled(kernel, tmp_path) <= most, tiles

    def compile_all(self, grid, *arguments):
        q, name = arguments[0], self.kernel.__name__
        most = WIDE[name] if q.dtype == torch.float32 and q.shape[-1] > 128 else seen.spill
        for tiles in self.tiles(arguments)[: seen.most]:
            compile_only(self.kernel, *arguments, most=most, **self.settings(tiles))

    monkeypatch.setattr("ag.kernels.tuned.of_card", lambda device: arch)
    monkeypatch.setattr(Tuned, "__call__", compile_all)
    monkeypatch.setattr(type(paged.combine), "__getitem__", lambda function, grid: partial(compile_only, function))
    driver.set_active(Card(arch))
    yield seen
    driver._active = None


def draw(heads, dim, dtype=torch.bfloat16, length=300):
    return torch.randn(2, length, heads, dim).to(dtype).transpose(1, 2).requires_grad_()


def cases(names, *rows):
    """Parametrize a test by these arguments, after the card that ``compiled`` stands for."""
    ids = ["-".join(map(str, ("sm", *("+".join(sorted(x)) if isinstance(x, set) else x for x in row)))) for row in rows]
    return pytest.mark.parametrize(("compiled", *names), rows, indirect=["compiled"], ids=ids)


HALF, WHOLE = torch.bfloat16, torch.float32
ALL = {"keep", "valid", "window", "dense", "first"}
#: The last says which of two forms of a call is compiled: each meets every card, head size and type.
EVERY = [
    (89, 128, HALF, False),
    (89, 256, HALF, True),
    (90, 128, HALF, True),
    (90, 256, HALF, False),
    (89, 128, WHOLE, True),
    (90, 256, WHOLE, False),
]


def test_what_two_cards_share_in_float32_is_compiled_for_one():
    """Of each kernel; WARPGROUP rows are the least that an instruction of sm_90 takes."""
    for table in CONFIGURATIONS.values():
        for kind, (arch, other) in {"32 bits": (89, 90), "32 bits above 128": (90, 89)}.items():
            assert set(table[kind][other]) <= set(table[kind][arch])
            assert all(tiles.rows < WARPGROUP for tiles in table[kind][arch])


@pytest.mark.slow
@cases(
    ("dim", "dtype", "given"),
    *((*case[:3], {"keep"}) for case in EVERY),
    (89, 128, HALF, ALL),
    (90, 128, HALF, ALL),
    (89, 128, HALF, set()),
    (90, 256, HALF, {"keep", "first"}),
    (90, 256, WHOLE, ALL),
    (90, 60, torch.float16, {"keep"}),
    (90, 64, WHOLE, {"valid"}),
)
def test_gated_attention_compiles(compiled, dim, dtype, given):
    keep = torch.rand(2, 2, 300, requires_grad=True) if "keep" in given else None
    valid = torch.ones(2, 300, dtype=torch.bool) if "valid" in given else None
    window, dense = 100 if "window" in given else None, torch.tensor([3, 4]) if "dense" in given else None
    first = torch.arange(300).expand(2, -1) // 70 * 70 if "first" in given else None
    q, k, v = draw(4, dim, dtype), draw(2, dim, dtype), draw(2, dim, dtype)
    compiled.spill, compiled.most = (0, None) if given == {"keep"} else (SLACK, 1)
    triton_gated_attention(q, k, v, keep, valid, 0.1, 4, 4, window, dense, first).sum().backward()
    assert set(compiled) == {"_forward", "_backward_queries", "_backward_keys"}
    assert all("mma" in kernel.asm["ptx"] for kernels in compiled.values() for kernel in kernels)


@pytest.mark.slow
@cases(("dim", "dtype", "padded"), *EVERY)
def test_column_sums_and_maxima_compile(compiled, dim, dtype, padded):
    q, k = draw(4, dim, dtype).detach(), draw(2, dim, dtype).detach()
    valid = torch.ones(2, 300, dtype=torch.bool)
    triton_column_sums(q, k, 0.1, valid, valid if padded else None, 100, 2, 4, True)
    assert set(compiled) == {"_row_sums", "_columns"}
    compiled.clear()
    triton_column_max(q, k, 0.1, valid, valid, 100)
    assert set(compiled) == {"_row_sums", "_columns"}


@pytest.mark.slow
@cases(("dim", "dtype"), *(case[:3] for case in EVERY))
def test_gated_prefill_compiles(compiled, dim, dtype):
    q, k, v = (draw(heads, dim, dtype).detach() for heads in (4, 2, 2))
    valid = torch.ones(2, 300, dtype=torch.bool)
    triton_gated_prefill(q, k, v, torch.rand(2, 2, 300) > 0.5, valid, 0.1, 3, 3, 100)
    assert set(compiled) == {"_prefill"}


def in_pages(dim, dtype):
    """Four rows of two pages each."""
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    columns = (torch.randn(8, 16, dim).to(dtype), torch.randn(8, 16, dim).to(dtype), torch.zeros(8, 16).int())
    return Pages(*columns, torch.zeros(8, 16).bool(), table, torch.tensor([3, 0, 31, 16], dtype=torch.int32))


@pytest.mark.slow
@cases(("dim", "dtype", "weighed"), *EVERY)
def test_paged_decode_compiles(compiled, dim, dtype, weighed):
    pages = in_pages(dim, dtype)
    q, weights = torch.randn(2, 4, 1, dim).to(dtype), torch.empty(2, 4, 32) if weighed else None
    paged.triton_paged_decode(q, pages, 0.1, weights)
    assert set(compiled) == {"_split", "combine"}


@pytest.mark.slow
@cases(("dtype",), (89, HALF), (90, HALF), (89, WHOLE))
def test_pages_of_codes_compile(compiled, dtype):
    pages, q = coded(in_pages(128, dtype), "int8"), torch.randn(2, 4, 1, 128).to(dtype)
    paged.triton_paged_decode(q, pages, 0.1, torch.empty(2, 4, 32))
    triton_paged_attend(q.expand(-1, -1, 50, -1), pages, torch.arange(50).expand(2, -1), 0.1, 20, 4)
    assert set(compiled) == {"_split", "_attend", "combine"}


@pytest.mark.slow
@cases(("dim", "dtype", "masked"), *EVERY)
def test_paged_attend_compiles(compiled, dim, dtype, masked):
    q, ranks = torch.randn(2, 4, 50, dim).to(dtype), torch.arange(50).expand(2, -1)
    triton_paged_attend(q, in_pages(dim, dtype), ranks, 0.1, *((20, 4) if masked else (None, None)))
    assert set(compiled) == {"_attend", "combine"}


@pytest.mark.slow
@cases(("dim", "dtype"), (90, 64, HALF), (89, 256, HALF), (90, 128, WHOLE))
def test_capped_logits_and_sink_logits_compile(compiled, dim, dtype):
    sinks = torch.zeros(4, dtype=dtype)
    q, pages, ranks = torch.randn(2, 4, 50, dim).to(dtype), in_pages(dim, dtype), torch.arange(50).expand(2, -1)
    paged.triton_paged_decode(q[:, :, :1], pages, 0.1, torch.empty(2, 4, 32), Softmax(50.0, sinks))
    triton_paged_attend(q, pages, ranks, 0.1, 20, 4, Softmax(50.0, sinks))
    assert set(compiled) == {"_split", "_attend", "combine"}
    compiled.clear()
    q, k, v = (draw(heads, dim, dtype) for heads in (4, 2, 2))
    keep = torch.rand(2, 2, 300)
    triton_gated_attention(q, k, v, keep, None, 0.1, softmax=Softmax(None, sinks)).sum().backward()
    triton_gated_prefill(q.detach(), k.detach(), v.detach(), keep > 0.5, None, 0.1, softmax=Softmax(None, sinks))
    assert set(compiled) == {"_forward", "_backward_queries", "_backward_keys", "_prefill"}


@pytest.mark.slow
@cases(("dim", "dtype", "victims", "reach"), (89, 60, HALF, 2, None), (90, 256, WHOLE, 0, Reach(4, 9)))
def test_pool_append_compiles(compiled, dim, dtype, victims, reach):
    x = torch.randn(2, 2, dim).to(dtype)
    gone = torch.full((4, victims), -1, dtype=torch.int32) if victims else None
    new = New(x, x, torch.tensor([7, -1]), torch.ones(2, 2).bool())
    triton_pool_append(in_pages(dim, dtype), new, gone, [torch.zeros(4, 3, 32)], reach)
    assert set(compiled) == {"_append", "_carry"}


@pytest.mark.slow
@cases(("ranks",), (89, False), (90, True))
def test_row_worst_compiles(compiled, ranks):
    masks = torch.rand(2, 2, 2, 3000) > 0.5
    order = torch.arange(3000).expand(2, 2, -1) if ranks else None
    going = Going(torch.zeros(2, 2, 1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.uint8))
    triton_row_worst(torch.rand(2, 2, 3000), *masks, order)
    triton_row_going(torch.rand(2, 2, 3000), *masks, order, torch.tensor([9, 8]), going)
    assert set(compiled) == {"_worst"}
