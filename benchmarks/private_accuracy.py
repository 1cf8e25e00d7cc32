"""Accuracy of private training beside Opacus: ``python -m benchmarks.private_accuracy``."""

from .measure.private_accuracy import main

if __name__ == "__main__":
    main()
