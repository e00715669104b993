"""FlexAttention against the dense definition: forward on the CPU, gradients and compilation counts on a GPU."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from model.attend import Transform, attend
from model.attend.flex import BLOCK, bucket, causal_block_mask
from model.position import build_position

D = 16


def draw(length: int, n_head: int = 3, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, n_head, length, D, device=device, dtype=dtype) for _ in range(3)]


def closed_form(length: int, n_head: int = 3, device: str = "cpu", **keys: Any) -> Transform:
    """Of the scale-invariant scheme, a tau a head."""
    tau = torch.linspace(1, 100, n_head).tolist()
    logits = {"kind": "scale_invariant", "tau": tau, **keys}
    position = build_position({"logits": logits}, head_dim=D, n_head=n_head, train_length=128).to(device)
    transform = position.plan(length).transform
    assert transform is not None
    return transform


def tables(length: int, heads: int = 1, device: str = "cpu") -> Transform:
    t = torch.arange(length, device=device)
    rate = torch.linspace(0.5, 2, heads, device=device)[:, None]
    return Transform(scale=(1 + 0.1 * rate * t.float().log1p()), shift=-rate * t.float().log1p())


@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:.*script_method")  # of torch, about torch
@pytest.mark.parametrize("heads", [1, 3])
def test_forward_is_the_definition_at_lengths_that_fill_no_block(heads: int) -> None:
    for length in (200, 129, 256):  # one bucket, so one compilation
        q, k, v = draw(length)
        transform = tables(length, heads)
        got = attend(q, k, v, transform, "flex")
        torch.testing.assert_close(got, attend(q, k, v, transform, "dense"), atol=2e-6, rtol=2e-5)


@pytest.mark.filterwarnings("ignore:Dynamo does not know", "ignore:.*script_method")
def test_forward_in_closed_form_is_the_definition() -> None:
    for length in (200, 129):
        q, k, v = draw(length)
        transform = closed_form(length)
        got = attend(q, k, v, transform, "flex_closed_form")
        torch.testing.assert_close(got, attend(q, k, v, transform, "dense"), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("logits", [{"kind": "scale_invariant", "tau": [0.5, 1, 100]}, {"kind": "alibi"}], ids=str)
def test_closed_form_in_fp32_gives_the_values_of_the_tables(logits: dict[str, Any]) -> None:
    transform = build_position({"logits": logits}, head_dim=D, n_head=3, train_length=128).plan(65536).transform
    assert transform is not None
    assert transform.formula is not None
    t = torch.arange(65536, dtype=torch.float32)
    values = transform.formula.function(t, *(parameter[:, None] for parameter in transform.formula.parameters))
    for value, table in zip(values, (transform.scale, transform.shift), strict=True):
        assert (value is None) == (table is None)
        if value is not None and table is not None:
            torch.testing.assert_close(value, table, rtol=1e-6, atol=2e-6)


def test_scale_and_shift_without_a_closed_form_are_refused() -> None:
    message = "attention=flex_closed_form can't serve scale and shift that are learned or have no closed form"
    q, k, v = draw(8)
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, tables(8), "flex_closed_form")
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, closed_form(8, learned=True), "flex_closed_form")


# In a process of its own: the shape checks of the other tests' import hook would be compiled too.
COMPILES = """
import torch
from torch._dynamo.utils import counters
from model.attend import Transform, attend
from model.attend.flex import bucket

def check(run, length, rows=2):
    q, k, v = (torch.randn(rows, 3, length, 16) for _ in range(3))
    t = torch.arange(length).float()
    transform = Transform(scale=1 + t.log1p()[None], shift=-t.log1p()[None])
    want = attend(q, k, v, transform, "dense")
    torch.testing.assert_close(run(q, k, v, transform), want, atol=5e-6, rtol=5e-5)

lengths = range(1, 400, 7)
for length in lengths:
    check(lambda *qkvt: attend(*qkvt, "flex"), length)
compiled, buckets = counters["stats"]["unique_graphs"], len({bucket(length) for length in lengths})
assert compiled == buckets == 4, (compiled, buckets)
with torch.no_grad():
    for rows in range(1, 17):
        check(lambda *qkvt: attend(*qkvt, "flex"), 100, rows)
compiled = counters["stats"]["unique_graphs"] - compiled
assert compiled == 5, compiled  # 1, 2, 4, 8 and 16 rows
check(torch.compile(lambda q, k, v, transform: attend(1 * q, k, v, transform, "flex") * 1), 100)
print("all as they should be")
"""


@pytest.mark.slow
def test_many_lengths_need_one_compilation_a_bucket_also_inside_a_compiled_block() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False)
    assert done.stdout == "all as they should be\n", done.stderr[-3000:]


def test_bucket_holds_the_length_wastes_less_than_half_and_is_a_multiple_of_the_block() -> None:
    for length in (1, 127, 128, 129, 300, 385, 4096, 4097, 16384, 65536, 100_000):
        size = bucket(length)
        assert size >= length
        assert size % BLOCK == 0
        assert size < 2 * length or size == BLOCK
    assert [bucket(length) for length in (4096, 16384, 65536)] == [4096, 16384, 65536]
    assert len({bucket(length) for length in range(1, 65537, 64)}) <= 18


def test_block_mask_sees_every_key_up_to_the_query_and_no_other() -> None:
    blocks = 6
    mask = causal_block_mask(blocks * BLOCK, torch.device("cpu"))
    partial, full = torch.zeros(blocks, blocks), torch.zeros(blocks, blocks)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for row in range(blocks):
        partial[row, mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].long()] = 1
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()] = 1
    assert torch.equal(partial, torch.eye(blocks))
    assert torch.equal(full, torch.ones(blocks, blocks).tril(-1))
    assert mask.shape[-2:] == (blocks * BLOCK, blocks * BLOCK)


def test_block_mask_of_65536_tokens_is_small_and_made_once() -> None:
    mask = causal_block_mask(65536, torch.device("cpu"))
    held = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    assert sum(x.numel() * x.element_size() for x in held if x is not None) < 8e6
    assert causal_block_mask(65536, torch.device("cpu")) is mask


def test_what_the_kernel_cannot_serve_is_refused() -> None:
    q, k, v = draw(8)
    with pytest.raises(ValueError, match="attention=flex can't serve this: 4 queries for 8 keys; use blockwise"):
        attend(q[:, :, :4], k, v, tables(8), "flex")
    with pytest.raises(ValueError, match="fp64"):
        attend(q.double(), k.double(), v.double(), None, "flex")
    with pytest.raises(ValueError, match="gradients on a CPU"):
        attend(q.clone().requires_grad_(), k, v, tables(8), "flex")
    with pytest.raises(ValueError, match="head dimension of 12"):
        attend(q[..., :12], k[..., :12], v[..., :12], tables(8), "flex")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [100, 128, 1000])
def test_values_and_gradients_on_cuda_are_those_of_the_definition(dtype: torch.dtype, length: int) -> None:
    q, k, v = (x.requires_grad_() for x in draw(length, device="cuda", dtype=dtype))
    scale = torch.rand(3, length, device="cuda").add(0.5).requires_grad_()
    shift = torch.randn(3, length, device="cuda").requires_grad_()
    upstream = torch.randn_like(q)
    results = []
    for backend in ("flex", "dense"):
        out = attend(q, k, v, Transform(scale, shift), backend)
        results.append([out, *torch.autograd.grad(out, [q, k, v, scale, shift], upstream)])
    atol = 2e-5 if dtype == torch.float32 else 3e-2
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=10 * atol)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_in_closed_form_on_cuda_are_those_of_the_definition(dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in draw(1000, device="cuda", dtype=dtype))
    transform, upstream = closed_form(1000, device="cuda"), torch.randn_like(q)
    results = []
    for backend in ("flex_closed_form", "dense"):
        out = attend(q, k, v, transform, backend)
        results.append([out, *torch.autograd.grad(out, [q, k, v], upstream)])
    atol = 2e-5 if dtype == torch.float32 else 3e-2
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=10 * atol)


@pytest.mark.gpu
def test_automatic_choice_on_cuda_is_flex_and_for_cached_decoding_blockwise() -> None:
    q, k, v = draw(64, device="cuda", dtype=torch.bfloat16)
    transform = tables(64, device="cuda")
    for queries in (64, 1):
        got = attend(q[:, :, -queries:], k, v, transform)
        want = attend(q[:, :, -queries:], k, v, transform, "dense")
        torch.testing.assert_close(got, want, atol=3e-2, rtol=3e-2)
