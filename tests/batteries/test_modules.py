"""PyTorch's module database on every run."""

from __future__ import annotations

from typing import Any

import pytest

from .. import modules


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", modules.infos()[::2], ids=lambda info: info.name)
def test_exact_or_refused(info: Any) -> None:
    assert modules.attack(info)["wrong"] == 0
