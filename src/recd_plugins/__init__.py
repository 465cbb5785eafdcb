"""Plugins that make TorchRec training cheaper and leave it exactly what it was."""

from __future__ import annotations

__version__ = "0.1.0"
