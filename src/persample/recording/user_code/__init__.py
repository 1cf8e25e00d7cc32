"""Hooks and custom autograd functions of the user, followed through forward and backward."""
