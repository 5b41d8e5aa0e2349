"""Data sets and their division among clients: files, partitions, shifts, pools."""
