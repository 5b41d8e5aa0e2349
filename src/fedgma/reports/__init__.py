"""Reports from run folders: summaries, comparisons, tables, figures and pages. Needs no torch."""
