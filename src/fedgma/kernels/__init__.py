"""Inner loops, chosen by device: same results as the plain path, to the bit for votes and masks."""
