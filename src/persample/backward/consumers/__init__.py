"""What is done with the forms of each use while backward runs, besides keeping them all."""
