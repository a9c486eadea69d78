"""A program that is a package."""
