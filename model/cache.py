"""What attention remembers between calls, so that a token is computed once: the cache of cached decoding.

The rows of one cache are sequences of equal length, so they share positions, distances and plan. Sequences of different
lengths live in several caches; `GPT.extend` takes any number of them, and only attention itself runs cache by cache.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


class LayerCache:
    """What the core of one layer keeps of `rows` sequences, with the keys and values of up to `capacity` tokens."""

    def __init__(self, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity


class KeysAndValues(LayerCache):
    """The keys (as attention reads them) and values of all tokens so far, in memory that is taken once."""

    def __init__(self, rows: int, capacity: int):
        super().__init__(rows, capacity)
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(
        self, k: Float[Tensor, "B H T d"], v: Float[Tensor, "B H T d"]
    ) -> tuple[Float[Tensor, "B H N d"], Float[Tensor, "B H N d"]]:
        """All keys and values, these last ones included. Raises ValueError beyond the capacity."""
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, not {stop}; make a larger one")
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        self._keys[:, :, start:stop], self._values[:, :, start:stop] = k, v
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    @property
    def room(self) -> int:
        """How many more tokens it takes."""
        return self.capacity - self.length

    def clear(self) -> None:
        self.length = 0


class Cache:
    """The layers' caches of `rows` sequences of equal length.

    Args:
        layers: one for each layer of the model.
        inference_length: the longest that the sequences will get, in tokens. NTK, YaRN and LogN's count="length" go by
            it from the first token on, so what is cached stays valid.
    """

    def __init__(self, layers: Iterable[LayerCache], rows: int, inference_length: int):
        self.layers = list(layers)
        self.rows, self.inference_length = rows, inference_length
        self.length = 0


def split_rows(x: Float[Tensor, "B H T d"], caches: Iterable[LayerCache]) -> tuple[Tensor, ...]:
    """The rows of a batch that belong to each cache, in order."""
    return torch.split(x, [cache.rows for cache in caches])
