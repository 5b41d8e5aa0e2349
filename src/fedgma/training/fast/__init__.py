"""Hand-written parts that are faster than the generic path; each says by how much."""
