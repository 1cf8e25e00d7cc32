"""``python -m persample``."""

import sys

from .command_line.cli import main

if __name__ == "__main__":
    sys.exit(main())
