"""Which guard ever looks, refuses, and is the only one to: ``python -m tests.guard_table``."""
