"""Programs that measure, and where their results are kept."""
