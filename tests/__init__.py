"""raydist's tests."""
