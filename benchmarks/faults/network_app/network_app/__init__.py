"""A Flower app for the tests of network faults."""
