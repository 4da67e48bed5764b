"""The nine benchmarks of the report through lm-evaluation-harness."""
