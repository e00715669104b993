"""A position scheme is the choice of three slots. Everything that attention computes with them is

    L[h,i,j] = scale[h,t] * s[h,i] * <R_i q_i, R_j k_j> / sqrt(d) + shift[h,t],    t = i - j >= 0

`rotary` gives R, `query_scale` gives s, `logits` gives scale and shift; one file for each.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model.attend import Formula, Transform
from model.position import logits, query_scale, rotary
from model.position.plan import Geometry, Plan

SLOTS = {"rotary": rotary.KINDS, "query_scale": query_scale.KINDS, "logits": logits.KINDS}


class PositionScheme(nn.Module):
    """The three slots of one scheme; `plan(length)` is made once per forward pass and handed to every layer.

    Tables that nothing learned enters are computed in fp64, stored in fp32 and kept for the last few lengths. They are
    not in the state dict.
    """

    KEPT_TABLES = 8
    _device: Tensor

    def __init__(self, config: Mapping[str, Any], geometry: Geometry):
        super().__init__()
        self.rotary: rotary.NoRotation = build_kind("rotary", SLOTS["rotary"], config.get("rotary"), geometry)
        self.query_scale: nn.Module = build_kind(
            "query_scale", SLOTS["query_scale"], config.get("query_scale"), geometry
        )
        self.logits: nn.Module = build_kind("logits", SLOTS["logits"], config.get("logits"), geometry)
        self._tables: dict[tuple, Any] = {}
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
        device = self._device.device
        frequency, cos, sin = self._cached(self._rotation, inference_length)
        learned = next(self.logits.parameters(), None) is not None
        transform = (
            self._transform(inference_length, device) if learned else self._cached(self._transform, inference_length)
        )
        return Plan(
            length=length,
            angular_frequency=frequency,
            cos=None if cos is None else cos[start:length],
            sin=None if sin is None else sin[start:length],
            temperature=self.rotary.temperature(inference_length),
            query_scale=self.query_scale(start, length, inference_length),
            transform=_first(length, transform),
        )

    def _rotation(self, length: int, device: torch.device) -> tuple[Tensor | None, ...]:
        frequency = self.rotary.angular_frequency(length)
        if frequency is None:
            return None, None, None
        # At position 65535 an fp32 angle is off by 4e-3 radians; fp64 on the CPU costs little and exists everywhere.
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        return frequency, angle.cos().float().to(device), angle.sin().float().to(device)

    def _transform(self, length: int, device: torch.device) -> Transform | None:
        scale, shift = self.logits(torch.arange(length, dtype=torch.float64))
        if scale is None and shift is None:
            return None
        return Transform(
            scale=None if scale is None else scale.float().to(device),
            shift=None if shift is None else shift.float().to(device),
            formula=self._formula(device),
        )

    def _formula(self, device: torch.device) -> Formula | None:
        formula: Formula | None = getattr(self.logits, "formula", lambda: None)()
        return formula and Formula(formula.function, tuple(x.to(device) for x in formula.parameters))

    def _cached(self, make: Any, length: int) -> Any:
        device = self._device.device
        key = (make.__name__, length, device)
        if key not in self._tables:
            while len(self._tables) >= self.KEPT_TABLES:
                self._tables.pop(next(iter(self._tables)))
            with torch.inference_mode(False):  # a later training pass may use them too
                self._tables[key] = make(length, device)
        return self._tables[key]


def _first(length: int, transform: Transform | None) -> Transform | None:
    """The tables for distances under `length`; of longer ones, views."""
    if transform is None:
        return None
    scale, shift = transform.scale, transform.shift
    return replace(
        transform,
        scale=None if scale is None else scale[:, :length],
        shift=None if shift is None else shift[:, :length],
    )


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
