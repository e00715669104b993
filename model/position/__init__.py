"""Position schemes: three slots, one equation (see scheme.py)."""

from model.position.plan import Plan
from model.position.scheme import PositionScheme, build_position

__all__ = ["Plan", "PositionScheme", "build_position"]
