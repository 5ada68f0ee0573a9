"""Measurements of speed, overhead, memory and learning. `python -m benchmarks --help` and `benchmarks.learning`."""
