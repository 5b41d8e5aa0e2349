"""A small model on Flower whose processes are killed."""
