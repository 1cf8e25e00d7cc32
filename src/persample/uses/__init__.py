"""What a recording knows: parameters, the states of tensors, and uses of parameters.

A use is one call of an operator in which a parameter interacts with samples. Its tap brings the
output gradient in backward. Everything above this package reads or makes these objects.
"""
