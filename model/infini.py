"""Infini-attention (arXiv:2404.07143): exact attention within a segment, a compressive memory for all before it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from model.attend import attend
from model.cache import KeysAndValues, LayerCache
from model.position import Plan
from model.position.plan import Geometry


class InfiniAttention(nn.Module):
    """Mixes, by one gate g = sigmoid(beta_h) a head, what the memory holds with attention within the segment.

        out = g A_mem + (1 - g) A_local
        A_mem[i] = sigma(q_i) M_{s-1} / (sigma(q_i) z_{s-1}),    sigma = ELU + 1    (0 in the first segment)
        linear:  M_s = M_{s-1} + sum_j sigma(k_j)^T v_j
        delta:   M_s = M_{s-1} + sum_j sigma(k_j)^T (v_j - sigma(k_j) M_{s-1} / (sigma(k_j) z_{s-1}))
        z_s = z_{s-1} + sum_j sigma(k_j)

    The sums run over the keys of segment s. The memory reads and stores q and k without rotation or query scale;
    A_local is what `attend` gives with the position plan, on the segment alone.

    Args:
        segment_length: in tokens at the reference length; scales with the training length like a rotary base.
        update: "linear" or "delta".

    Raises ValueError for a segment length under 1 or another update.
    """

    def __init__(self, geometry: Geometry, segment_length: int = 2048, update: str = "linear"):
        super().__init__()
        self.segment_length = round(segment_length * geometry.length_factor)
        if self.segment_length < 1:
            raise ValueError(f"position.core.segment_length={segment_length} must be at least 1, also after scaling")
        if update not in ("linear", "delta"):
            raise ValueError(f"position.core.update={update} is unknown; choose linear or delta")
        self.delta = update == "delta"
        self.gate = nn.Parameter(torch.zeros(geometry.n_head))  # beta; both parts weigh the same at first

    def forward(
        self,
        q: Float[Tensor, "B H T d"],
        k: Float[Tensor, "B H T d"],
        v: Float[Tensor, "B H T d"],
        plan: Plan,
        backend: str = "auto",
    ) -> Float[Tensor, "B H T d"]:
        """q and k as they come out of QK-norm; the plan turns and scales them for the local part."""
        length = q.shape[2]
        segment = min(self.segment_length, length)
        query, key = plan.query(q), plan.rotate(k)
        local = [_segments(x, segment) for x in (query, key, v)]  # "n B H S d"
        n, batch = local[0].shape[:2]
        query, key, value = (x.flatten(0, 1) for x in local)
        attended = attend(query, key, value, plan.transform, backend).unflatten(0, (n, batch))
        remembered = self._remember(*(_segments(x, segment).float() for x in (q, k, v)))
        gate = self.gate.sigmoid()[:, None, None]
        mixed = (gate * remembered + (1 - gate) * attended).to(v.dtype)
        return mixed.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]

    def new_cache(self, rows: int, capacity: int) -> "Memory":
        return Memory(rows, min(self.segment_length, capacity))

    def extend(
        self,
        q: Float[Tensor, "B H T d"],
        k: Float[Tensor, "B H T d"],
        v: Float[Tensor, "B H T d"],
        plan: Plan,
        cache: "Memory",
    ) -> Float[Tensor, "B H T d"]:
        """The same for the tokens that follow those of the cache."""
        query, key = plan.query(q), plan.rotate(k)
        gate = self.gate.sigmoid()[:, None, None]
        mixed = []
        start = 0
        while start < q.shape[2]:
            part = slice(start, start + cache.segment.room)
            keys, values = cache.segment.append(key[:, :, part], v[:, :, part])
            attended = attend(query[:, :, part], keys, values, plan.transform)
            remembered = cache.exchange(q[:, :, part], k[:, :, part], v[:, :, part], self.delta)
            mixed.append((gate * remembered + (1 - gate) * attended).to(v.dtype))
            start = min(part.stop, q.shape[2])
            if cache.segment.room == 0:
                cache.close_segment()
        return torch.cat(mixed, dim=2)

    def _remember(
        self, q: Float[Tensor, "n B H S d"], k: Float[Tensor, "n B H S d"], v: Float[Tensor, "n B H S d"]
    ) -> Float[Tensor, "n B H S d"]:
        """A_mem of every segment, in fp32."""
        with torch.autocast(q.device.type, enabled=False):
            q, k = F.elu(q) + 1, F.elu(k) + 1
            memory, norm = torch.zeros_like(k[0].mT @ v[0]), torch.zeros_like(k[0, :, :, :1].mT)
            read = []
            for query, key, value in zip(q, k, v, strict=True):
                read.append(_retrieve(query, memory, norm))
                news = value - _retrieve(key, memory, norm) if self.delta else value
                memory = memory + key.mT @ news
                norm = norm + key.sum(dim=-2)[..., None]
            return torch.stack(read)


class Memory(LayerCache):
    """Infini-attention's cache: the memory of all full segments, and the segment that is being filled.

    What a segment adds to the memory is summed up as its tokens come, and counts once the segment is full.
    """

    def __init__(self, rows: int, capacity: int):
        super().__init__(rows, capacity)
        self.segment = KeysAndValues(rows, capacity)
        self._memory: tuple[Tensor, Tensor] | None = None  # M and z
        self._news: tuple[Tensor, Tensor] | None = None

    def exchange(
        self, q: Float[Tensor, "B H T d"], k: Float[Tensor, "B H T d"], v: Float[Tensor, "B H T d"], delta: bool
    ) -> Float[Tensor, "B H T d"]:
        """A_mem of tokens of this segment, in fp32; takes up what their keys and values add."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = F.elu(q.float()) + 1, F.elu(k.float()) + 1, v.float()
            if self._memory is None or self._news is None:
                self._memory = self._news = torch.zeros_like(k.mT @ v), torch.zeros_like(k[:, :, :1].mT)
            news = v - _retrieve(k, *self._memory) if delta else v
            self._news = self._news[0] + k.mT @ news, self._news[1] + k.sum(dim=-2)[..., None]
            return _retrieve(q, *self._memory)

    def close_segment(self) -> None:
        assert self._memory is not None
        assert self._news is not None
        self._memory = self._memory[0] + self._news[0], self._memory[1] + self._news[1]
        self._news = torch.zeros_like(self._memory[0]), torch.zeros_like(self._memory[1])
        self.segment.clear()


def _retrieve(x: Tensor, memory: Tensor, norm: Tensor) -> Tensor:
    """sigma(x) M / (sigma(x) z); 0 while the memory is empty."""
    return (x @ memory) / (x @ norm).clamp_min(1e-6)


def _segments(x: Float[Tensor, "B H T d"], segment: int) -> Float[Tensor, "n B H S d"]:
    """Cuts the sequence; the last segment is filled up with zeros, which no token before them sees."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % segment))
    return x.unflatten(2, (-1, segment)).permute(2, 0, 1, 3, 4)
