"""Models of other packages, unmodified and small, against one sample at a time."""
