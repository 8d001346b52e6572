"""Decide, with numbers anyone can trust, whether a quantized language model ships."""

__version__ = "0.1.0"
