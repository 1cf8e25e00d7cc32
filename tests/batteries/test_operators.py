"""A part of the operator database on every run; ``make ops`` runs all of it."""

from __future__ import annotations

from typing import Any

import pytest

from .. import operators

EVERY = 6
ENTRIES = operators.entries()[::EVERY]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", ENTRIES, ids=lambda op: f"{op.name}.{op.variant_test_name}")
def test_exact_or_refused(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SAMPLES_PER_ENTRY", 3)
    assert operators.attack(op)["wrong"] == 0
