"""The compiled kernel against the dense definition in float64, and what it does where it can't be compiled."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.attend import Transform, attend, check_trainable, native_build
from model.attend.native_build import load_kernel
from tests.model.test_attend import SHAPES, Leaves, assert_close, inputs, results, tables

ROOT = Path(__file__).resolve().parents[2]
MORE_SHAPES = [  # T, n_query, B, H, h, d: about blocks of 48 rows and 288 keys, panels of 16 or 32, tiles of 6 or 12
    *((T, T, 1, 2, 2, 20) for T in (15, 16, 17, 47, 48, 49, 96, 97, 287, 288, 289, 577)),
    *((600, n_query, 1, 1, 1, 33) for n_query in (2, 5, 6, 7, 47, 48, 49, 311, 312, 313)),
    *((100, 100, 2, 1, 1, d) for d in (1, 15, 16, 17, 31, 32, 65, 256)),
]


pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """A kernel that can't be compiled fails here, once, with the compiler's words."""
    reason = load_kernel()
    assert not isinstance(reason, str), reason


def exactly(leaves: Leaves, scale: Tensor | None, shift: Tensor | None) -> list[Tensor]:
    """Output and gradients by the definition in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    tables = (None if x is None else x.detach().double().requires_grad_() for x in (scale, shift))
    return results("dense", (q, k, v), *tables)


@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=str)
def test_values_and_all_gradients_are_those_of_the_definition(shape: tuple):
    T, n_query, B, H, h, d = shape
    leaves, (scale, shift) = inputs(T, H, d, n_query, B, torch.float32), tables(T, h, torch.float32)
    assert_close(results("native", leaves, scale, shift), exactly(leaves, scale, shift), 1e-5)


@pytest.mark.parametrize("tiles", ["WIDE_TILES", "NARROW_TILES"])
def test_tiles_with_avx512_and_without_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, f"-D{tiles}", "-Wno-psabi"))
    built = load_kernel.__wrapped__()  # past its cache
    monkeypatch.setattr("model.attend.native.load_kernel", lambda: built)
    for T, n_query, B, H, h, d in MORE_SHAPES:
        leaves, (scale, shift) = inputs(T, H, d, n_query, B, torch.float32), tables(T, h, torch.float32)
        assert_close(results("native", leaves, scale, shift), exactly(leaves, scale, shift), 1e-5)


@pytest.mark.parametrize("given", ["scale", "shift", "neither"])
def test_a_missing_table_changes_nothing_and_one_alone_gets_its_gradient(given: str):
    leaves, (scale, shift) = inputs(330, H=3, B=2, dtype=torch.float32), tables(330, dtype=torch.float32)
    learned = {"scale": (scale, None), "shift": (None, shift), "neither": (None, None)}[given]
    assert_close(results("native", leaves, *learned), exactly(leaves, *learned), 1e-5)


def test_values_at_16384_tokens():
    leaves, (scale, shift) = inputs(16384, d=16, n_query=256, dtype=torch.float32), tables(16384, dtype=torch.float32)
    assert_close(results("native", leaves, scale, shift), exactly(leaves, scale, shift), 1e-5)


def test_any_strides_are_read_as_they_are():
    leaves, (scale, shift) = inputs(70, H=4, d=24, B=2, dtype=torch.float32), tables(70, 4, torch.float32)
    plain = results("native", leaves, scale, shift)
    every_second = [x.detach().repeat_interleave(2, dim=2)[:, :, ::2].requires_grad_() for x in leaves]
    features_first = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves]
    for q, k, v in (every_second, features_first):
        assert_close(results("native", (q, k, v), scale, shift), plain, 0.0)


def test_the_number_of_threads_changes_no_bit():
    leaves, (scale, shift) = inputs(300, H=3, B=2, d=40, dtype=torch.float32), tables(300, 3, torch.float32)
    before = torch.get_num_threads()
    try:
        on = {}
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            on[threads] = results("native", leaves, scale, shift)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for threads in (2, 5) for x, y in zip(on[1], on[threads], strict=True))


def test_weights_below_the_normal_numbers_are_zero_and_all_above_are_exact():
    """One key far above the others: their weights are e^-x for x from 0 to 120."""
    x = torch.linspace(0, 120, 2000)
    shift = torch.cat([torch.zeros(1), -x.flip(0)])[None]  # the last query sees key 2000 - t at distance t
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2001, 4)
    v = torch.zeros(1, 1, 2001, 4)
    v[..., 0], v[0, 0, :, 1] = 1.0, 1e30 * torch.arange(2001).eq(100)
    out = attend(q, k, v, Transform(shift=shift), "native")[0, 0, 0]
    weights = shift[0].double().softmax(0)
    assert out[0].item() == pytest.approx(1.0, rel=1e-6)
    assert out[1].item() == pytest.approx(1e30 * weights[1900].item(), rel=1e-6)


@pytest.mark.parametrize("i", [0, 5, 47, 48, 139])
def test_a_row_depends_on_its_own_and_earlier_keys_and_on_no_later_one(i: int):
    q, k, v = inputs(140, H=1, dtype=torch.float32)
    out = attend(q, k, v, Transform(*tables(140, dtype=torch.float32)), "native")
    for gradient in torch.autograd.grad(out[0, 0, i].square().sum(), (k, v)):
        reached = gradient[0, 0].any(dim=-1)
        assert reached[1 : i + 1].all()
        assert not reached[i + 1 :].any()


def test_blocks_without_an_unmasked_entry_count_for_nothing():
    leaves, (scale, shift) = inputs(700, n_query=60, dtype=torch.float32), tables(700, dtype=torch.float32)
    distance = torch.arange(shift.shape[1])
    near_only = shift.detach().masked_fill(distance > 20, -math.inf)
    assert_close(results("native", leaves, scale, near_only.requires_grad_()), exactly(leaves, scale, near_only), 1e-5)


def test_steep_shifts_stay_finite():
    leaves, (scale, shift) = inputs(200, dtype=torch.float32), tables(200, dtype=torch.float32)
    for step, tolerance in ((-1e4, 1e-5), (1e4, 2e-3)):  # a logit of 1e4 has a spacing of 1e-3 in fp32
        steep = (shift.detach() + step * (torch.arange(205) >= 3)).requires_grad_()
        assert_close(results("native", leaves, scale, steep), exactly(leaves, scale, steep), tolerance)


def test_another_default_dtype_changes_nothing():
    leaves, (scale, _) = inputs(40, dtype=torch.float32), tables(40, dtype=torch.float32)

    def values() -> list[Tensor]:
        out = attend(*leaves, Transform(scale), "native")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, scale])]

    plain = values()
    torch.set_default_dtype(torch.float64)
    try:
        assert_close(values(), plain, 0.0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_reaches_the_output(where: str):
    q, k, v = (x.detach() for x in inputs(100, dtype=torch.float32))
    {"q": q, "k": k, "v": v}[where][0, 0, 50, 3] = math.nan
    out = attend(q, k, v, Transform(*tables(100, dtype=torch.float32)), "native")
    assert out[0, 0, 50].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype):
    leaves, (scale, shift) = inputs(300, H=2, d=64, dtype=dtype), tables(300, 2, torch.float32)
    ours = results("native", leaves, scale, shift)
    assert [x.dtype for x in ours] == [dtype] * 4 + [torch.float32] * 2
    assert_close(ours, exactly(leaves, scale, shift), 2 * torch.finfo(dtype).eps)


def test_what_it_cannot_serve_is_refused():
    leaves = inputs(20)
    with pytest.raises(
        ValueError, match="attention=native can't serve this: it computes in fp32, and q is float64; use"
    ):
        attend(*leaves, backend="native")
    message = (
        "attention=native can't serve this: it is made for a CPU, and q is on meta; use attention=auto or blockwise"
    )
    with pytest.raises(ValueError, match=message):
        check_trainable("native", torch.device("meta"))


TRY = """
import torch
from model.attend import attend
q = torch.ones(1, 1, 20, 4)
print(attend(q, q, q, backend="native").sum().item())
"""


def try_with(cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A first use in a process of its own, whose cache is that folder."""
    environment = {"XDG_CACHE_HOME": str(cache), "PATH": "/usr/bin:/bin"} | environment
    return subprocess.run(
        [sys.executable, "-c", TRY], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_it_is_compiled_once_into_the_cache(tmp_path: Path):
    assert try_with(tmp_path).stdout == "80.0\n"
    (library,) = tmp_path.glob("scale_invariant_attention/*")
    before = library.stat()
    assert try_with(tmp_path).stdout == "80.0\n"
    assert [path.stat().st_ino for path in tmp_path.glob("scale_invariant_attention/*")] == [before.st_ino]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PATH": "/nowhere"}, "there is no C++ compiler (install g++, or set CXX); use auto or blockwise"),
        ({"CXX": "/bin/false"}, "/bin/false failed on native.cpp"),
        ({"CXX": "/nowhere/c++"}, "it could not be built with /nowhere/c++ in"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "Not a directory: '/dev/null/scale_invariant_attention'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_where_it_cannot_be_compiled_it_says_why(tmp_path: Path, environment: dict, message: str):
    done = try_with(tmp_path, **environment)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_processes_that_compile_at_the_same_time_do_not_meet(tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", TRY]
    started = [subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[0] for process in started] == [b"80.0\n"] * 3
    assert len(list(tmp_path.glob("*/*"))) == 1
