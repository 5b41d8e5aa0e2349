"""Damaged and crafted bytes of tallies: none may be accepted, none may take long.

    python benchmarks/faults/corrupt_tallies.py --count 100000 --workers 16

Half of the cases are accidents (flipped bits, truncations, splices of two tallies, zeros), half are crafted with a
checksum that fits: headers of millions of bytes, shapes whose product has a million digits, more votes than clients,
votes against the sum, weights of 1e-300, tables of arrays that are not there. Reading must raise `fedgma.DataError`
with a short message, within a second; every sixteenth case is also measured to take less than 100 MB. A case is drawn
from its number: `--first N --count 1` repeats case N. The cases are in tests/helpers/damaged_tallies.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import campaign
import damaged_tallies

if __name__ == "__main__":
    campaign.main(damaged_tallies.run_case, "damaged tallies accepted or read wrongly", __doc__, count=100_000)
