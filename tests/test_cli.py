"""The command line."""

from __future__ import annotations

import pytest

from persample.cli import main


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["verify", "tests.steps:good"], 0, "passed", ""),
        (["explain", "tests.steps:good"], 0, "weight", ""),
        (["verify", "tests.steps:mixing"], 1, "", "BatchNorm"),
        (["verify", "tests.steps:coupled"], 1, "FAILED", ""),
        (["verify", "tests.steps:odd"], 2, "", "must return"),
        (["verify", "tests.steps:nothing"], 2, "", "no function"),
        (["verify", "tests.nowhere:step"], 2, "", "no module"),
        (["verify", "steps"], 2, "", "module:function"),
    ],
)
def test_commands(
    arguments: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    seen = capsys.readouterr()
    assert out in seen.out
    assert err in seen.err
    assert "Traceback" not in seen.err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "examples" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
