"""Examples for offline training: rows of data sets read by their columns, tokenised once, cached and reported."""
