"""What runs say: arms over seeds, paired comparisons, verdicts."""
