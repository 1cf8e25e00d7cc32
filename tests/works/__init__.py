"""What persample works with: one case per pattern, each of them a row of docs/works-with.md."""
