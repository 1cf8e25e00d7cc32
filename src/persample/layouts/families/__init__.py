"""One layout rule per operator, in one file per family of operators.

Each file registers its rules with the table in ``layouts/operators.py`` when it is imported. An
operator that is not in any of them mixes the samples.
"""
