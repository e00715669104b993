"""The door to attention: values and gradients of every backend, what it refuses, and what it costs in memory."""

import inspect
import math
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.attend import BACKENDS, Transform, attend

ROOT = Path(__file__).resolve().parents[2]
Leaves = tuple[Tensor, Tensor, Tensor]  # q, k, v
# flex is in test_attend_flex.py, the compiled kernel, which has no float64, in test_attend_native.py
EAGER = [name for name in BACKENDS if "flex" not in name and name != "native"]
TRANSFORMING = [name for name in EAGER if name != "sdpa"]


def oracle(q: Tensor, k: Tensor, v: Tensor, scale: Tensor | None, shift: Tensor | None) -> np.ndarray:
    """The definition in float64, row by row, over the visible keys only."""
    query, key, value = (x.detach().double().numpy() for x in (q, k, v))
    B, H, n_query, d = query.shape
    out = np.zeros((B, H, n_query, value.shape[-1]))
    for b, h, row in product(range(B), range(H), range(n_query)):
        i = key.shape[2] - n_query + row
        logits = key[b, h, : i + 1] @ query[b, h, row] / math.sqrt(d)
        t = i - np.arange(i + 1)
        if scale is not None:
            logits *= scale.detach().double().numpy()[min(h, len(scale) - 1)][t]
        if shift is not None:
            logits += shift.detach().double().numpy()[min(h, len(shift) - 1)][t]
        weights = np.exp(logits - logits.max())
        out[b, h, row] = weights / weights.sum() @ value[b, h, : i + 1]
    return out


def inputs(T: int, H: int = 2, d: int = 8, n_query: int | None = None, B: int = 1, dtype=torch.float64) -> Leaves:
    """q, k and v as a model gives them: the heads lie inside time in memory."""
    shape = [(B, n, H, d) for n in (n_query or T, T, T)]
    q, k, v = (torch.randn(s, dtype=torch.float64).to(dtype).transpose(1, 2).requires_grad_() for s in shape)
    return q, k, v


def tables(N: int, h: int = 1, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Scale-invariant tables with a tau per head, longer than asked for."""
    t, tau = torch.arange(N + 5, dtype=torch.float64), torch.linspace(3, 30, h, dtype=torch.float64)[:, None]
    square = 2 * torch.log1p(t / tau) + 1
    return square.sqrt().to(dtype).requires_grad_(), (1 - square).to(dtype).requires_grad_()


def results(backend: str, leaves: Leaves, scale: Tensor | None, shift: Tensor | None) -> list[Tensor]:
    """The output and the gradients of a fixed random projection of it, for q, k, v and the given tables."""
    out = attend(*leaves, Transform(scale, shift), backend)
    projection = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    wanted = [*leaves, *(table for table in (scale, shift) if table is not None)]
    return [out.detach(), *torch.autograd.grad(out, wanted, projection)]


def assert_close(ours: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    for x, y in zip(ours, true, strict=True):
        assert x.shape == y.shape
        assert (x.double() - y.double()).abs().max() <= tolerance * max(1.0, y.abs().max().item())


@pytest.mark.parametrize("backend", TRANSFORMING)
@pytest.mark.parametrize(("H", "h", "d"), [(1, 1, 64), (2, 2, 7), (6, 6, 3), (6, 1, 128)])
@pytest.mark.parametrize(("T", "n_query"), [(1, 1), (2, 2), (127, 127), (129, 129), (129, 1), (129, 40)])
def test_values_are_those_of_the_definition(T: int, n_query: int, H: int, h: int, d: int, backend: str):
    leaves, (scale, shift) = inputs(T, H, d, n_query), tables(T, h)
    out = attend(*leaves, Transform(scale, shift), backend)
    np.testing.assert_allclose(out.detach().numpy(), oracle(*leaves, scale, shift), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", TRANSFORMING)
@pytest.mark.parametrize("given", ["scale", "shift", "neither"])
def test_a_missing_table_changes_nothing(given: str, backend: str):
    leaves, (scale, shift) = inputs(130), tables(130)
    transform = Transform(scale if given == "scale" else None, shift if given == "shift" else None)
    out = attend(*leaves, transform, backend)
    np.testing.assert_allclose(out.detach().numpy(), oracle(*leaves, transform.scale, transform.shift), atol=1e-10)


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize(("T", "n_query"), [(1, 1), (129, 129), (129, 1), (129, 40)])
def test_every_backend_serves_plain_attention(T: int, n_query: int, backend: str):
    leaves = inputs(T, n_query=n_query)
    out = attend(*leaves, backend=backend)
    np.testing.assert_allclose(out.detach().numpy(), oracle(*leaves, None, None), atol=1e-10)


def test_sdpa_in_blocks_of_rows_is_sdpa_at_once(monkeypatch: pytest.MonkeyPatch):
    leaves = inputs(50, n_query=30)
    at_once = attend(*leaves, backend="sdpa")
    monkeypatch.setattr("model.attend.sdpa._MASK_ELEMENTS", 350)  # 7 rows a block
    torch.testing.assert_close(attend(*leaves, backend="sdpa"), at_once)


SHAPES = [  # T, n_query, B, H, h, d
    (1, 1, 2, 1, 1, 4),
    (2, 2, 3, 2, 1, 3),
    (127, 127, 1, 2, 2, 64),
    (128, 128, 2, 6, 6, 16),
    (129, 129, 1, 6, 1, 128),
    (300, 300, 3, 2, 2, 5),
    (300, 45, 2, 2, 1, 64),
    (300, 1, 1, 6, 6, 8),
    (1200, 1200, 1, 3, 3, 8),  # strips of 128 rows
    (1200, 200, 2, 8, 8, 8),  # strips of some heads of one batch element
    (2100, 300, 1, 5, 5, 4),  # a last group with fewer heads
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blockwise_equals_dense_in_values_and_all_gradients(shape: tuple, dtype: torch.dtype, tolerance: float):
    T, n_query, B, H, h, d = shape
    leaves, (scale, shift) = inputs(T, H, d, n_query, B, dtype), tables(T, h, dtype)
    q, k, v, *exact = (x.detach().double().requires_grad_() for x in (*leaves, scale, shift))
    assert_close(results("blockwise", leaves, scale, shift), results("dense", (q, k, v), *exact), tolerance)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of 128 rows and more than 100 keys are cut into tiles of 32 x 48."""
    for name, value in {"_KEYS": 100, "_TILE_ROWS": 32, "_TILE_KEYS": 48}.items():
        monkeypatch.setattr(f"model.attend.blockwise.{name}", value)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_equal_dense_in_values_and_all_gradients(shape: tuple, dtype: torch.dtype, tolerance: float):
    test_blockwise_equals_dense_in_values_and_all_gradients(shape, dtype, tolerance)


@pytest.mark.usefixtures("tiles")
def test_tiles_without_an_unmasked_entry_count_for_nothing():
    leaves, (scale, shift) = inputs(300, n_query=60), tables(300)
    distance = torch.arange(shift.shape[1])
    far_only = shift.detach().masked_fill((distance < 150) | (distance > 220), -math.inf)
    ours, true = (attend(*leaves, Transform(scale, far_only), backend) for backend in ("blockwise", "dense"))
    torch.testing.assert_close(ours, true)


def test_tiles_equal_dense_at_16384_tokens():
    leaves, (scale, shift) = inputs(16384, d=16, n_query=256, dtype=torch.float32), tables(16384, dtype=torch.float32)
    q, k, v = (x.double() for x in leaves)
    whole = attend(q, k, v, Transform(scale.double(), shift.double()), "dense")
    torch.testing.assert_close(attend(*leaves, Transform(scale, shift), "blockwise").double(), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("given", ["scale", "shift"])
def test_one_learned_table_alone_gets_its_gradient(given: str):
    leaves, (scale, shift) = inputs(140, H=2, B=2), tables(140)
    learned = (scale, None) if given == "scale" else (None, shift)
    assert_close(results("blockwise", leaves, *learned), results("dense", leaves, *learned), 1e-10)


def test_a_fixed_table_next_to_a_learned_one_changes_no_gradient():
    leaves, (scale, shift) = inputs(140), tables(140, h=2)
    for learned, transform in ((scale, Transform(scale, shift.detach())), (shift, Transform(scale.detach(), shift))):
        losses = (attend(*leaves, transform, backend).square().sum() for backend in ("blockwise", "dense"))
        ours, true = (list(torch.autograd.grad(loss, [*leaves, learned])) for loss in losses)
        assert_close(ours, true, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_fp32_on_the_same_rounded_inputs(dtype: torch.dtype):
    leaves = inputs(300, H=2, d=64, dtype=dtype)
    scale, shift = tables(300, 2, torch.float32)
    ours = results("blockwise", leaves, scale, shift)
    assert [x.dtype for x in ours] == [dtype] * 4 + [torch.float32] * 2
    q, k, v = (x.detach().float().requires_grad_() for x in leaves)
    assert_close(ours, results("dense", (q, k, v), scale, shift), 4 * torch.finfo(dtype).eps)


def test_logits_of_bf16_activations_are_not_rounded_to_bf16():
    q = torch.full((1, 1, 2, 4), 16.0, dtype=torch.bfloat16)
    k = torch.full_like(q, 8.0)
    k[0, 0, 1, 0] = 8.0625  # <q, k> / 2 is 256 and 256.5: bf16 would round the second one to 256
    v = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)[None, None, :, None].expand(1, 1, 2, 4)
    out = attend(q, k, v, Transform(shift=torch.zeros(1, 2)), "blockwise")
    assert out[0, 0, 1, 0].item() == pytest.approx(1 / (1 + math.exp(-0.5)), abs=2e-3)


@pytest.mark.parametrize("before", ["none", "ieee"])
def test_the_precision_of_other_fp32_products_is_as_before(before: str):
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    ambient, matmul.fp32_precision = matmul.fp32_precision, before
    try:
        leaves = inputs(20, dtype=torch.bfloat16)
        attend(*leaves, Transform(*tables(20, 1, torch.float32)), "blockwise").sum().backward()
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = ambient


@pytest.mark.parametrize("backend", TRANSFORMING)
@pytest.mark.parametrize("i", [0, 63, 64, 139])
def test_a_row_depends_on_its_own_and_earlier_keys_and_on_no_later_one(i: int, backend: str):
    q, k, v = inputs(140, H=1)
    out = attend(q, k, v, Transform(*tables(140)), backend)
    for gradient in torch.autograd.grad(out[0, 0, i].square().sum(), (k, v)):
        reached = gradient[0, 0].any(dim=-1)
        assert reached[1 : i + 1].all()  # a single key's own gradient is zero: its weight is 1 whatever it is
        assert not reached[i + 1 :].any()


@pytest.mark.parametrize("backend", TRANSFORMING)
def test_shifts_of_minus_ten_thousand_stay_finite(backend: str):
    leaves, (scale, shift) = inputs(200, dtype=torch.float32), tables(200, dtype=torch.float32)
    steep = (shift.detach() - 1e4 * (torch.arange(205) >= 3)).requires_grad_()
    far = (shift.detach() - 1e4).requires_grad_()
    for table in (steep, far):
        assert all(x.isfinite().all() for x in results(backend, leaves, scale, table))


def test_autocast_neither_rounds_the_products_nor_changes_the_dtype():
    leaves, (scale, shift) = inputs(100, dtype=torch.float32), tables(100, dtype=torch.float32)
    plain = results("blockwise", leaves, scale, shift)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(results("blockwise", leaves, scale, shift), plain, 0.0)
        for backend in ("sdpa", "dense"):
            assert attend(*leaves, backend=backend).dtype == torch.float32


def test_without_gradients_nothing_is_saved():
    leaves, transform = inputs(70), Transform(*tables(70))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert not attend(*leaves, transform).requires_grad
        assert not saved
        attend(*leaves, transform)
        assert sum(x.numel() for x in saved) <= 3 * leaves[0].numel() + 2 * 75


def test_activation_checkpointing_gives_the_same_gradients():
    leaves, (scale, shift) = inputs(100), tables(100)
    plain = torch.autograd.grad(attend(*leaves, Transform(scale, shift)).square().sum(), [*leaves, scale, shift])
    again = checkpoint(
        lambda q, k, v, *pair: attend(q, k, v, Transform(*pair)), *leaves, scale, shift, use_reentrant=False
    )
    assert_close(list(torch.autograd.grad(again.square().sum(), [*leaves, scale, shift])), list(plain), 0.0)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that are called from now on, instead of what they would do."""
    names: list[str] = []
    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, lambda q, k, v, transform, name=name: names.append(name) or q)
    return names


@pytest.mark.compiler
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("other", ["sdpa", "blockwise"])
def test_automatic_choice_is_native_for_enough_rows(
    other: str, fast: bool, chosen: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("model.attend.dispatch.has_bf16_unit", lambda device: fast)
    transform = Transform(*tables(50, dtype=torch.float32)) if other == "blockwise" else None
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        attend(*inputs(50, dtype=dtype), transform)
    attend(*inputs(50, n_query=1, dtype=torch.float32), transform)
    assert chosen == ["native", "native", other if fast else "native", other, other]


def test_a_transform_without_scale_and_shift_is_none(chosen: list[str]):
    attend(*inputs(50), Transform())
    assert chosen == ["sdpa"]


def test_automatic_choice_without_a_compiler_is_blockwise_and_says_so_once(
    chosen: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("model.attend.dispatch.unavailable_natively", lambda q: "there is no compiler here")
    leaves, transform = inputs(50, dtype=torch.float32), Transform(*tables(50, dtype=torch.float32))
    with pytest.warns(
        UserWarning, match="takes blockwise instead of native, which is faster: there is no compiler here"
    ):
        attend(*leaves, transform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*leaves, transform)
        attend(*leaves)  # torch's own is the usual one
    assert chosen == ["blockwise", "blockwise", "sdpa"]


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backend": "flash"},
            "attention=flash is unknown; choose one of: auto, dense, sdpa, blockwise, native, flex, flex_closed_form",
        ),
        ({"backend": "sdpa"}, "attention=sdpa cannot scale or shift"),
        ({"q": shape(1, 2, 9, 4)}, "Tq=9 must lie in 1..Tk=8"),
        ({"k": shape(1, 2, 7, 4)}, "share one shape"),
        ({"q": shape(1, 1, 8, 4)}, "batch, heads and head dim"),
        ({"q": shape(1, 2, 8, 4, dtype=torch.bfloat16)}, "one floating dtype"),
        ({"k": shape(1, 2, 8, 4).to("meta")}, "one device"),
        ({"transform": Transform(scale=shape(1, 7))}, "scale ends at distance 6; 8 keys need"),
        ({"transform": Transform(shift=shape(3, 8))}, r"shift has shape \(3, 8\), must be \(1, N\) or \(H=2, N\)"),
        ({"transform": Transform(shift=shape(1, 8, dtype=torch.bfloat16))}, "must be torch.float32"),
        ({"transform": Transform(shift=shape(1, 8, dtype=torch.float64))}, "must be torch.float32"),
        ({"transform": Transform(shift=shape(1, 8).to("meta"))}, "shift is on meta, q is on cpu"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused_in_one_line(change: dict, message: str):
    fitting: dict[str, Any] = {name: shape(1, 2, 8, 4) for name in "qkv"} | {"transform": Transform(shift=shape(1, 8))}
    with pytest.raises(ValueError, match=message) as refused:
        inspect.unwrap(attend)(**(fitting | change))  # without the tests' own check of annotated shapes
    assert "\n" not in str(refused.value)


PEAK = """
import re, sys, torch
from model.attend import Transform, attend
torch.set_num_threads(1)
backend, T = sys.argv[1], int(sys.argv[2])
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
def step(T):
    q, k, v = (torch.randn(1, 1, T, 16, requires_grad=True) for _ in range(3))
    t = torch.arange(T).float()
    tables = [(1 + t.log1p())[None].requires_grad_(), (-t.log1p())[None].requires_grad_()]
    attend(q, k, v, Transform(*tables), backend).sum().backward()
step(256)
before = peak()
step(T)
print(peak() - before)
"""


def peak_added(backend: str, T: int) -> int:
    """Bytes that a forward and backward pass adds to the peak of a fresh process."""
    return int(subprocess.check_output([sys.executable, "-c", PEAK, backend, str(T)], cwd=ROOT, text=True))


@pytest.mark.parametrize("backend", ["blockwise", pytest.param("native", marks=pytest.mark.compiler)])
def test_memory_stays_far_under_that_of_all_logits(backend: str):
    assert peak_added(backend, 8192) < 4 * 8192**2 / 4


def test_the_measurement_of_memory_sees_all_logits_where_they_are():
    assert peak_added("dense", 4096) > 4 * 4096**2
