"""Tables and plots of the results."""
