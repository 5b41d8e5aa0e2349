"""Statistics over runs: arms over seeds, paired comparisons, verdicts."""
