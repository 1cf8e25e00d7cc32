"""The command line: ``persample inspect``, ``persample verify`` and ``persample explain``."""
