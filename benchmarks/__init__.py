"""Benchmarks: one script a question, each with its baseline measured in the same run.

`python -m benchmarks.run_all` runs them all from the repository's root; `python -m benchmarks.bench_NAME --help` says
what one of them can be told. Results lie in `benchmarks/results/`.
"""
