"""Checks that only refuse: without them, every correct program gives the same numbers.

They notice contents that changed, masks that were opened, numbers that left torch in backward and
backward passes that do not repeat, and they say so in the words of ``messages.py``.
"""
