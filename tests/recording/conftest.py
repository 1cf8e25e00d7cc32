"""What tests of recordings share."""

from __future__ import annotations

from typing import Any

import pytest

from persample.recording.dispatch import Dispatch


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of calls that are handled in full."""
    found: list[str] = []
    handle = Dispatch.handle

    def noting(self: Dispatch, operator: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(operator.name)
        return handle(self, operator, func, args, kwargs)

    monkeypatch.setattr(Dispatch, "handle", noting)
    return found
