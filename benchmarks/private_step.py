"""A private step against a plain one: ``python -m benchmarks.private_step``."""

from .measure.private_step import main

if __name__ == "__main__":
    main()
