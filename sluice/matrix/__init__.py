"""The matrix mechanism: noise correlated over steps, so that the sums that training uses are known better."""
