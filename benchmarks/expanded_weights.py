"""The drop-in beside PyTorch's own: ``python -m benchmarks.expanded_weights``."""

from .measure.expanded_weights import main

if __name__ == "__main__":
    main()
