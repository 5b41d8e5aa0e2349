"""Which rule and rates for a federation: what is asked, the search by successive halving, the test, the advice."""
