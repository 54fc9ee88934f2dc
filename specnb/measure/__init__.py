"""Measuring: generations over a grid, what forwards cost, and from a result file to an answer and a figure."""
