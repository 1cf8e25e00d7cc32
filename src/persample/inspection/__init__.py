"""Inspect a data set: one pass, a report, a page."""

from .compare import Comparison, Snapshot, load
from .entry import inspect
from .likeness import Group
from .report import Report
from .show import Show

__all__ = ["Comparison", "Group", "Report", "Show", "Snapshot", "inspect", "load"]
