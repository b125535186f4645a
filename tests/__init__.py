"""Tests; they mirror the package. See docs/testing.md for the kinds and how to run them."""
