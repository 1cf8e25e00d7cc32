"""Every cause of a needless refusal: ``python -m tests.third_party.causes`` prints the outcomes."""

from __future__ import annotations

import sys
import warnings

from . import causes_of_backward, causes_of_flow, causes_of_state
from .cause import CAUSES
from .judge import judge

__all__ = ["CAUSES", "causes_of_backward", "causes_of_flow", "causes_of_state"]


def main() -> int:
    """Print every row's outcome; whether all are as the table says."""
    warnings.simplefilter("ignore")
    broken = 0
    for each in CAUSES:
        verdict = judge(each.row)
        broken += verdict.kind != each.today
        flag = " " if verdict.kind == each.today else "!"
        print(f"{flag} {verdict.kind:<18} step {verdict.step}  {each.row.name}: {verdict.detail}")
        for key, text in (verdict.refusal or {}).items():
            print(f"      {key}: {text}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
