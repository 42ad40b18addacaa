"""Examples for offline training: rows of datasets read by their columns, tokenised once, cached and reported."""
