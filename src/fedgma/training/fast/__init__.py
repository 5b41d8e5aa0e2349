"""Hand-written parts that are faster than the generic path; only `choose` imports them.

Each module's docstring says what it buys: time without it over time with it, as `benchmarks/bench_parts.py` measures
it. A part that buys less than a tenth is removed.
"""
