"""Rebuild every table and plot from the committed results: ``python -m benchmarks.tables``."""

from .report.tables import main

if __name__ == "__main__":
    main()
