"""Output layer and cross-entropy in chunks: torch's values and gradients, in bounded memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model import cross_entropy
from model.cross_entropy import linear_cross_entropy

N, C, V = 50, 8, 37


@pytest.fixture(params=[1, 7, 50, 1000], ids=lambda tokens: f"{tokens} tokens a chunk")
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", request.param * V)


def problem(ignored: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    targets = torch.randint(V, (N,))
    if ignored:
        targets[torch.randperm(N)[:15]] = -100
    return x, weight, targets


def value_and_gradients(function: Any, x: Tensor, weight: Tensor, reduction: str) -> tuple[Tensor, ...]:
    """The gradients are those of a scalar that is not the loss itself."""
    loss = function(reduction)
    upstream = torch.linspace(0.5, 2, loss.numel()).view_as(loss)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), upstream)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_those_of_torch(reduction: str, ignored: bool):
    x, weight, targets = problem(ignored)
    ours = value_and_gradients(lambda r: linear_cross_entropy(x, weight, targets, r), x, weight, reduction)
    torchs = value_and_gradients(lambda r: F.cross_entropy(x @ weight.T, targets, reduction=r), x, weight, reduction)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)


def test_mean_is_the_default():
    x, weight, targets = problem()
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets), F.cross_entropy(x @ weight.T, targets))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_ignored_token_gets_no_loss_and_no_gradient(reduction: str):
    x, weight, targets = problem()
    loss = linear_cross_entropy(x, weight, targets, reduction)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert not gradient[targets == -100].any()
    assert gradient[targets != -100].any(dim=-1).all()
    if reduction == "none":
        assert not loss[targets == -100].any()


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_huge_logits_stay_finite(reduction: str):
    x, weight, targets = problem()
    loss = linear_cross_entropy(1e4 * x, weight, targets, reduction)
    gradients = torch.autograd.grad(loss.sum(), (x, weight))
    torch.testing.assert_close(loss, F.cross_entropy(1e4 * x @ weight.T, targets, reduction=reduction))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_either_side_may_be_frozen(frozen: str, reduction: str):
    x, weight, targets = problem()
    loss = linear_cross_entropy(x, weight, targets, reduction).sum()
    expected = torch.autograd.grad(loss, weight if frozen == "x" else x)
    still = {"x": x, "weight": weight}
    still[frozen] = still[frozen].detach()
    loss = linear_cross_entropy(still["x"], still["weight"], targets, reduction).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, weight if frozen == "x" else x), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_autocast_takes_the_product_in_bf16_and_the_rest_in_fp32(reduction: str):
    x, weight, targets = problem()
    exact = value_and_gradients(lambda r: linear_cross_entropy(x, weight, targets, r), x, weight, reduction)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = value_and_gradients(lambda r: linear_cross_entropy(x, weight, targets, r), x, weight, reduction)
    assert [value.dtype for value in rounded] == [torch.float32] * 3
    for got, expected in zip(rounded, exact, strict=True):
        assert not torch.equal(got, expected)
        assert (got - expected).norm() < 0.01 * expected.norm()


def test_a_bf16_model_keeps_its_dtype_in_the_gradients_and_fp32_in_the_loss():
    x, weight, targets = problem()
    x16, weight16 = (tensor.detach().bfloat16().requires_grad_() for tensor in (x, weight))
    loss = linear_cross_entropy(x16, weight16, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert x16.grad is not None
    assert weight16.grad is not None
    assert x16.grad.dtype == weight16.grad.dtype == torch.bfloat16
    expected = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), (x, weight))
    for got, exact in zip((x16.grad, weight16.grad), expected, strict=True):
        assert (got.float() - exact).norm() < 0.02 * exact.norm()


def test_summing_many_tokens_in_bf16_loses_nothing_of_the_weight_gradient(monkeypatch: pytest.MonkeyPatch):
    """4096 chunks of one token: a bf16 sum would stall once it is 256 times its next term."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 1)
    x, weight = torch.ones(4096, 2), torch.zeros(4, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(x, weight, torch.zeros(4096, dtype=torch.int64), "sum").backward()
    torch.testing.assert_close(weight.grad, torch.tensor([-3072.0, 1024, 1024, 1024])[:, None].expand(4, 2))


class Sizes(TorchDispatchMode):
    """Notes the size of everything that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made += [
            tensor.shape for tensor in (out if isinstance(out, tuple | list) else [out]) if isinstance(tensor, Tensor)
        ]
        return out


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_all_tokens_never_exist_at_once(reduction: str, training: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 2**22)  # 83 tokens
    x, weight = torch.randn(1024, 4, requires_grad=training), torch.zeros(50304, 4, requires_grad=training)
    with torch.set_grad_enabled(training), Sizes() as sizes:
        loss = linear_cross_entropy(x, weight, torch.randint(50304, (1024,)), reduction)
        if training:
            loss.sum().backward()
    assert 2**21 < max(shape.numel() for shape in sizes.made) <= 2**22


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_logits_are_kept_for_the_backward_pass(reduction: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 10 * V)
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    x, weight, targets = problem()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear_cross_entropy(x, weight, targets, reduction).sum().backward()
    assert not {torch.Size([10, V]), torch.Size([N, V])} & set(kept)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_evaluation_makes_no_gradient(reduction: str):
    x, weight, targets = problem()
    with torch.no_grad(), Sizes() as sizes:
        linear_cross_entropy(x, weight, targets, reduction)
    assert sizes.made.count(torch.Size([N, V])) > 0
    assert sizes.made.count(torch.Size([V, C])) <= 1  # at most the weight in another dtype


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction='average' is unknown; choose mean, sum or none"):
        linear_cross_entropy(*problem(), reduction="average")
