"""Aggregation of many runs at once, run axis first."""
