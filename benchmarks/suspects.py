"""Do gradients find wrong labels? ``python -m benchmarks.suspects``."""

from .measure.suspects import main

if __name__ == "__main__":
    main()
