"""Which tensors hold samples, on which axis, and how many samples there are.

Read off the arguments of the outermost module call, or given by the user.
"""
