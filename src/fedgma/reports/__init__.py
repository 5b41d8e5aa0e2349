"""Reports: run folders to summaries, comparisons, tables, pictures and pages; needs no torch."""
