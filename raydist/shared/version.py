"""The version of this package. (either side)"""

__version__ = "0.1.0"
