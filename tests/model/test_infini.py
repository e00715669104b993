"""Infini-attention against its recurrence, written out in float64 numpy, and against plain attention."""

import numpy as np
import pytest
import torch

from model.attend import attend
from model.infini import InfiniAttention
from model.position import PositionScheme, build_position
from model.position.plan import Geometry

H, D, SEGMENT = 2, 8, 16


def build(update: str = "linear", beta: tuple[float, ...] = (0.3, -0.7)) -> tuple[InfiniAttention, PositionScheme]:
    core = InfiniAttention(Geometry(D, H, train_length=64), segment_length=SEGMENT, update=update)
    with torch.no_grad():
        core.gate.copy_(torch.tensor(beta))
    position = build_position({"rotary": {"kind": "p_rope"}}, head_dim=D, n_head=H, train_length=64)
    return core, position


def draw(length: int, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, H, length, D) for _ in range(3)]


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, local: np.ndarray, beta: float, delta: bool) -> np.ndarray:
    """One (batch, head): reads the memory token by token, updates it when a segment is full."""

    def sigma(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1

    gate = 1 / (1 + np.exp(-beta))
    memory, norm, out = np.zeros((D, D)), np.zeros(D), np.zeros_like(v)
    for start in range(0, len(q), SEGMENT):
        rows = range(start, min(start + SEGMENT, len(q)))
        for i in rows:
            read = sigma(q[i]) @ memory / (sigma(q[i]) @ norm) if start else np.zeros(D)
            out[i] = gate * read + (1 - gate) * local[i]
        grown, grown_norm = memory.copy(), norm.copy()
        for j in rows:
            stored = sigma(k[j]) @ memory / (sigma(k[j]) @ norm) if delta and start else np.zeros(D)
            grown += np.outer(sigma(k[j]), v[j] - stored)
            grown_norm += sigma(k[j])
        memory, norm = grown, grown_norm
    return out


@pytest.mark.parametrize("length", [1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT + 3])
@pytest.mark.parametrize("update", ["linear", "delta"])
def test_memory_and_gate_follow_the_recurrence_at_any_length(length: int, update: str) -> None:
    core, position = build(update)
    q, k, v = draw(length)
    plan = position.plan(length)
    pieces = zip(*(x.split(SEGMENT, dim=2) for x in (plan.query(q, 0), plan.rotate(k), v)), strict=True)
    local = torch.cat([attend(query, key, value, plan.transform, "dense") for query, key, value in pieces], dim=2)
    got = core(q, k, v, plan).detach().numpy()
    for b in range(q.shape[0]):
        for h in range(H):
            arrays = [x[b, h].double().numpy() for x in (q, k, v, local)]
            want = oracle(*arrays, beta=float(core.gate[h].item()), delta=update == "delta")
            np.testing.assert_allclose(got[b, h], want, atol=2e-5)


def test_first_segment_with_a_closed_gate_is_plain_attention() -> None:
    core, position = build(beta=(-40.0, -40.0))
    q, k, v = draw(SEGMENT)
    plan = position.plan(SEGMENT)
    plain = attend(plan.query(q, 0), plan.rotate(k), v, plan.transform, "dense")
    torch.testing.assert_close(core(q, k, v, plan), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_no_output_depends_on_a_later_token_in_any_segment(update: str) -> None:
    core, position = build(update)
    length = 3 * SEGMENT + 5
    q, k, v = (x.requires_grad_() for x in draw(length, batch=1))
    out = core(q, k, v, position.plan(length))
    for i in (0, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 3, length - 2):
        gradients = torch.autograd.grad(out[:, :, i].sum(), (q, k, v), retain_graph=True)
        for gradient in gradients:
            assert (gradient[:, :, i + 1 :] == 0).all()
        assert gradients[2][:, :, : i + 1].abs().amax(dim=(0, 1, 3)).min() > 0  # and on every earlier one, far ones too


def test_segment_length_scales_with_the_training_length() -> None:
    assert InfiniAttention(Geometry(D, H, train_length=256, reference_length=4096)).segment_length == 128
    assert InfiniAttention(Geometry(D, H, train_length=4096)).segment_length == 2048


def test_bad_values_name_their_key() -> None:
    with pytest.raises(ValueError, match=r"position\.core\.update=sum .* linear or delta"):
        InfiniAttention(Geometry(D, H, 64), update="sum")
    with pytest.raises(ValueError, match=r"position\.core\.segment_length=0 "):
        InfiniAttention(Geometry(D, H, 64), segment_length=0)
