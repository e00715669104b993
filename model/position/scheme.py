"""A position scheme is the choice of three slots. Everything that attention computes with them is

    L[h,i,j] = scale[h,t] * s[h,i] * <R_i q_i, R_j k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0

`rotary` gives R, `query_scale` gives s, `logits` gives scale and shift; one file for each.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from model.attend import Formula, Transform
from model.position import logits, query_scale, rotary
from model.position.plan import Geometry, Plan

Tables = tuple[Tensor | None, Tensor | None]
SLOTS = {"rotary": rotary.KINDS, "query_scale": query_scale.KINDS, "logits": logits.KINDS}


class PositionScheme(nn.Module):
    """The three slots of one scheme; `plan(length)` is made once per forward pass and handed to every layer.

    Tables that nothing learned enters are computed in fp64, stored in fp32 and kept: the longest one serves all shorter
    lengths, those of NTK and YaRN, whose frequencies go by the length, the last few. They are not in the state dict.
    """

    KEPT_TABLES = 32
    _device: Tensor

    def __init__(self, config: Mapping[str, Any], geometry: Geometry):
        super().__init__()
        self.rotary: rotary.NoRotation = build_kind("rotary", SLOTS["rotary"], config.get("rotary"), geometry)
        self.query_scale: nn.Module = build_kind(
            "query_scale", SLOTS["query_scale"], config.get("query_scale"), geometry
        )
        self.logits: nn.Module = build_kind("logits", SLOTS["logits"], config.get("logits"), geometry)
        self._tables: dict[Hashable, tuple[int, torch.device | None, Tables]] = {}
        # Only says on which device the tables are wanted; follows .to(device).
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def plan(self, length: int, start: int = 0, inference_length: int | None = None) -> Plan:
        """The tables for queries at positions start .. length - 1 that see the keys 0 .. i.

        Args:
            length: number of keys, and one more than the last query's position.
            start: the first query's position (above 0 in cached decoding).
            inference_length: the length that NTK, YaRN and LogN's count="length" go by, when a sequence is fed in
                pieces; by default `length`.

        Raises ValueError unless 0 <= start < length <= inference_length.
        """
        inference_length = inference_length or length
        if not 0 <= start < length <= inference_length:
            raise ValueError(
                f"start={start}, length={length}, inference_length={inference_length} must rise in this order"
            )
        frequency = self.rotary.angular_frequency(inference_length)
        cos, sin = (None, None) if frequency is None else self._rotation(frequency, inference_length)
        query_scale = self.query_scale(start, length, inference_length)
        return Plan(
            length=length,
            angular_frequency=frequency,
            cos=None if cos is None else cos[start:length],
            sin=None if sin is None else sin[start:length],
            temperature=self.rotary.temperature(inference_length),
            query_scale=None if query_scale is None else query_scale.to(self._device.device),
            transform=self._transform(length, inference_length),
        )

    def _rotation(self, frequency: Tensor, length: int) -> tuple[Tensor, Tensor]:
        def tables(position: Tensor) -> tuple[Tensor, Tensor]:
            # At position 65535 an fp32 angle is off by 4e-3 radians; fp64 costs little on the CPU, and exists there.
            angle = position[:, None] * frequency
            return angle.cos(), angle.sin()

        if frequency.requires_grad:
            raise ValueError("position.rotary: frequencies can't be learned, as their tables are kept; give constants")
        cos, sin = self._kept(tuple(frequency.tolist()), length, tables)
        assert cos is not None
        assert sin is not None
        return cos, sin

    def _transform(self, length: int, inference_length: int) -> Transform | None:
        if next(self.logits.parameters(), None) is None:
            tables = self._kept("logits", inference_length, self.logits)
        else:
            distance = torch.arange(length, dtype=torch.float64, device=self._device.device)
            tables = self._stored(self.logits(distance))
        scale, shift = (None if table is None else table[:, :length] for table in tables)
        if scale is None and shift is None:
            return None
        return Transform(scale=scale, shift=shift, formula=self._formula(self._device.device))

    def _formula(self, device: torch.device) -> Formula | None:
        formula: Formula | None = getattr(self.logits, "formula", lambda: None)()
        return formula and Formula(formula.function, tuple(x.to(device) for x in formula.parameters))

    def _kept(self, key: Hashable, length: int, tables: Callable[[Tensor], Tables]) -> Tables:
        """The tables over the positions or distances 0 .. N - 1, N >= length, made where none so long was kept."""
        rows, device, kept = self._tables.pop(key, (0, None, (None, None)))
        if rows < length or device != self._device.device:
            # Whole vectors only, since the last few numbers of an odd length could be rounded in another way.
            rows, device = math.ceil(length / 128) * 128, self._device.device
            with torch.inference_mode(False):  # a later training pass may use them too
                kept = self._stored(tables(torch.arange(rows, dtype=torch.float64)))
        self._tables[key] = rows, device, kept  # the last used stands last
        if len(self._tables) > self.KEPT_TABLES:
            self._tables.pop(next(iter(self._tables)))
        return kept

    def _stored(self, tables: Tables) -> Tables:
        first, second = (None if table is None else table.float().to(self._device.device) for table in tables)
        return first, second


def build_position(
    config: Mapping[str, Any], *, head_dim: int, n_head: int, train_length: int, n_layer: int = 1
) -> PositionScheme:
    """The scheme that `config` names (the keys of a file of configs/position/; a slot left out is none).

    Args:
        config: rotary, query_scale and logits, each {"kind": ..., and keys of that kind}; optionally reference_length
            (see Geometry) and allow_two_temperatures.
        head_dim: d; n_head: H; train_length: tokens in a training sequence; n_layer: layers with a query scale each.

    Raises ValueError for an unknown kind or key, a value out of range, and for a query scale of log(n) on top of
    scale-invariant logits, which both sharpen attention with length, unless allow_two_temperatures is true.
    """
    kinds = {slot: fill_defaults(slot, SLOTS[slot], config.get(slot))["kind"] for slot in SLOTS}
    doubled = kinds["query_scale"] == "logn" and kinds["logits"] == "scale_invariant"
    if doubled and not config.get("allow_two_temperatures"):
        raise ValueError(
            "position.query_scale.kind=logn and position.logits.kind=scale_invariant both sharpen attention with "
            "length; set one of them to none, or position.allow_two_temperatures=true if you mean it"
        )
    return PositionScheme(config, Geometry(head_dim, n_head, train_length, n_layer, config.get("reference_length")))


def fill_defaults(slot: str, kinds: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The kind of a slot and every key of it. Raises ValueError for an unknown kind or key."""
    given = {"kind": "none", **(given or {})}
    if given["kind"] not in kinds:
        raise ValueError(f"position.{slot}.kind={given['kind']} is unknown; choose one of: {', '.join(kinds)}")
    parameters = list(inspect.signature(kinds[given["kind"]]).parameters.values())[1:]  # the first is the geometry
    defaults = {parameter.name: parameter.default for parameter in parameters}
    for key, value in given.items():
        if key != "kind" and key not in defaults:
            known = f"its keys are: {', '.join(defaults)}" if defaults else "it has no keys"
            raise ValueError(f"position.{slot}.{key}={value} means nothing to kind={given['kind']}; {known}")
    for parameter in parameters:
        _check_type(
            f"position.{slot}.{parameter.name}", given.get(parameter.name, parameter.default), parameter.annotation
        )
    return {"kind": given["kind"], **defaults, **given}


def _check_type(key: str, value: Any, annotation: Any) -> None:
    """Of the annotations that a kind's keys have, the plain ones say it all; the others are checked by the kind."""
    numbers = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}
    accepted = (int, float) if annotation is float else annotation
    is_bool = isinstance(value, bool) and annotation is not bool  # which Python counts among the whole numbers
    if annotation in numbers and (is_bool or not isinstance(value, accepted)):
        raise ValueError(f"{key}={value} must be {numbers[annotation]}")
    if annotation is float and not math.isfinite(value):
        raise ValueError(f"{key}={value} must be finite")


def build_kind(slot: str, kinds: Mapping[str, Any], given: Mapping[str, Any] | None, geometry: Geometry) -> Any:
    """The object of a slot, from its kind and keys. Raises ValueError for an unknown kind or key, or a bad value."""
    keys = fill_defaults(slot, kinds, given)
    return kinds[keys.pop("kind")](geometry, **keys)
