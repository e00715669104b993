"""The one door to attention: `attend(q, k, v, transform, backend)`, and one file per backend."""

from model.attend.dispatch import BACKENDS, attend, check_backend, check_trainable
from model.attend.transform import Formula, Transform

__all__ = ["BACKENDS", "Formula", "Transform", "attend", "check_backend", "check_trainable"]
