"""Samples and who holds them: files, partitions, shifts, pools."""
