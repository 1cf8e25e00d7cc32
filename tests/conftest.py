"""One option for the device of the whole suite: ``pytest --device cuda``."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where tests make their tensors and models (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device is not None:
        torch.set_default_device(device)  # before the tests are imported: some make tensors then


def pytest_report_header(config: pytest.Config) -> str:
    return f"device: {torch.get_default_device()}"
